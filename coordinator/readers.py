"""Whose answer is not read: such a job rests, and when nothing is read for long its turn ends.

Decides when a reader lags, when it has caught up and when it is given up. Which frames a resting job goes without is
the batch's business. Pausing changes no token: every token is decided by what stands before it, and never by when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from coordinator.clock import Clock, Timer
from coordinator.config import SchedulerSettings
from coordinator.errors import RingserveError, SlowReader
from coordinator.events import Event, ReaderCaughtUp, ReaderLags
from coordinator.frames import JobId
from coordinator.jobs import Job


def mark(event: ReaderLags | ReaderCaughtUp, jobs: Iterable[Job]) -> int:
    """Lets the event's job rest, or go on. How many jobs began to rest: one or none."""
    lags = isinstance(event, ReaderLags)
    begun = 0
    for job in jobs:
        if job.id == event.job:
            begun += lags and not job.paused
            job.paused, job.disturbed = lags, True
    return begun


class Reader:
    """One job's reader, as its stream sees it. `tell` feeds the scheduler, `end` ends the job."""

    def __init__(
        self,
        job: JobId,
        settings: SchedulerSettings,
        clock: Clock,
        tell: Callable[[Event], None],
        end: Callable[[JobId, RingserveError], None],
    ) -> None:
        self._job = job
        self._most = settings.unread_tokens
        self._unread_s = settings.unread_s
        self._clock = clock
        self._tell = tell
        self._end = end
        self._unread = 0
        self._since = clock.now()  # the last read, or when there was something to read again
        self.lags = False
        self._timer: Timer | None = None
        self._released = False

    def came(self, tokens: int) -> None:
        if not self._unread:
            self._since = self._clock.now()
        self._unread += tokens
        if self._unread > self._most and not (self.lags or self._released):
            self.lags = True
            self._tell(ReaderLags(self._job, self._clock.now()))
            self._watch()

    def took(self, tokens: int) -> None:
        """It read something, of so many tokens."""
        self._unread -= tokens
        self._since = self._clock.now()
        if self.lags and self._unread <= self._most // 2:
            self._catch_up()

    def release(self) -> None:
        """The job has ended, or its ring is to: it is not held up any more, however slowly it is read."""
        self._released = True
        if self.lags:
            self._catch_up()

    def _catch_up(self) -> None:
        self.lags = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._tell(ReaderCaughtUp(self._job, self._clock.now()))

    def _watch(self) -> None:
        self._timer = self._clock.call_at(self._since + self._unread_s, self._look)

    def _look(self) -> None:
        if not self.lags:
            return
        if self._clock.now() < self._since + self._unread_s:
            self._watch()
        else:
            self._end(self._job, SlowReader(self._unread_s))
