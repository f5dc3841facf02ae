"""A ring whose stages are threads of this process.

Decides how threads are started, fed and ended. It may not import ray, and copies nothing: a thread hands its tensors to
the next one through a queue. Real models, for tests and for a machine without a cluster.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from coordinator.errors import ClusterTooSmall, RingLost, SetupError
from coordinator.frames import Epoch, Frame, Reply
from coordinator.held import Holding, held_by_all
from coordinator.ring import ProgressSink, RingHealth, RingInfo, StageProgress
from stage.build import StageReport, build_stage, ring_info
from stage.config import RingConfig
from stage.loop import run_stage
from stage.messages import Delivery, FrameMessage, Outlet, ReplyMessage
from stage.replies import ReplyQueue
from stage.stage import Stage

log = logging.getLogger(__name__)


class LocalRing:
    """Implements coordinator.ring.Ring. Belongs to the event loop that it was started on."""

    def __init__(self, config: RingConfig) -> None:
        self._config = config
        self._info: RingInfo | None = None
        self._replies: ReplyQueue | None = None
        self._progress: ProgressSink = _ignored
        self._stages: list[Stage | None] = []  # None: lost
        self._threads: list[_StageThread] = []
        self._replaced = 0

    async def start(self, progress: ProgressSink) -> RingInfo:
        """A second start ends what the first one made."""
        await self.stop()
        self._progress = progress
        # All loaders end before the first one's error leaves: nothing loads on behind the caller's back.
        results = await asyncio.gather(
            *(self._build(index) for index in range(self._config.stages)), return_exceptions=True
        )
        built = [_unless_failed(result) for result in results]
        self._info = ring_info(self._config, [report for _, report in built])
        for stage, _ in built:
            stage.join(self._info.state_rows)
        self._replies = ReplyQueue(on_lost=self._halt)
        self._stages = [stage for stage, _ in built]
        self._run([stage for stage, _ in built])
        return self._info

    async def _build(self, index: int) -> tuple[Stage, StageReport]:
        """Raises SetupError."""
        device = _devices(self._config)[index]
        loop = asyncio.get_running_loop()

        def tell(news: StageProgress) -> None:
            loop.call_soon_threadsafe(self._progress, news)

        return await asyncio.to_thread(
            build_stage, self._config, index, device, tell, self._config.stages
        )

    def capacity(self) -> RingInfo:
        if self._info is None:
            raise RingLost(None, "not started")
        return self._info

    async def open_epoch(self, epoch: Epoch) -> Holding:
        replies = self._started()
        await self._rest()
        stages = [await self._whole(index) for index in range(self._config.stages)]
        # Behind every wait: whoever is cancelled before has changed nothing that the next call would not find.
        held = held_by_all([stage.holding() for stage in stages])
        for stage in stages:
            stage.open_epoch(epoch, held)
        replies.open_epoch(epoch)
        self._run(stages)
        return held

    async def _rest(self) -> None:
        """Ends the threads, not their stages; one that does not end in time is lost, and left to itself."""
        self._halt()
        for index, thread in enumerate(self._threads):
            await asyncio.to_thread(thread.join, self._config.rest_s)
            if thread.broke or thread.is_alive():
                self._stages[index] = None
        self._threads = []

    async def _whole(self, index: int) -> Stage:
        """The stage, built anew if it was lost. Raises RingLost."""
        stage = self._stages[index]
        if stage is not None:
            return stage
        log.warning("rebuilding stage=%d", index)
        try:
            stage, _ = await self._build(index)
        except SetupError as error:
            raise RingLost(index, f"could not be replaced: {error}") from error
        stage.join(self.capacity().state_rows)
        self._stages[index] = stage
        self._replaced += 1
        return stage

    def submit(self, frame: Frame) -> None:
        replies = self._running()
        self._threads[0].inlet.send(FrameMessage(replies.epoch, frame))

    async def next_reply(self) -> Reply:
        return await self._running().next()

    def health(self) -> RingHealth:
        if self._replies is None:
            return RingHealth(False, "not started")
        loss = self._replies.loss
        return RingHealth(loss is None, loss or "", replaced=self._replaced)

    async def stop(self) -> None:
        if self._replies is not None:
            self._replies.fail(None, "stopped")
        self._halt()
        threads, self._threads = self._threads, []
        for thread in threads:
            await asyncio.to_thread(thread.join, self._config.rest_s)
        # One that computes on is left to itself: the process ends without it.
        busy = [thread.stage for thread in threads if thread.is_alive()]
        stages, self._stages = self._stages, []
        for stage in stages:
            if stage is not None and stage not in busy:
                await asyncio.to_thread(stage.close)
        self._replies = None

    # Trouble, for who wants to see what follows

    def fail(self, stage: int) -> None:
        """The stage is lost before its next frame, as by an error in computing."""
        self._plant(stage, partial(_fail, stage))

    def hold_up(self, stage: int, seconds: float) -> None:
        """The stage waits before its next frame."""
        self._plant(stage, partial(time.sleep, seconds))

    def _plant(self, stage: int, trouble: Callable[[], None]) -> None:
        if self._threads:
            self._threads[stage].inlet.plant(trouble)

    def _started(self) -> ReplyQueue:
        if self._replies is None:
            raise RingLost(None, "not started")
        return self._replies

    def _running(self) -> ReplyQueue:
        replies = self._started()
        replies.check()
        return replies

    def _run(self, stages: Sequence[Stage]) -> None:
        replies = self._started()
        outlet: Outlet = _ReplyOutlet(replies)
        for stage in reversed(stages):
            thread = _StageThread(stage, outlet, replies)
            self._threads.insert(0, thread)
            outlet = thread.inlet
        for thread in self._threads:
            thread.start()

    def _halt(self) -> None:
        for thread in self._threads:
            thread.inlet.close()


def _ignored(progress: StageProgress) -> None:
    pass


def _fail(stage: int) -> None:
    raise RingLost(stage, "failed as it was told to")


class _QueueInlet:
    """Inlet and Outlet in one: what one thread sends, another one receives."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Delivery | Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = threading.Event()

    def send(self, message: FrameMessage | ReplyMessage) -> None:
        self._queue.put(Delivery(time.time(), message))

    def plant(self, trouble: Callable[[], None]) -> None:
        self._queue.put(trouble)

    def receive(self) -> Delivery | None:
        """Raises what was planted."""
        while True:
            found = self._queue.get()
            if self._closed.is_set():
                return None
            if found is None or isinstance(found, Delivery):
                return found
            found()

    def close(self) -> None:
        self._closed.set()
        self._queue.put(None)


class _ReplyOutlet:
    def __init__(self, replies: ReplyQueue) -> None:
        self._replies = replies

    def send(self, message: FrameMessage | ReplyMessage) -> None:
        assert isinstance(message, ReplyMessage)
        self._replies.push(message)


class _StageThread(threading.Thread):
    def __init__(self, stage: Stage, outlet: Outlet, replies: ReplyQueue) -> None:
        super().__init__(name=f"stage-{stage.index}", daemon=True)
        self.stage = stage
        self.inlet = _QueueInlet()
        self.broke = False  # nobody knows what the stage's rows hold
        self._outlet = outlet
        self._replies = replies
        self._epoch = replies.epoch

    def run(self) -> None:
        try:
            run_stage(self.stage, self.inlet, self._outlet)
        except RingLost as error:
            self.broke = True
            self.stage.close()
            self._replies.lose(error.stage, error.reason, self._epoch)


def _unless_failed(result: tuple[Stage, StageReport] | BaseException) -> tuple[Stage, StageReport]:
    if isinstance(result, BaseException):
        raise result
    return result


def _devices(config: RingConfig) -> list[str]:
    """One GPU a stage, or the CPU for all. Raises ClusterTooSmall."""
    if config.device == "cpu":
        return ["cpu"] * config.stages
    found = torch.cuda.device_count()
    if found < config.stages:
        raise ClusterTooSmall(wanted=f"{config.stages} GPUs", available=f"{found} on this host")
    return [f"cuda:{index}" for index in range(config.stages)]
