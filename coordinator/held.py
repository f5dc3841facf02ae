"""What replicas of the ledger hold when an epoch begins, and what of it all of them hold.

An epoch ends with every replica somewhere else in the frame stream. Decides how much of each lane, and which chain
nodes, every one of them can go on from: that is what the next epoch begins with, on all of them alike. It compares
tokens, so what no two agree on is never kept. Pure; it knows no ring.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.frames import NO_ROOT, NodeId
from coordinator.nodes import Node
from coordinator.prefixes import common_prefix


@dataclass(frozen=True, slots=True)
class HeldLane:
    """One lane's valid rows, by their token ids."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    root: NodeId = NO_ROOT  # of the chain that they are
    first: int = 0  # with recurrent layers: the least row count but 0 that can be gone on from


@dataclass(frozen=True, slots=True)
class Holding:
    """Of one replica, or of all. No lanes: every lane is empty."""

    lanes: tuple[HeldLane, ...] = ()
    nodes: tuple[Node, ...] = ()  # parents first
    checkpoints: frozenset[NodeId] = (
        frozenset()
    )  # of these nodes: with the recurrent state at their end

    def lane(self, number: int) -> HeldLane:
        return self.lanes[number] if number < len(self.lanes) else HeldLane()


NOTHING = Holding()


def held_by_all(holdings: Sequence[Holding]) -> Holding:
    """What every one of the replicas holds; at least one of them must be given."""
    lanes = max(len(holding.lanes) for holding in holdings)
    return Holding(
        tuple(_lane([holding.lane(number) for holding in holdings]) for number in range(lanes)),
        nodes := _nodes(holdings),
        frozenset(node.id for node in nodes).intersection(*(each.checkpoints for each in holdings)),
    )


def _lane(held: Sequence[HeldLane]) -> HeldLane:
    """The longest prefix that all have, unless some could not go on from its end."""
    head, *others = held
    rows, first = len(head.tokens), max(lane.first for lane in held)
    for other in others:
        if other.root != head.root:
            return HeldLane()
        rows = min(rows, common_prefix(head.tokens, other.tokens))
    return HeldLane(head.tokens[:rows], head.root, first) if rows and rows >= first else HeldLane()


def _nodes(holdings: Sequence[Holding]) -> tuple[Node, ...]:
    """Nodes that all have, with all that they hang on; parents first."""
    head, *others = (holding.nodes for holding in holdings)
    everywhere = {node.id for node in head}.intersection(
        *({n.id for n in nodes} for nodes in others)
    )
    known = {node.id for node in head}
    # A parent that is no node is the root of some tenant's chains, who is not known before he asks.
    ends = {node.parent: 0 for node in head if node.parent not in known}
    held = []
    for node in sorted(head, key=lambda node: node.start):
        if node.id in everywhere and ends.get(node.parent) == node.start:
            ends[node.id] = node.end
            held.append(node)
    return tuple(held)
