"""What a frame came to on one replica of the ledger. Plain values; nothing is decided here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from coordinator.frames import CopyRows, LoadNodes, NodeId, Refusal, Segment, StoreNodes


class Standing(Enum):
    """What the frame as a whole is to this replica."""

    NEW = "new"  # the next one: applied
    APPLIED = "applied"  # a duplicate: ignored
    REFUSED = "refused"  # of another epoch, or out of order: nothing of it was applied


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a frame: which segments may be computed, what was copied, what was refused."""

    standing: Standing
    segments: tuple[Segment, ...] = ()
    moves: tuple[CopyRows | LoadNodes, ...] = ()  # what brings rows into lanes, in order
    refusals: tuple[Refusal, ...] = ()
    stores: tuple[StoreNodes, ...] = ()  # with the spans that became nodes
    lost: tuple[NodeId, ...] = ()  # nodes that were asked for or to be made, and are not there
