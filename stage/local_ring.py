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
from collections.abc import Sequence

import torch

from coordinator.errors import ClusterTooSmall, RingLost
from coordinator.frames import Epoch, Frame, Reply
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
        self._threads: list[_StageThread] = []

    async def start(self, progress: ProgressSink) -> RingInfo:
        """A second start ends what the first one made."""
        await self.stop()
        devices = _devices(self._config)
        loop = asyncio.get_running_loop()

        def tell(news: StageProgress) -> None:
            loop.call_soon_threadsafe(progress, news)

        loading = [
            asyncio.to_thread(build_stage, self._config, index, device, tell, self._config.stages)
            for index, device in enumerate(devices)
        ]
        # All loaders end before the first one's error leaves: nothing loads on behind the caller's back.
        results = await asyncio.gather(*loading, return_exceptions=True)
        built = [_unless_failed(result) for result in results]
        self._info = ring_info(self._config, [report for _, report in built])
        for stage, _ in built:
            stage.join(self._info.state_rows)
        self._run([stage for stage, _ in built])
        return self._info

    def capacity(self) -> RingInfo:
        if self._info is None:
            raise RingLost(None, "not started")
        return self._info

    async def open_epoch(self, epoch: Epoch) -> None:
        replies = self._running()
        replies.open_epoch(epoch)
        await asyncio.gather(
            *(asyncio.to_thread(thread.stage.open_epoch, epoch) for thread in self._threads)
        )
        replies.check()

    def submit(self, frame: Frame) -> None:
        replies = self._running()
        self._threads[0].inlet.send(FrameMessage(replies.epoch, frame))

    async def next_reply(self) -> Reply:
        return await self._running().next()

    def health(self) -> RingHealth:
        if self._replies is None:
            return RingHealth(False, "not started")
        return RingHealth(self._replies.loss is None, self._replies.loss or "")

    async def stop(self) -> None:
        if self._replies is not None:
            self._replies.fail(None, "stopped")
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.inlet.close()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        self._replies = None

    def _running(self) -> ReplyQueue:
        if self._replies is None:
            raise RingLost(None, "not started")
        self._replies.check()
        return self._replies

    def _run(self, stages: Sequence[Stage]) -> None:
        self._replies = ReplyQueue(on_lost=self._halt)
        outlet: Outlet = _ReplyOutlet(self._replies)
        for stage in reversed(stages):
            thread = _StageThread(stage, outlet, self._replies)
            self._threads.insert(0, thread)
            outlet = thread.inlet
        for thread in self._threads:
            thread.start()

    def _halt(self) -> None:
        for thread in self._threads:
            thread.inlet.close()


class _QueueInlet:
    """Inlet and Outlet in one: what one thread sends, another one receives."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self._closed = threading.Event()

    def send(self, message: FrameMessage | ReplyMessage) -> None:
        self._queue.put(Delivery(time.time(), message))

    def receive(self) -> Delivery | None:
        delivery = self._queue.get()
        return None if self._closed.is_set() else delivery

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
        self._outlet = outlet
        self._replies = replies

    def run(self) -> None:
        try:
            run_stage(self.stage, self.inlet, self._outlet)
        except RingLost as error:
            self._replies.lose(error.stage, error.reason)
        finally:
            self.stage.close()


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
