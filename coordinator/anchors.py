"""Anchors: heads of tools and system prompt, and what operators ask for, pinned in the chain store.

Decides what stays pinned, within a part of the store, and which head gives way to a newer one. What an operator pinned
stays until he drops it. A pin keeps rows; it is never a reason to reuse them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from coordinator.chain import ChainIndex
from coordinator.frames import NodeId

# Heads keep at most this part of the store, and operators' pins as much again: pins that fill it would leave
# conversations no room.
_SHARE = 0.25


class Anchors:
    def __init__(self, index: ChainIndex) -> None:
        self._index = index
        self._heads: OrderedDict[NodeId, tuple[NodeId, ...]] = OrderedDict()  # by their last node
        self._by_hand: dict[NodeId, tuple[NodeId, ...]] = {}

    def room_by_hand(self, root: NodeId, prefix: Sequence[int] = ()) -> int:
        """How long a prefix operators may still pin; rows of this one that are pinned already cost nothing."""
        self._forget_lost()
        known = {node for nodes in self._by_hand.values() for node in nodes}
        anew = known.difference(self._index.match(prefix, root).nodes)
        pinned = sum(self._index.node(node).rows for node in anew)
        return max(0, int(self._index.capacity * _SHARE) - pinned)

    def pin(self, prefix: Sequence[int], root: NodeId) -> bool:
        """Pins a prefix until it is dropped; False where the store does not hold all of it."""
        nodes = self._nodes_of(prefix, root)
        if not nodes:
            return False
        self._forget_lost()
        if nodes[-1] not in self._by_hand:
            self._index.pin(nodes)
            self._by_hand[nodes[-1]] = nodes
        return True

    def want(self, head: Sequence[int], root: NodeId) -> None:
        """Pins a head's nodes, if they are there; those wanted longest ago give way where the room ends."""
        nodes = self._nodes_of(head, root)
        if not nodes:
            return
        self._forget_lost()
        if nodes[-1] not in self._heads:
            self._index.pin(nodes)
            self._heads[nodes[-1]] = nodes
        self._heads.move_to_end(nodes[-1])
        while self._heads and self._index.pinned_rows > 2 * self._index.capacity * _SHARE:
            self._index.unpin(self._heads.popitem(last=False)[1])

    def _nodes_of(self, prefix: Sequence[int], root: NodeId) -> tuple[NodeId, ...]:
        match = self._index.match(prefix, root)
        return match.nodes if match.rows == len(prefix) else ()

    def _forget_lost(self) -> None:
        """Of a chain whose end is gone the rest stays pinned, once: the end may come back, and be pinned anew."""
        lost, self._index.lost_pins = self._index.lost_pins, set()
        holders: tuple[dict[NodeId, tuple[NodeId, ...]], ...] = (self._heads, self._by_hand)
        for pins in holders if lost else ():
            for last in [last for last, nodes in pins.items() if not lost.isdisjoint(nodes)]:
                rest = tuple(node for node in pins.pop(last) if node not in lost)
                if rest and rest[-1] not in pins:
                    pins[rest[-1]] = rest
                else:
                    self._index.unpin(rest)
