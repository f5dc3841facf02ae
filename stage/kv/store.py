"""Chain nodes' rows in a stage's host memory, under a budget of bytes.

Decides which nodes' bytes lie in memory: all it is told to keep, while there is room; beyond that, one that is safely
on disk gives its memory up, the one used longest ago first. Which nodes exist is the ledger's business, and which are
worth keeping the coordinator's. It never makes a wrong row: a node whose bytes cannot be had is absent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coordinator.frames import NodeId
from coordinator.nodes import Node
from stage.kv.disk import DiskTier
from stage.kv.records import RowRecords

# Of pinned memory through which rows go to a device: as much as a bus moves in 10 ms, enough for one transfer of
# most prompts. The nodes themselves are not pinned: pinned blocks are rounded up to powers of two.
_STAGING_BYTES = 256 * 2**20
# What a stage whose layers keep no rows says that it has room for.
_ANY_ROWS = 2**31 - 1
# Nodes that are offered to the disk again when memory is full and none of the oldest is there.
_OFFERED = 8


@dataclass(frozen=True, slots=True)
class KeptNode:
    node: Node
    records: Tensor  # [rows, width], in host memory


class HostStore:
    """One thread calls it, that of the stage's frames."""

    def __init__(self, records: RowRecords, budget: int, disk: DiskTier | None = None) -> None:
        self.budget = budget
        self.nbytes = 0
        self._records = records
        self._disk = disk
        self._kept: OrderedDict[NodeId, KeptNode] = OrderedDict()  # used longest ago first
        self._fetched: dict[NodeId, KeptNode] = {}  # what the frame in work loads
        self._gone: list[NodeId] = []
        self._staging: Tensor | None = None

    def __len__(self) -> int:
        """Nodes whose bytes lie in memory."""
        return len(self._kept)

    @property
    def capacity_rows(self) -> int:
        """Rows that the coordinator may count on."""
        row_bytes = self._records.row_bytes
        in_memory = self.budget // row_bytes if row_bytes else _ANY_ROWS * (self.budget > 0)
        on_disk = self._disk.capacity_rows if self._disk is not None and in_memory else 0
        return min(max(in_memory, on_disk), _ANY_ROWS)

    def on_disk(self) -> tuple[Node, ...]:
        """Nodes that a start finds; their bytes are read when they are loaded."""
        return () if self._disk is None else self._disk.nodes()

    def missing(self, ids: Iterable[NodeId]) -> tuple[NodeId, ...]:
        """Those of which there are no bytes, as far as can be told without reading any."""
        return tuple(id_ for id_ in ids if id_ not in self._kept and not self._is_safe(id_))

    # Into lanes

    def fetch(self, ids: Sequence[NodeId]) -> tuple[NodeId, ...]:
        """Gets hold of nodes that are about to be loaded, until `release`; returns those that cannot be had.

        What is read from disk and finds no room is held beside the budget for that long: one lane's rows at most.
        """
        absent = []
        # The last ones first, so that a chain's end counts as used longer ago than what it hangs on.
        for id_ in reversed(ids):
            kept = self._kept.get(id_) or self._read(id_)
            if kept is None:
                absent.append(id_)
                continue
            self._fetched[id_] = kept
            if id_ in self._kept:
                self._kept.move_to_end(id_)
        return tuple(absent)

    def load(self, lane: int, start: int, end: int, ids: Sequence[NodeId]) -> None:
        """Writes rows [start, end) of a lane from fetched nodes that make them up, in their order."""
        parts = [_slice(self._fetched[id_], start, end) for id_ in ids]
        for records in self._on_device(parts):
            self._records.scatter(lane, start, records)
            start += len(records)

    def release(self) -> None:
        self._fetched.clear()

    # Out of lanes

    def store(self, lane: int, nodes: Sequence[Node]) -> tuple[NodeId, ...]:
        """Keeps a lane's rows; returns the nodes that there was no room for."""
        lost = []
        for node in nodes:
            if not self._make_room(node.rows * self._records.row_bytes):
                lost.append(node.id)
                continue
            # Copied when this returns: the next frame may write to the very same rows.
            kept = KeptNode(node, self._records.gather(lane, node.start, node.end).cpu())
            self._keep(kept)
            if self._disk is not None:
                self._disk.write(kept.node, kept.records)
        return tuple(lost)

    def drop(self, ids: Iterable[NodeId]) -> None:
        for id_ in ids:
            self._forget(id_)
            if self._disk is not None:
                self._disk.drop(id_)

    def take_gone(self) -> tuple[NodeId, ...]:
        """Nodes that have been given up since this was asked last."""
        removed = () if self._disk is None else self._disk.take_removed()
        gone, self._gone = (*self._gone, *removed), []
        return self.missing(gone)

    def close(self) -> None:
        """What waits to be written still is, for a moment."""
        if self._disk is not None:
            self._disk.close()

    # Inside

    def _is_safe(self, id_: NodeId) -> bool:
        return self._disk is not None and id_ in self._disk

    def _read(self, id_: NodeId) -> KeptNode | None:
        found = None if self._disk is None else self._disk.read(id_)
        if found is None:
            return None
        kept = KeptNode(*found)
        if self._make_room(kept.records.nbytes):
            self._keep(kept)
        return kept

    def _keep(self, kept: KeptNode) -> None:
        self._forget(kept.node.id)
        self._kept[kept.node.id] = kept
        self.nbytes += kept.records.nbytes

    def _forget(self, id_: NodeId) -> None:
        kept = self._kept.pop(id_, None)
        if kept is not None:
            self.nbytes -= kept.records.nbytes

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
        if self._disk.is_failing:
            # Old nodes would stay for good: nothing reaches the disk, and the coordinator counts on its room.
            oldest = next(iter(self._kept))
            self._gone.append(oldest)
            return oldest
        for id_ in tuple(self._kept)[:_OFFERED]:
            self._disk.write(self._kept[id_].node, self._kept[id_].records)
        return None

    def _on_device(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        """The parts behind one another on the rows' device, in as few transfers as staging allows."""
        if self._records.device.type == "cpu" or not self._records.width:
            yield torch.cat(list(parts))
            return
        staging = self._staging_records()
        for batch in _batches(parts, len(staging)):
            rows = sum(len(part) for part in batch)
            torch.cat(batch, out=staging[:rows])
            # Returns when the bytes have left: staging is free again.
            yield staging[:rows].to(self._records.device)

    def _staging_records(self) -> Tensor:
        if self._staging is None:
            rows = max(_STAGING_BYTES // self._records.row_bytes, 1)
            self._staging = self._records.empty(rows, pinned=True)
        return self._staging


def _slice(kept: KeptNode, start: int, end: int) -> Tensor:
    node = kept.node
    return kept.records[max(0, start - node.start) : end - node.start]


def _batches(parts: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    room = most
    for part in (piece for whole in parts for piece in whole.split(most)):
        if len(part) > room:
            yield batch
            batch, room = [], most
        batch.append(part)
        room -= len(part)
    yield batch
