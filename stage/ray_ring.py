"""A ring of Ray actors, one a stage, whose frames travel over ZeroMQ.

Decides placement, start-up, what counts as a loss, and who ends what. Ray owns life and calls; no frame goes
through it. It ends only what it started: its actors, its placement group, its sockets, and Ray if it started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import threading
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coordinator.errors import RingLost, SetupError
from coordinator.frames import Epoch, Frame, Reply
from coordinator.ring import ProgressSink, RingHealth, RingInfo, StageProgress
from stage.actor import CONCURRENT_CALLS, LoadFailure, LoopEnd, Place, StageActor
from stage.build import StageReport, ring_info
from stage.config import RingConfig
from stage.messages import FrameMessage, ReplyMessage
from stage.placement import Share, along_nodes, share_of
from stage.processes import await_exits
from stage.replies import ReplyQueue
from stage.transport import Endpoint, Link, Listener, Sender, private_folder

log = logging.getLogger(__name__)

# Ray's smallest; frames do not pass through its object store.
_OBJECT_STORE_BYTES = 80_000_000
# Resources that another ring has just given back show up again after a moment.
_PLACEMENT_S = 10.0
_PROGRESS_EVERY_S = 0.2
# To find out that nobody listens at a given address.
_REACH_S = 5.0
# A killed process ends within milliseconds, unless the kernel has much memory to take back.
_EXIT_S = 5.0


class RayCluster:
    """A Ray that several rings of this process share; the last one to leave ends it if it was started here."""

    def __init__(self, address: str | None = None) -> None:
        """`address`: an existing cluster; None starts a small one of our own on this host."""
        self._address = address
        self._users = 0
        self._is_ours = False
        self._changing = asyncio.Lock()

    async def acquire(self) -> None:
        """Raises SetupError."""
        async with self._changing:
            if self._users == 0:
                await self._connect_once()
            self._users += 1

    async def release(self) -> None:
        async with self._changing:
            self._users -= 1
            if self._users == 0:
                await self._leave()

    async def _connect_once(self) -> None:
        # In a thread: it takes seconds, and on the main thread Ray would take over SIGTERM. A local Ray dies with
        # the thread that started it (PR_SET_PDEATHSIG); the loop's executor keeps its threads until the loop closes.
        connecting = asyncio.create_task(asyncio.to_thread(self._connect))
        try:
            await asyncio.shield(connecting)
        except asyncio.CancelledError:
            # The thread goes on whoever is cancelled; what it starts is not left behind.
            await asyncio.wait([connecting])
            await self._leave()
            raise

    async def _leave(self) -> None:
        if self._is_ours:
            self._is_ours = False
            await asyncio.to_thread(ray.shutdown)

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        try:
            if self._address is None:
                _start_local()
            else:
                _reach(self._address)
                ray.init(self._address, logging_level=logging.ERROR, log_to_driver=False)
        except (OSError, RuntimeError, ValueError, RayError) as error:
            raise SetupError(f"no Ray at {self._address or 'this host'}: {error}") from error
        self._is_ours = True


def _reach(address: str) -> None:
    """Raises OSError: Ray itself would try for minutes, in a call that nothing can interrupt."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S):
            return


def _start_local() -> None:
    ray.init(
        "local",
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level=logging.ERROR,
        log_to_driver=False,
        # Idle workers for calls that nobody makes: 85 MB.
        _system_config={
            "enable_worker_prestart": False,
            "prestart_worker_first_driver": False,
            # Ray makes its workers nice by 15: right for batch jobs, wrong for a stage that a client waits for.
            "worker_niceness": 0,
        },
    )


class RayRing:
    """Implements coordinator.ring.Ring. Belongs to the event loop that it was started on."""

    def __init__(self, config: RingConfig, cluster: RayCluster | None = None) -> None:
        self._config = config
        self._cluster = cluster or RayCluster()
        self._info: RingInfo | None = None
        self._started: _Started | None = None

    async def start(self, progress: ProgressSink) -> RingInfo:
        """A second start ends what the first one made."""
        await self.stop()
        await self._cluster.acquire()
        started = _Started()
        try:
            await _place(self._config, started)
            started.places = await _ask(started.actors, "place")
            reports = await _load(started, progress)
            self._info = ring_info(self._config, reports)
            await started.open(self._info.state_rows)
        except BaseException as error:
            await self._end(started)
            if isinstance(error, RayError):
                raise SetupError(f"a stage could not be started: {_in_a_line(error)}") from error
            raise
        self._started = started
        return self._info

    def capacity(self) -> RingInfo:
        if self._info is None:
            raise RingLost(None, "not started")
        return self._info

    async def open_epoch(self, epoch: Epoch) -> None:
        started = self._running()
        started.replies.open_epoch(epoch)
        try:
            await _ask(started.actors, "open_epoch", epoch)
        except RayError as error:
            started.replies.fail(None, f"epoch {epoch} could not be opened: {_in_a_line(error)}")
        started.replies.check()

    def submit(self, frame: Frame) -> None:
        started = self._running()
        started.sender.send(FrameMessage(started.replies.epoch, frame))

    async def next_reply(self) -> Reply:
        return await self._running().replies.next()

    def health(self) -> RingHealth:
        if self._started is None:
            return RingHealth(False, "not started")
        loss = self._started.replies.loss
        return RingHealth(loss is None, loss or "")

    async def stop(self) -> None:
        started, self._started = self._started, None
        if started is not None:
            await self._end(started)

    async def _end(self, started: _Started) -> None:
        try:
            await started.end()
        finally:
            await self._cluster.release()

    @property
    def pids(self) -> tuple[int, ...]:
        """The actors' processes, in the order of the stages."""
        return () if self._started is None else tuple(place.pid for place in self._started.places)

    def _running(self) -> _Started:
        if self._started is None:
            raise RingLost(None, "not started")
        self._started.replies.check()
        return self._started


class _Started:
    """What a start has made so far: whatever happens next, `end` undoes it."""

    def __init__(self) -> None:
        self.group: PlacementGroup | None = None
        self.actors: list[Any] = []
        self.places: list[Place] = []
        self.endpoints: tuple[Endpoint, ...] = ()  # where each stage and then we are reached
        self.replies = ReplyQueue(on_lost=self._tell_all)
        self._link = Link()
        self._sender: Sender | None = None
        self._folder: Path | None = None
        self._watchers: list[asyncio.Task[None]] = []

    @property
    def sender(self) -> Sender:
        assert self._sender is not None
        return self._sender

    async def open(self, state_rows: int) -> None:
        """Binds and connects all sockets, then lets the stages run."""
        stages, replies = await self._bind()
        self.endpoints = (*stages, replies)
        self._link.admit(stages[-1].public)
        previous = [replies.public, *(stage.public for stage in stages[:-1])]
        calls = zip(self.actors, previous, [*stages[1:], replies], strict=True)
        # Each knows its predecessor before anybody connects: the door stays closed to all others.
        await asyncio.gather(
            *(actor.connect.remote(key, to, state_rows) for actor, key, to in calls)
        )
        self._sender = self._link.connect(stages[0])
        self._watchers = [
            asyncio.create_task(self._watch(index, actor.run.remote()))
            for index, actor in enumerate(self.actors)
        ]

    async def _bind(self) -> tuple[list[Endpoint], Endpoint]:
        """By node, not by host: only what Ray counts as one node surely shares a file system."""
        here = ray.get_runtime_context().get_node_id()
        if all(place.node == here for place in self.places):
            self._folder = private_folder()
            where: list[Path | str] = [self._folder / str(n) for n in range(len(self.places))]
            replies = self._listen(self._folder / "replies")
        else:
            where = [place.host for place in self.places]
            replies = self._listen(ray.util.get_node_ip_address())
        binding = zip(self.actors, where, strict=True)
        stages = await asyncio.gather(*(actor.bind.remote(at) for actor, at in binding))
        return list(stages), replies

    def _listen(self, where: Path | str) -> Endpoint:
        """The listener belongs to its thread from the start: closing the link waits for it to be closed there."""
        listener = self._link.listen(where)
        threading.Thread(
            target=_read, args=(listener, self.replies), name="replies", daemon=True
        ).start()
        return listener.endpoint

    async def _watch(self, index: int, running: Awaitable[LoopEnd]) -> None:
        """Waits for the end of a stage's loop, or of its process."""
        try:
            end = await running
        except RayError as error:
            if self.replies.loss is None:
                log.warning("lost stage=%d pid=%d", index, self.places[index].pid)
            self.replies.fail(index, f"its process died ({type(error).__name__})")
        else:
            self.replies.fail(end.stage, end.reason or "its loop ended")

    def _tell_all(self) -> None:
        """Ends every loop: only a lost stage's neighbours would notice by themselves."""
        for actor in self.actors:
            actor.stop.remote()

    def _pids_here(self) -> list[int]:
        """A process of another host dies unseen: its number means nothing here."""
        here = ray.util.get_node_ip_address()
        return [place.pid for place in self.places if place.host == here]

    async def end(self) -> None:
        was_lost = self.replies.loss is not None
        self.replies.fail(None, "stopped")
        if self._watchers and not was_lost:
            # Told to stop, a loop ends at once, or once it has written what was on its way to the disk.
            await asyncio.wait(self._watchers, timeout=_EXIT_S)
        with contextlib.suppress(RayError):
            for actor in self.actors:
                ray.kill(actor)
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.to_thread(await_exits, self._pids_here(), _EXIT_S)
        if self.group is not None:
            remove_placement_group(self.group)
        if self._sender is not None:
            self._sender.close()
        await asyncio.to_thread(self._link.close)
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, True)


def _read(listener: Listener, replies: ReplyQueue) -> None:
    """The thread that waits for the tail."""
    while (delivery := listener.receive()) is not None:
        if isinstance(delivery.message, ReplyMessage):
            replies.push(delivery.message)
        else:
            replies.lose(None, "the tail sent something that is no reply")


def _in_a_line(error: RayError) -> str:
    """Ray's errors carry whole tracebacks as their text."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"


# Placement and loading


async def _place(config: RingConfig, started: _Started) -> None:
    """Raises ClusterTooSmall, at once when the whole cluster has less than is wanted."""
    share = share_of(config)
    share.check(ray.cluster_resources())
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    strategy = share.strategy(config.spread, nodes)
    started.group = placement_group([share.resources] * config.stages, strategy=strategy)
    if not await asyncio.to_thread(started.group.wait, _PLACEMENT_S):
        share.check(ray.available_resources())
        raise share.too_much("no room on its nodes")
    placed = placement_group_table(started.group)["bundles_to_node_id"]
    here = ray.get_runtime_context().get_node_id()
    for index, bundle in enumerate(along_nodes([placed[n] for n in sorted(placed)], here)):
        started.actors.append(_make_actor(config, index, share, started.group, bundle))


def _make_actor(
    config: RingConfig, index: int, share: Share, group: PlacementGroup, bundle: int
) -> Any:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return (
        ray.remote(StageActor)
        .options(
            num_cpus=share.resources.get("CPU", 0),
            num_gpus=share.resources.get("GPU", 0),
            max_concurrency=CONCURRENT_CALLS,
            scheduling_strategy=strategy,
            # A checkout is on no host's import path by itself.
            runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}},
        )
        .remote(config, index)
    )


async def _load(started: _Started, progress: ProgressSink) -> list[StageReport]:
    """Raises the SetupError of the first stage that failed, once all have ended."""
    actors = started.actors
    telling = asyncio.create_task(_tell_progress(actors, progress))
    try:
        nodes = [place.node for place in started.places]
        loads = (a.load.remote(nodes.count(node)) for a, node in zip(actors, nodes, strict=True))
        results = await asyncio.gather(*loads)
    finally:
        telling.cancel()
        await asyncio.wait([telling])
    failure = next((result for result in results if isinstance(result, LoadFailure)), None)
    if failure is not None:
        raise failure.error(failure.message)
    for last in await _ask(actors, "progress"):
        progress(last)
    return results


async def _tell_progress(actors: Sequence[Any], progress: ProgressSink) -> None:
    told: list[StageProgress | None] = [None] * len(actors)
    with contextlib.suppress(RayError):
        while True:
            for index, news in enumerate(await _ask(actors, "progress")):
                if news != told[index]:
                    told[index] = news
                    progress(news)
            await asyncio.sleep(_PROGRESS_EVERY_S)


async def _ask(actors: Sequence[Any], method: str, *arguments: object) -> list[Any]:
    """Calls a method of all stages at once; raises RayError at the first that does not answer."""
    calls = (getattr(actor, method).remote(*arguments) for actor in actors)
    return list(await asyncio.gather(*calls))
