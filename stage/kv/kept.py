"""Chain nodes' bytes in host memory under a budget, with the disk behind it: what rows and recurrent states share.

Decides which nodes' bytes lie in memory: all it is told to keep, while there is room; beyond that, one that is safely
on disk gives its memory up, the one used longest ago first. It does not know what the bytes mean: whoever has them
kept says how many there are of a node. It never makes wrong bytes: those that cannot be had are absent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from coordinator.frames import NodeId
from coordinator.nodes import Node
from stage.kv.disk import DiskTier
from stage.kv.mirror import Key, Record
from stage.kv.node_file import FileKind
from stage.kv.outbox import Mirrored

# Nodes that are offered to the disk again when memory is full and none of the oldest is there.
_OFFERED = 8


@dataclass(frozen=True, slots=True)
class KeptNode:
    node: Node
    data: Tensor  # in host memory


@dataclass(frozen=True, slots=True)
class DiskShelf:
    """The files of one kind in a tier."""

    tier: DiskTier
    kind: FileKind
    budget: int  # of the tier's, what the coordinator is told to count on for this kind

    def __contains__(self, id_: NodeId) -> bool:
        return self.tier.holds(id_, self.kind)

    def nodes(self) -> tuple[Node, ...]:
        return self.tier.nodes(self.kind)

    def write(self, kept: KeptNode) -> None:
        self.tier.write(kept.node, self.kind, kept.data)

    def read(self, id_: NodeId, empty: Callable[[Node], Tensor]) -> KeptNode | None:
        node = self.tier.node(id_, self.kind)
        if node is None:
            return None
        data = empty(node)
        return KeptNode(node, data) if self.tier.read(node, self.kind, data) else None

    def drop(self, id_: NodeId) -> None:
        self.tier.drop(id_, self.kind)

    def take_removed(self) -> tuple[NodeId, ...]:
        return self.tier.take_removed(self.kind)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until nothing waits to be written or removed, of the other kinds neither."""
        return self.tier.flush(timeout_s)


class KeptNodes:
    """One thread calls it, that of the stage's frames. Iterates over the nodes whose bytes lie in memory.

    `empty` makes room for a node's bytes as they come from disk. `mirrored`: what lies in memory lies in a neighbour's,
    too."""

    def __init__(
        self,
        budget: int,
        disk: DiskShelf | None,
        empty: Callable[[Node], Tensor],
        mirrored: Mirrored | None = None,
    ) -> None:
        self.budget = budget
        self.nbytes = 0
        self._disk = disk
        self._empty = empty
        self._mirrored = mirrored
        self._kept: OrderedDict[NodeId, KeptNode] = OrderedDict()  # used longest ago first
        self._gone: list[NodeId] = []

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._kept)

    def __contains__(self, id_: NodeId) -> bool:
        """As far as can be told without reading any bytes."""
        return id_ in self._kept or self._is_safe(id_)

    def on_disk(self) -> tuple[Node, ...]:
        """Nodes that a start finds, parents first; their bytes are read when they are wanted."""
        return () if self._disk is None else self._disk.nodes()

    def get(self, id_: NodeId) -> KeptNode | None:
        """From memory or from disk; what finds no room in memory is the caller's alone."""
        kept = self._kept.get(id_)
        if kept is not None:
            self._kept.move_to_end(id_)
            return kept
        kept = None if self._disk is None else self._disk.read(id_, self._empty)
        if kept is not None and self._make_room(kept.data.nbytes):
            self._put(kept)
        return kept

    def keep(self, node: Node, nbytes: int, copied: Callable[[], Tensor]) -> bool:
        """Keeps what `copied` gives, of which there are at most so many bytes; False when there is no room for it."""
        if not self._make_room(nbytes):
            return False
        kept = KeptNode(node, copied())
        self._put(kept)
        if self._disk is not None:
            self._disk.write(kept)
        return True

    def lacks(self, key: Key) -> bool:
        """Whether it would be kept here, and is not."""
        id_, holds = key
        mine = self._mirrored is not None and holds == self._mirrored.kind.holds
        return mine and id_ not in self

    def take_back(self, record: Record) -> Node | None:
        """Keeps what the neighbour kept; None: there is no room for it, or it is not what was kept here."""
        if self._mirrored is None or not self.lacks(record.key):
            return None
        found = self._mirrored.read(record, self._empty)
        if found is None or not self._make_room(found[1].nbytes):
            return None
        kept = KeptNode(*found)
        self._put(kept)
        if self._disk is not None:
            self._disk.write(kept)
        return kept.node

    def drop(self, ids: Iterable[NodeId]) -> None:
        for id_ in ids:
            self._forget(id_)
            if self._disk is not None:
                self._disk.drop(id_)

    def forget(self, ids: Iterable[NodeId]) -> None:
        """Gives their memory up; what lies on disk may be found again."""
        for id_ in ids:
            self._forget(id_)

    def take_gone(self) -> tuple[NodeId, ...]:
        """Nodes whose bytes have been given up since this was asked last."""
        removed = () if self._disk is None else self._disk.take_removed()
        gone, self._gone = (*self._gone, *removed), []
        return tuple(id_ for id_ in gone if id_ not in self)

    # Inside

    def _is_safe(self, id_: NodeId) -> bool:
        return self._disk is not None and id_ in self._disk

    def _put(self, kept: KeptNode) -> None:
        self._forget(kept.node.id)
        self._kept[kept.node.id] = kept
        self.nbytes += kept.data.nbytes
        if self._mirrored is not None:
            self._mirrored.kept(kept.node, kept.data)

    def _forget(self, id_: NodeId) -> None:
        kept = self._kept.pop(id_, None)
        if kept is not None:
            self.nbytes -= kept.data.nbytes
            if self._mirrored is not None:
                self._mirrored.gone(id_)

    def _make_room(self, size: int) -> bool:
        if size > self.budget:
            return False
        while self.nbytes + size > self.budget:
            victim = self._victim()
            if victim is None:
                return False
            self._forget(victim)
        return True

    def _victim(self) -> NodeId | None:
        """A node whose memory can be had."""
        if self._disk is None:
            return None
        for id_ in self._kept:
            if id_ in self._disk:
                return id_
        if self._disk.tier.is_failing:
            # Old nodes would stay for good: nothing reaches the disk, and the coordinator counts on its room.
            oldest = next(iter(self._kept))
            self._gone.append(oldest)
            return oldest
        for id_ in tuple(self._kept)[:_OFFERED]:
            self._disk.write(self._kept[id_])
        return None
