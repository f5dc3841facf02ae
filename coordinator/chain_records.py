"""What the chain index knows of a node, and what it tells of its nodes. Plain records; chain.py decides."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.frames import NodeId
from coordinator.nodes import Node


@dataclass(frozen=True, slots=True)
class ChainMatch:
    """The nodes, in order, that hold a prompt's first `rows` rows; the last one may hold others behind them."""

    nodes: tuple[NodeId, ...] = ()
    rows: int = 0


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node that every stage holds, for whoever looks."""

    id: NodeId
    parent: NodeId
    start: int
    end: int
    pinned: bool


@dataclass(slots=True)
class Entry:
    node: Node
    used: int
    published: bool
    checkpoint: bool = False  # has the recurrent state at its end, or will when it is acknowledged
    resumable: bool = False  # every stage has acknowledged that
    pins: int = 0
    children: set[NodeId] = field(default_factory=set)

    @property
    def settled(self) -> bool:
        """Nothing of it is under way. A drop goes out before what stores: it would come too early."""
        return self.published and self.checkpoint == self.resumable
