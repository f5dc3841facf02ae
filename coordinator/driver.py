"""The async shell around one ring's scheduler: the only coordinator file with tasks and timers.

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

from coordinator.clock import Clock, Timer
from coordinator.config import SchedulerSettings
from coordinator.errors import (
    BrokenInvariant,
    Cancelled,
    DeadlineExceeded,
    RingLost,
    RingserveError,
    RingUnavailable,
)
from coordinator.events import (
    Action,
    Emit,
    EpochOpened,
    Event,
    Fail,
    JobEnded,
    OpenEpoch,
    ReplyArrived,
    ReplyOverdue,
    RingDown,
    Send,
    SessionClosed,
    Submitted,
)
from coordinator.frames import Epoch, JobId, Seq
from coordinator.requests import Finished, Request, SessionId
from coordinator.ring import ProgressSink, Ring, RingInfo
from coordinator.scheduler import Scheduler
from coordinator.streams import JobStream

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RingStatus:
    name: str
    info: RingInfo | None  # None until the ring has started
    ready: bool
    reason: str  # why it is not ready
    epoch: int
    busy_lanes: int
    waiting_jobs: int
    running_jobs: int
    sessions: int


class RingDriver:
    """Owns one ring from start to stop. All calls come from one event loop."""

    def __init__(self, name: str, ring: Ring, settings: SchedulerSettings, clock: Clock) -> None:
        self.name = name
        self._ring = ring
        self._settings = settings
        self._clock = clock
        self._scheduler: Scheduler | None = None
        self._info: RingInfo | None = None
        self._next_job = JobId(0)
        self._streams: dict[JobId, JobStream] = {}
        self._deadlines: dict[JobId, Timer] = {}
        self._sessions_of: dict[JobId, SessionId] = {}
        self._watched: tuple[Epoch, Seq] | None = None  # whose reply is due next
        self._overdue: Timer | None = None
        self._reader: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._events: deque[Event] = deque()
        self._handling = False

    async def start(self, progress: ProgressSink) -> RingInfo:
        """Raises SetupError and leaves nothing behind."""
        info = await self._ring.start(progress)
        self._info = info
        self._scheduler = Scheduler(self.name, info, self._settings)
        self._reader = asyncio.create_task(self._read_replies(), name=f"{self.name}-replies")
        return info

    async def stop(self) -> None:
        """Ends every job and the ring. Safe to call twice."""
        tasks = [task for task in (self._reader, self._opening) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._scheduler is not None:
            self._handle(RingDown("the ring was stopped", self._clock.now()))
        self._watch_oldest()
        await self._ring.stop()

    # Callers

    def submit(self, request: Request) -> JobStream:
        """Queues a job and returns at once. Raises RequestError or BusyError, and then nothing is
        queued.
        """
        if self._scheduler is None:
            raise RingUnavailable("the ring is loading")
        self._scheduler.admissible(request)
        job = self._next_job
        self._next_job = JobId(job + 1)
        stream = JobStream(job, self._cancel)
        self._streams[job] = stream
        if request.session is not None:
            self._sessions_of[job] = request.session
        if request.deadline_s is not None:
            self._deadlines[job] = self._clock.call_at(
                request.deadline_s, lambda: self._end(job, DeadlineExceeded())
            )
        self._handle(Submitted(job, request, self._clock.now()))
        return stream

    def usable_prefix(self, prompt: Sequence[int]) -> int:
        """How many of the prompt's first tokens a lane of this ring holds. Changes nothing."""
        return 0 if self._scheduler is None else self._scheduler.lanes.usable_prefix(prompt)

    def close_session(self, session: SessionId) -> None:
        """Cancels the session's jobs and gives its lanes up."""
        for job in [job for job, owner in self._sessions_of.items() if owner == session]:
            self._cancel(job)
        if self._scheduler is not None:
            self._handle(SessionClosed(session, self._clock.now()))

    def status(self) -> RingStatus:
        core = self._scheduler
        health = self._ring.health()
        down = core.down if core is not None else None
        return RingStatus(
            name=self.name,
            info=self._info,
            ready=core is not None and health.ready and down is None,
            reason=down or health.reason,
            epoch=core.ledger.epoch if core is not None else 0,
            busy_lanes=core.lanes.busy if core is not None else 0,
            waiting_jobs=core.waiting if core is not None else 0,
            running_jobs=core.running if core is not None else 0,
            sessions=core.sessions if core is not None else 0,
        )

    def _cancel(self, job: JobId) -> None:
        self._end(job, Cancelled())

    def _end(self, job: JobId, error: RingserveError) -> None:
        if job in self._streams:
            self._handle(JobEnded(job, error, self._clock.now()))

    # Events and actions

    def _handle(self, event: Event) -> None:
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

    def _handle_one(self, event: Event) -> None:
        assert self._scheduler is not None
        try:
            actions = self._scheduler.on(event)
        except BrokenInvariant as broken:
            _log.critical("ring=%s %s", self.name, broken)
            actions = self._scheduler.on(RingDown(str(broken), self._clock.now()))
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(frame):
                try:
                    self._ring.submit(frame)
                except RingLost as lost:
                    self._lost(lost)
            case Emit(job, event):
                self._streams[job].put(event)
                if isinstance(event, Finished):
                    self._forget(job)
            case Fail(job, error):
                self._streams[job].fail(error)
                self._forget(job)
            case OpenEpoch(epoch, reason):
                _log.warning("ring=%s epoch=%d opens: %s", self.name, epoch, reason)
                self._opening = asyncio.create_task(
                    self._open_epoch(epoch), name=f"{self.name}-epoch-{epoch}"
                )

    def _forget(self, job: JobId) -> None:
        del self._streams[job]
        self._sessions_of.pop(job, None)
        timer = self._deadlines.pop(job, None)
        if timer is not None:
            timer.cancel()

    def _lost(self, lost: RingLost) -> None:
        _log.error("ring=%s lost: %s", self.name, lost)
        self._events.append(RingDown(str(lost), self._clock.now()))

    # Tasks and timers

    async def _read_replies(self) -> None:
        while True:
            try:
                reply = await self._ring.next_reply()
            except RingLost as lost:
                _log.error("ring=%s lost: %s", self.name, lost)
                self._handle(RingDown(str(lost), self._clock.now()))
                return
            self._handle(ReplyArrived(reply, self._clock.now()))
            # A ring that always has the next reply ready must not keep the loop from everyone else.
            await asyncio.sleep(0)

    async def _open_epoch(self, epoch: Epoch) -> None:
        try:
            async with asyncio.timeout(self._settings.reply_timeout_s):
                await self._ring.open_epoch(epoch)
        except TimeoutError:
            self._handle(RingDown(f"epoch {epoch} did not open in time", self._clock.now()))
            return
        except RingLost as lost:
            self._handle(RingDown(f"epoch {epoch} did not open: {lost}", self._clock.now()))
            return
        self._handle(EpochOpened(epoch, self._clock.now()))

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
            due = self._clock.now() + self._settings.reply_timeout_s
            self._overdue = self._clock.call_at(due, partial(self._late, *watched))

    def _late(self, epoch: Epoch, seq: Seq) -> None:
        self._handle(ReplyOverdue(epoch, seq, self._clock.now()))
