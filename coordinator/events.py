"""What the scheduler is told (events) and what it wants done (actions). Times are seconds of the
driver's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.errors import RingserveError
from coordinator.frames import Epoch, Frame, JobId, Reply, Seq
from coordinator.requests import JobEvent, Request, SessionId


@dataclass(frozen=True, slots=True)
class Submitted:
    job: JobId
    request: Request
    now: float


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job ends from outside: its client left, or its deadline passed. `error` is what its
    stream raises.
    """

    job: JobId
    error: RingserveError
    now: float


@dataclass(frozen=True, slots=True)
class ReplyArrived:
    reply: Reply
    now: float


@dataclass(frozen=True, slots=True)
class ReplyOverdue:
    """The reply to the oldest frame in flight did not come in time."""

    epoch: Epoch
    seq: Seq
    now: float


@dataclass(frozen=True, slots=True)
class EpochOpened:
    epoch: Epoch
    now: float


@dataclass(frozen=True, slots=True)
class RingDown:
    """The ring is lost and was not rebuilt."""

    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class SessionClosed:
    session: SessionId
    now: float


Event = Submitted | JobEnded | ReplyArrived | ReplyOverdue | EpochOpened | RingDown | SessionClosed


@dataclass(frozen=True, slots=True)
class Send:
    frame: Frame


@dataclass(frozen=True, slots=True)
class Emit:
    job: JobId
    event: JobEvent


@dataclass(frozen=True, slots=True)
class Fail:
    job: JobId
    error: RingserveError


@dataclass(frozen=True, slots=True)
class OpenEpoch:
    """The epoch is over: void all rows on every stage, then report EpochOpened or RingDown."""

    epoch: Epoch
    reason: str


Action = Send | Emit | Fail | OpenEpoch
