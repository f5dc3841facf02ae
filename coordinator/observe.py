"""Who may watch a ring at work: the port that the gateway's metrics stand behind, and what is told of an event.

A watcher changes nothing and is asked nothing. What a ring adds up by itself is in counts.py; here goes what needs a
distribution or a clock: each reply's times, why epochs ended, and how long it took until the next one answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Protocol

from coordinator.events import Action, Event, OpenEpoch, ReplyArrived, ReplyOverdue
from coordinator.frames import Epoch, Reply


class EpochCause(StrEnum):
    """Why an epoch ended; few, since each one is a series to those who count."""

    OVERDUE = "overdue"  # a reply did not come in time
    REFUSED = "refused"  # a stage refused a whole frame
    BAD_REPLY = "bad_reply"  # a reply came out of order, or lacked tokens


class RingObserver(Protocol):
    """Called on the event loop, between events: each call takes microseconds and never raises."""

    def replied(self, ring: str, reply: Reply) -> None: ...

    def epoch_ended(self, ring: str, cause: EpochCause) -> None: ...

    def restored(self, ring: str, seconds: float) -> None:
        """A frame was answered again, so many seconds after the last good epoch had ended."""
        ...


class RingWatch:
    """Tells observers of one ring's events, once the scheduler has decided what follows from each."""

    def __init__(self, ring: str, observers: Sequence[RingObserver]) -> None:
        self._ring = ring
        self._observers = tuple(observers)
        self._ended_at: float | None = None  # the last good epoch
        self._epoch = Epoch(0)

    def handled(self, event: Event, actions: Iterable[Action]) -> None:
        if isinstance(event, ReplyArrived) and event.reply.epoch == self._epoch:
            for observer in self._observers:
                observer.replied(self._ring, event.reply)
        opens = [action.epoch for action in actions if isinstance(action, OpenEpoch)]
        if opens:
            self._epoch = opens[-1]
            self._epoch_ended(event)
        elif isinstance(event, ReplyArrived) and event.reply.epoch == self._epoch:
            self._answers_again(event.now)

    def _epoch_ended(self, event: Event) -> None:
        if self._ended_at is None:
            self._ended_at = event.now
        for observer in self._observers:
            observer.epoch_ended(self._ring, cause_of(event))

    def _answers_again(self, now: float) -> None:
        if self._ended_at is not None:
            seconds, self._ended_at = now - self._ended_at, None
            for observer in self._observers:
                observer.restored(self._ring, seconds)


def cause_of(event: Event) -> EpochCause:
    """Of an event that ended an epoch."""
    if isinstance(event, ReplyOverdue):
        return EpochCause.OVERDUE
    refused = isinstance(event, ReplyArrived) and any(
        refusal.lane is None for refusal in event.reply.refusals
    )
    return EpochCause.REFUSED if refused else EpochCause.BAD_REPLY
