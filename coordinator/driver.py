"""The async shell around one ring's scheduler: the only coordinator file with tasks, and with timers but readers.py.

It carries out the scheduler's actions and turns what happens (replies, timers, losses, callers)
into events. It decides nothing: every decision is the scheduler's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from coordinator import events
from coordinator.chain_records import NodeStatus
from coordinator.clock import Clock, Timer, slept
from coordinator.config import SchedulerSettings
from coordinator.counts import RingCounts
from coordinator.drafters import Drafter, DrafterFactory
from coordinator.drafters.ngram import ngram_drafter
from coordinator.drafters.none import NoDrafter
from coordinator.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidValue,
    RingLost,
    RingserveError,
    RingUnavailable,
    StageLost,
)
from coordinator.foresight import Wish
from coordinator.frames import Epoch, JobId, NodeId, Seq
from coordinator.lanes import LaneStatus
from coordinator.observe import RingObserver, RingWatch
from coordinator.opening import broken, failed, opened, replied
from coordinator.overload import Healing
from coordinator.readers import Reader
from coordinator.requests import Finished, Request, SessionId, TokenDelta
from coordinator.ring import ProgressSink, Ring, RingHealth, RingInfo
from coordinator.ring_log import RingLog
from coordinator.scheduler import Scheduler
from coordinator.status import RingStatus
from coordinator.streams import JobStream

_log = logging.getLogger(__name__)

# How often it is looked whether idle lanes are written back.
_SETTLE_CHECK_S = 0.05


@dataclass(slots=True)
class _Job:
    """What the shell holds of a job that has not ended."""

    stream: JobStream
    drafter: Drafter
    session: SessionId | None
    deadline: Timer | None = None
    decodes: bool = False  # it has a token


class RingDriver:
    """Owns one ring from start to stop. All calls come from one event loop."""

    def __init__(
        self,
        name: str,
        ring: Ring,
        settings: SchedulerSettings,
        clock: Clock,
        drafters: DrafterFactory = ngram_drafter,
        observers: Sequence[RingObserver] = (),
    ) -> None:
        self.name = name
        self._watch = RingWatch(name, (RingLog(), *observers))
        self._drafters = drafters
        self._ring = ring
        self._settings = settings
        self._clock = clock
        self._scheduler: Scheduler | None = None
        self._info: RingInfo | None = None
        self._next_job = JobId(0)
        self._jobs: dict[JobId, _Job] = {}
        self._watched: tuple[Epoch, Seq] | None = None  # whose reply is due next
        self._overdue: Timer | None = None
        self._reader: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._events: deque[events.Event] = deque()
        self._handling = False
        self._draining = False
        self._loss = ""  # what ended the last epoch
        self._away = Healing()  # while it loads, and then whenever it heals

    async def start(self, progress: ProgressSink) -> RingInfo:
        """Raises SetupError and leaves nothing behind."""
        begun = self._clock.now()
        self._away.look(begun, heals=True)
        info = await self._ring.start(progress)
        self._info = info
        self._scheduler = Scheduler(self.name, info, self._settings)
        self._away, health = self._scheduler.gate.healing, self._ring.health()
        if not health.spares:
            self._away.expect(self._clock.now() - begun)
        self._watch.begun(info.epoch, health.replaced)
        self._read(info.epoch)
        return info

    async def settle(self, within_s: float) -> None:
        """Returns once the rows of idle lanes are written back, or when the time is up. Running jobs hold it up."""
        until = self._clock.now() + within_s
        while self._has_rows_to_store and (left := until - self._clock.now()) > 0:
            await slept(self._clock, min(left, _SETTLE_CHECK_S))

    @property
    def _has_rows_to_store(self) -> bool:
        core = self._scheduler
        return core is not None and core.down is None and not core.retention.is_settled

    async def stop(self) -> None:
        """Ends every job and the ring. Safe to call twice."""
        if self._scheduler is not None:
            # Before anything is awaited: a loss that comes meanwhile opens no epoch any more.
            self._handle(events.RingDown("the ring was stopped", self._clock.now()))
        tasks = [task for task in (self._reader, self._opening) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._ring.stop()

    # Callers

    def submit(self, request: Request) -> JobStream:
        """Queues a job and returns at once. Raises RequestError or BusyError, and then nothing is
        queued.
        """
        if self._scheduler is None:
            raise RingUnavailable("the ring is loading")
        if self._draining:
            raise RingUnavailable("the ring is draining")
        self._scheduler.admissible(request, self._clock.now())
        job = self._next_job
        self._next_job = JobId(job + 1)
        drafter = self._make_drafter(job, request.tenant) if request.draft else NoDrafter()
        reader = Reader(job, self._settings, self._clock, self._handle, self._end)
        stream = JobStream(job, reader, self._end, self._satisfied)
        entry = _Job(stream, drafter, request.session)
        self._jobs[job] = entry
        if request.deadline_s is not None:
            entry.deadline = self._clock.call_at(
                request.deadline_s, lambda: self._end(job, DeadlineExceeded())
            )
        self._handle(events.Submitted(job, request, drafter, self._clock.now()))
        return entry.stream

    def _make_drafter(self, job: JobId, tenant: str) -> Drafter:
        loop = asyncio.get_running_loop()
        wake = partial(loop.call_soon_threadsafe, self._drafted, job)
        return self._drafters(job, wake, tenant)

    def _drafted(self, job: JobId) -> None:
        if job in self._jobs:
            self._handle(events.Drafted(job, self._clock.now()))

    def drain(self) -> None:
        """Takes no more jobs; those that it has go on to their end, whoever reads them."""
        self._draining = True
        for entry in self._jobs.values():
            entry.stream.reader.release()

    @property
    def idle(self) -> bool:
        return not self._jobs

    def usable_prefix(self, prompt: Sequence[int], tenant: str = "") -> int:
        """How many of the prompt's first tokens a lane of this ring holds for the tenant. Changes nothing."""
        return 0 if self._scheduler is None else self._scheduler.usable_prefix(prompt, tenant)

    def close_session(self, session: SessionId) -> None:
        """Cancels the session's jobs and gives its lanes up."""
        for job in [job for job, entry in self._jobs.items() if entry.session == session]:
            self._cancel(job)
        if self._scheduler is not None:
            self._handle(events.SessionClosed(session, self._clock.now()))

    @property
    def remakes_rows(self) -> bool:
        """Whether an idle ring has to compute rows anew that are there already: they depend on their shapes."""
        return self._scheduler is not None and not self._ring.capacity().exact

    def foresee(self, wish: Wish) -> None:
        """What a session's next request begins with; its rows are computed while the ring is idle."""
        if self._scheduler is not None and not self._draining:
            self._handle(events.NextKnown(wish, self._clock.now()))

    # The chain store, for operators

    def nodes(self) -> tuple[NodeStatus, ...]:
        """The nodes that every stage holds."""
        core = self._scheduler
        return () if core is None else tuple(core.retention.index.statuses())

    def pin(self, prefix: tuple[int, ...], tenant: str = "") -> None:
        """Keeps a tenant's rows of a prefix in the store until they are dropped. Raises InvalidValue."""
        core = self._scheduler
        if core is None:
            raise RingUnavailable("the ring is loading")
        root = core.retention.root(tenant)
        held = core.retention.held_rows(prefix, root)
        if held < len(prefix):
            raise InvalidValue("prefix", f"only {held} of its {len(prefix)} tokens are held here")
        room = core.retention.anchors.room_by_hand(root, prefix)
        if len(prefix) > room:
            raise InvalidValue("prefix", f"has {len(prefix)} tokens; {room} more can be pinned")
        self._handle(events.PrefixPinned(prefix, tenant, self._clock.now()))

    def drop_node(self, node: NodeId) -> bool:
        """Drops a node and all that hangs on it; False when it is unknown."""
        core = self._scheduler
        if core is None or node not in core.retention.index:
            return False
        self._handle(events.NodeDropped(node, self._clock.now()))
        return True

    def status(self) -> RingStatus:
        core = self._scheduler
        health = self._ring.health()
        whole = core is None or core.down is not None or (not core.is_recovering and health.ready)
        return RingStatus(
            name=self.name,
            info=self._info,
            ready=core is not None and not self._reason(core, health),
            reason="loading" if core is None else self._reason(core, health),
            draining=self._draining,
            recovering=not whole,
            epoch=core.ledger.epoch if core is not None else 0,
            busy_lanes=core.lanes.busy if core is not None else 0,
            free_lanes=core.lanes.free if core is not None else 0,
            waiting_jobs=core.waiting if core is not None else 0,
            running_jobs=core.running if core is not None else 0,
            sessions=core.sessions if core is not None else 0,
            counts=core.counts if core is not None else RingCounts(),
            stored_rows=core.retention.index.rows if core is not None else 0,
            pinned_rows=core.retention.index.pinned_rows if core is not None else 0,
            frames_in_flight=_in_flight(core) if core is not None else 0,
            resting_jobs=sum(entry.stream.reader.lags for entry in self._jobs.values()),
            most_jobs=core.gate.most_jobs if core is not None else 0,
            back_s=self._away.left_s(self._clock.now()),
            spares=health.spares,
            replaced=health.replaced,
        )

    def _reason(self, core: Scheduler, health: RingHealth) -> str:
        """Why it is not ready; empty when it is."""
        if core.down is not None:
            return core.down
        if core.is_recovering or not health.ready:
            return f"recovering: {health.reason or self._loss}"
        return "draining" if self._draining else ""

    def lanes(self, most: int) -> tuple[LaneStatus, ...]:
        """Built when it is asked for; where there are more than `most`, those used last."""
        core = self._scheduler
        return () if core is None else core.lanes.statuses(most, self._decodes)

    def _decodes(self, job: JobId) -> bool:
        return job in self._jobs and self._jobs[job].decodes

    def _cancel(self, job: JobId) -> None:
        self._end(job, Cancelled())

    def _satisfied(self, job: JobId) -> None:
        if job in self._jobs:
            self._handle(events.JobSatisfied(job, self._clock.now()))

    def _end(self, job: JobId, error: RingserveError) -> None:
        if job in self._jobs:
            self._handle(events.JobEnded(job, error, self._clock.now()))

    # Events and actions

    def _handle(self, event: events.Event) -> None:
        """Feeds the scheduler, one event at a time: an action may cause the next event."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                self._handle_one(self._events.popleft())
        finally:
            self._handling = False
        self._watch_oldest()

    def _handle_one(self, event: events.Event) -> None:
        assert self._scheduler is not None
        try:
            actions = self._scheduler.on(event)
        except Exception as bug:
            # The rim: a bug of ours costs this ring its jobs, never the process its other rings.
            _log.critical("ring=%s event=%s", self.name, type(event).__name__, exc_info=bug)
            fault = f"{type(bug).__name__}: {bug}"
            actions = self._scheduler.on(events.RingDown(fault, self._clock.now()))
            # The broken event may have ended jobs, and what it had to say of them is lost.
            told = {action.job for action in actions if isinstance(action, events.Fail)}
            unheard = [job for job in self._jobs if job not in told]
            actions = [*actions, *(events.Fail(job, StageLost(fault)) for job in unheard)]
        self._watch.handled(event, actions, self._scheduler.down)
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: events.Action) -> None:
        match action:
            case events.Send(frame):
                try:
                    self._ring.submit(frame)
                except RingLost as lost:
                    self._lost(lost)
            case events.Emit(job, event):
                self._jobs[job].stream.put(event)
                self._jobs[job].decodes |= isinstance(event, TokenDelta)
                if isinstance(event, Finished):
                    self._forget(job)
            case events.Fail(job, error):
                self._jobs[job].stream.fail(error)
                self._forget(job)
            case events.OpenEpoch(epoch, reason, delay_s):
                self._loss = reason
                self._opening = asyncio.create_task(
                    self._open_epoch(epoch, delay_s), name=f"{self.name}-epoch-{epoch}"
                )

    def _forget(self, job: JobId) -> None:
        entry = self._jobs.pop(job)
        entry.drafter.close()
        if entry.deadline is not None:
            entry.deadline.cancel()

    def _lost(self, lost: RingLost) -> None:
        assert self._scheduler is not None
        epoch = self._scheduler.ledger.epoch
        self._events.append(broken(epoch, lost, self._clock.now()))

    # Tasks and timers

    async def _read_replies(self, epoch: Epoch) -> None:
        """Until the ring is lost, which ends the epoch; the next one has a reader of its own."""
        while True:
            try:
                reply = await replied(self._ring)
            except RingLost as lost:
                self._handle(broken(epoch, lost, self._clock.now()))
                return
            self._handle(events.ReplyArrived(reply, self._clock.now()))
            # A ring that always has the next reply ready must not keep the loop from everyone else.
            await asyncio.sleep(0)

    def _read(self, epoch: Epoch) -> None:
        name = f"{self.name}-replies-{epoch}"
        self._reader = asyncio.create_task(self._read_replies(epoch), name=name)

    async def _open_epoch(self, epoch: Epoch, delay_s: float) -> None:
        assert self._reader is not None
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await slept(self._clock, delay_s)
        try:
            held = await opened(self._ring, epoch, self._settings.heal_timeout_s)
        except RingLost as lost:
            self._handle(failed(epoch, lost, self._clock.now()))
            return
        self._read(epoch)
        replaced = self._ring.health().replaced
        self._handle(events.EpochOpened(epoch, held, self._clock.now(), replaced))

    def _watch_oldest(self) -> None:
        """Gives the reply that is due next its time-out, counted from when it became the next."""
        core = self._scheduler
        watched = None
        if core is not None and core.oldest_in_flight is not None:
            watched = (core.ledger.epoch, core.oldest_in_flight)
        if watched == self._watched:
            return
        if self._overdue is not None:
            self._overdue.cancel()
        self._watched, self._overdue = watched, None
        if watched is not None:
            assert core is not None
            due = self._clock.now() + core.reply_deadline_s
            self._overdue = self._clock.call_at(due, partial(self._late, *watched))

    def _late(self, epoch: Epoch, seq: Seq) -> None:
        self._handle(events.ReplyOverdue(epoch, seq, self._clock.now()))


def _in_flight(core: Scheduler) -> int:
    """Frames are numbered without gaps and answered in order."""
    oldest = core.oldest_in_flight
    return 0 if oldest is None else core.ledger.next_seq - oldest
