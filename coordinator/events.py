"""What the scheduler is told (events) and what it wants done (actions). Times are seconds of the
driver's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.drafters import Drafter
from coordinator.errors import RingserveError
from coordinator.foresight import Wish
from coordinator.frames import Epoch, Frame, JobId, NodeId, Reply, Seq
from coordinator.held import Holding
from coordinator.requests import JobEvent, Request, SessionId


@dataclass(frozen=True, slots=True)
class Submitted:
    job: JobId
    request: Request
    drafter: Drafter
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
class JobSatisfied:
    """Its caller needs no more tokens (a stop string): the job finishes as if a stop token had come."""

    job: JobId
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
class RingBroken:
    """The ring lost a stage, or its way to one, while it was in this epoch."""

    epoch: Epoch
    reason: str
    now: float
    for_good: bool = False  # no epoch can follow


@dataclass(frozen=True, slots=True)
class EpochOpened:
    """Every stage is there, and holds this and no more."""

    epoch: Epoch
    held: Holding
    now: float
    replaced: int = 0  # stages, since the ring started


@dataclass(frozen=True, slots=True)
class EpochFailed:
    """What was lost could not be replaced."""

    epoch: Epoch
    reason: str
    now: float
    for_good: bool = False  # no later attempt can do better


@dataclass(frozen=True, slots=True)
class RingDown:
    """The ring ends, whatever its jobs want."""

    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class Drafted:
    """A drafter that was thinking knows its drafts now."""

    job: JobId
    now: float


@dataclass(frozen=True, slots=True)
class ReaderLags:
    """So much of the job's answer lies unread that it rests."""

    job: JobId
    now: float


@dataclass(frozen=True, slots=True)
class ReaderCaughtUp:
    job: JobId
    now: float


@dataclass(frozen=True, slots=True)
class SessionClosed:
    session: SessionId
    now: float


@dataclass(frozen=True, slots=True)
class PrefixPinned:
    """An operator wants these rows, of this tenant, to stay."""

    prefix: tuple[int, ...]
    tenant: str
    now: float


@dataclass(frozen=True, slots=True)
class NodeDropped:
    """An operator wants a node gone, and all that hangs on it."""

    node: NodeId
    now: float


@dataclass(frozen=True, slots=True)
class NextKnown:
    """What a session's next request begins with, while its client is busy elsewhere."""

    wish: Wish
    now: float


Event = (
    Submitted
    | JobEnded
    | JobSatisfied
    | Drafted
    | ReplyArrived
    | ReplyOverdue
    | RingBroken
    | EpochOpened
    | EpochFailed
    | RingDown
    | ReaderLags
    | ReaderCaughtUp
    | SessionClosed
    | PrefixPinned
    | NodeDropped
    | NextKnown
)


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
    """The last epoch is over: after so many seconds have what is lost replaced and this one opened, and report
    EpochOpened or EpochFailed.
    """

    epoch: Epoch
    reason: str
    delay_s: float = 0.0
    rows: int = 0  # that lanes had when the last epoch ended


Action = Send | Emit | Fail | OpenEpoch


def story_line(event: Event) -> str:
    """One line of the story: what happened, without a prompt's tokens."""
    match event:
        case Submitted(job, request, _, now):
            return f"{now:.3f} submitted job={job} tokens={len(request.prompt)}"
        case NextKnown(wish, now):
            return f"{now:.3f} next known session={wish.session} tokens={len(wish.tokens)}"
        case PrefixPinned(prefix, _, now):
            return f"{now:.3f} pinned tokens={len(prefix)}"
        case EpochOpened(epoch, held, now):
            rows = [len(lane.tokens) for lane in held.lanes]
            return f"{now:.3f} opened epoch={epoch} rows={rows} nodes={len(held.nodes)}"
        case ReplyArrived(reply, now):
            refused = ",".join(refusal.code for refusal in reply.refusals) or "-"
            return f"{now:.3f} reply epoch={reply.epoch} seq={reply.seq} refused={refused}"
    return f"{event.now:.3f} {event}"
