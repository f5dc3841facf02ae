"""What travels along the ring: a frame with what became of it so far, or the tail's reply.

Decides what one stage tells the next. It may not know how that is moved: transport.py carries bytes between
processes, local_ring.py hands the very objects from thread to thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from coordinator.frames import (
    Epoch,
    Frame,
    LaneId,
    LaneRows,
    NodeId,
    Refusal,
    Reply,
    Seq,
    StageTiming,
)


@dataclass(frozen=True, slots=True)
class FrameMessage:
    """A frame on its way. `opened` is the epoch that the ring was in when the frame was submitted.

    That tells a frame left over from an earlier epoch, which is dropped, from one that names a wrong epoch,
    which is refused.
    """

    opened: Epoch
    frame: Frame
    refusals: tuple[Refusal, ...] = ()  # of all stages so far
    lanes: tuple[LaneRows, ...] = ()  # the least valid rows of the stages so far
    timings: tuple[StageTiming, ...] = ()
    computed: tuple[LaneId, ...] = ()  # whose segments' rows are in `hidden`, in the frame's order
    hidden: Tensor | None = None  # [rows of the computed segments, hidden]
    lost: tuple[NodeId, ...] = ()  # nodes that some stage so far does not have, or could not keep

    @property
    def refused_whole(self) -> bool:
        return any(refusal.lane is None for refusal in self.refusals)


@dataclass(frozen=True, slots=True)
class ReplyMessage:
    opened: Epoch
    reply: Reply


@dataclass(frozen=True, slots=True)
class Garbled:
    """Bytes that are a message of the ring, but say nothing that can be understood."""

    opened: Epoch
    epoch: Epoch
    seq: Seq
    detail: str


Message = FrameMessage | ReplyMessage | Garbled


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message as it came in. `sent_at` is the sender's time.time(), before it encoded anything."""

    sent_at: float
    message: Message


class Inlet(Protocol):
    """Where a stage, or the coordinator, waits for messages; blocked while there are none."""

    def receive(self) -> Delivery | None:
        """The next message, or None once the inlet is closed."""
        ...


class Outlet(Protocol):
    """Where messages go to the next stage. Keeps their order and never waits for the receiver."""

    def send(self, message: FrameMessage | ReplyMessage) -> None: ...
