"""Who may watch a ring at work: the port that the gateway's metrics stand behind, and what is told of an event.

A watcher changes nothing and is asked nothing. What a ring adds up by itself is in counts.py; here goes what needs a
distribution, a clock or a log line: each reply's times, why epochs ended, and what it took until the ring answered
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from coordinator.events import (
    Action,
    EpochFailed,
    EpochOpened,
    Event,
    OpenEpoch,
    ReplyArrived,
    ReplyOverdue,
    RingBroken,
    RingDown,
    Send,
)
from coordinator.frames import Epoch, Reply


class EpochCause(StrEnum):
    """Why an epoch ended; few, since each one is a series to those who count."""

    OVERDUE = "overdue"  # a reply did not come in time
    REFUSED = "refused"  # a stage refused a whole frame
    BAD_REPLY = "bad_reply"  # a reply came out of order, or lacked tokens
    LOST = "lost"  # a stage died, hung or could not be reached
    UNHEALED = "unhealed"  # what was lost could not be replaced, this time


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """An epoch is over, and another one is to be opened."""

    epoch: Epoch  # the next one
    cause: EpochCause
    reason: str
    attempt: int  # at opening one, counted from 1, since the ring answered last
    delay_s: float  # until that attempt


@dataclass(frozen=True, slots=True)
class Restored:
    """The ring answers again; one that had nothing to do is taken at its word when its epoch is open."""

    epoch: Epoch
    seconds: float  # since the last good epoch ended
    attempts: int
    replaced: int  # stages
    rows_kept: int  # in lanes, of those that were there
    rows_lost: (
        int  # to be computed again, or brought back from the chain store, by whoever wants them
    )


class RingObserver(Protocol):
    """Called on the event loop, between events: each call takes microseconds and never raises."""

    def started(self, ring: str) -> None: ...

    def replied(self, ring: str, reply: Reply) -> None: ...

    def epoch_ended(self, ring: str, end: EpochEnd) -> None: ...

    def replaced(self, ring: str, stages: int) -> None:
        """So many stages were lost, and others have taken their place."""
        ...

    def restored(self, ring: str, restored: Restored) -> None: ...

    def given_up(self, ring: str, reason: str) -> None:
        """It did not heal; it takes no more jobs."""
        ...


@dataclass(slots=True)
class _Outage:
    """From the end of the last good epoch until the ring answers again."""

    since: float
    rows: int  # that lanes had
    attempts: int = 0
    replaced: int = 0
    kept: int = 0


class RingWatch:
    """Tells observers of one ring's events, once the scheduler has decided what follows from each."""

    def __init__(self, ring: str, observers: Sequence[RingObserver]) -> None:
        self._ring = ring
        self._observers = tuple(observers)
        self._outage: _Outage | None = None
        self._epoch = Epoch(0)
        self._replaced = 0  # stages, since the ring started
        self._is_down = False

    def begun(self, epoch: Epoch, replaced: int) -> None:
        """The ring has started in this epoch; `replaced`: stages, for that."""
        self._epoch, self._replaced = epoch, replaced
        for observer in self._observers:
            observer.started(self._ring)

    def handled(self, event: Event, actions: Iterable[Action], down: str | None) -> None:
        """`down`: why the ring takes no jobs, if it takes none."""
        replied = isinstance(event, ReplyArrived) and event.reply.epoch == self._epoch
        if isinstance(event, ReplyArrived) and replied:
            for observer in self._observers:
                observer.replied(self._ring, event.reply)
        opens = [action for action in actions if isinstance(action, OpenEpoch)]
        if opens:
            self._ended(event, opens[-1])
        elif down is not None:
            self._down(event, down)
        elif isinstance(event, EpochOpened) and event.epoch == self._epoch:
            self._opened(event, is_idle=not any(isinstance(action, Send) for action in actions))
        elif replied:
            self._answers(event.now)

    def _ended(self, event: Event, opens: OpenEpoch) -> None:
        self._epoch = opens.epoch
        outage = self._outage = self._outage or _Outage(event.now, opens.rows)
        outage.attempts += 1
        end = EpochEnd(
            opens.epoch, cause_of(event), opens.reason, outage.attempts, delay_s=opens.delay_s
        )
        for observer in self._observers:
            observer.epoch_ended(self._ring, end)

    def _opened(self, event: EpochOpened, *, is_idle: bool) -> None:
        stages, self._replaced = event.replaced - self._replaced, event.replaced
        if stages > 0:
            for observer in self._observers:
                observer.replaced(self._ring, stages)
        if self._outage is not None:
            self._outage.replaced += max(stages, 0)
            rows = sum(len(lane.tokens) for lane in event.held.lanes)
            # Where one opening led to no good reply, the next ones go on from no lane: recovery.py.
            self._outage.kept = rows if self._outage.attempts == 1 else 0
        if is_idle:
            self._answers(event.now)

    def _answers(self, now: float) -> None:
        outage, self._outage = self._outage, None
        if outage is None:
            return
        kept = min(outage.kept, outage.rows)
        restored = Restored(
            epoch=self._epoch,
            seconds=now - outage.since,
            attempts=outage.attempts,
            replaced=outage.replaced,
            rows_kept=kept,
            rows_lost=outage.rows - kept,
        )
        for observer in self._observers:
            observer.restored(self._ring, restored)

    def _down(self, event: Event, reason: str) -> None:
        # What ends a ring on purpose, or by a bug, is told elsewhere.
        if not self._is_down and not isinstance(event, RingDown):
            for observer in self._observers:
                observer.given_up(self._ring, reason)
        self._is_down = True


def cause_of(event: Event) -> EpochCause:
    """Of an event that ended an epoch."""
    if isinstance(event, ReplyOverdue):
        return EpochCause.OVERDUE
    if isinstance(event, RingBroken):
        return EpochCause.LOST
    if isinstance(event, EpochFailed):
        return EpochCause.UNHEALED
    refused = isinstance(event, ReplyArrived) and any(
        refusal.lane is None for refusal in event.reply.refusals
    )
    return EpochCause.REFUSED if refused else EpochCause.BAD_REPLY
