"""Chain nodes' rows, in host memory and on disk: into lanes and out of them.

Decides how rows travel between lanes and nodes, and how many of them the coordinator may count on. Which nodes exist
is the ledger's business, and which are worth keeping the coordinator's. It never makes a wrong row: a node whose bytes
cannot be had is absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from coordinator.frames import NodeId
from coordinator.nodes import Node
from stage.kv.kept import DiskShelf, KeptNode, KeptNodes
from stage.kv.mirror import Key, Record
from stage.kv.outbox import Mirrored
from stage.kv.records import RowRecords

# Of pinned memory through which rows go to a device: as much as a bus moves in 10 ms, enough for one transfer of
# most prompts. The nodes themselves are not pinned: pinned blocks are rounded up to powers of two.
_STAGING_BYTES = 256 * 2**20
# What a stage whose layers keep no rows says that it has room for.
_ANY_ROWS = 2**31 - 1
# Bytes of a file that are not rows, by row of a node: 4 of its token, and its share of a header of some 300 bytes.
_ROW_OVERHEAD = 16


class HostStore:
    """One thread calls it, that of the stage's frames."""

    def __init__(
        self,
        records: RowRecords,
        budget: int,
        disk: DiskShelf | None = None,
        mirrored: Mirrored | None = None,
    ) -> None:
        self._records = records
        self._disk = disk
        self._kept = KeptNodes(budget, disk, lambda node: records.empty(node.rows), mirrored)
        self._fetched: dict[NodeId, KeptNode] = {}  # what the frame in work loads
        self._staging: Tensor | None = None

    def __len__(self) -> int:
        """Nodes whose bytes lie in memory."""
        return len(self._kept)

    @property
    def budget(self) -> int:
        return self._kept.budget

    @property
    def nbytes(self) -> int:
        return self._kept.nbytes

    @property
    def capacity_rows(self) -> int:
        """Rows that the coordinator may count on."""
        row_bytes = self._records.row_bytes
        in_memory = self.budget // row_bytes if row_bytes else _ANY_ROWS * (self.budget > 0)
        if self._disk is None or not in_memory:
            return min(in_memory, _ANY_ROWS)
        on_disk = self._disk.budget // (row_bytes + _ROW_OVERHEAD)
        return min(max(in_memory, on_disk), _ANY_ROWS)

    def on_disk(self) -> tuple[Node, ...]:
        """Nodes that a start finds; their bytes are read when they are loaded."""
        return self._kept.on_disk()

    def missing(self, ids: Iterable[NodeId]) -> tuple[NodeId, ...]:
        """Those of which there are no bytes, as far as can be told without reading any."""
        return tuple(id_ for id_ in ids if id_ not in self._kept)

    # Into lanes

    def fetch(self, ids: Sequence[NodeId]) -> tuple[NodeId, ...]:
        """Gets hold of nodes that are about to be loaded, until `release`; returns those that cannot be had.

        What is read from disk and finds no room is held beside the budget for that long: one lane's rows at most.
        """
        absent = []
        # The last ones first, so that a chain's end counts as used longer ago than what it hangs on.
        for id_ in reversed(ids):
            kept = self._kept.get(id_)
            if kept is None:
                absent.append(id_)
            else:
                self._fetched[id_] = kept
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

        def keep(node: Node) -> bool:
            # Copied when this returns: the next frame may write to the very same rows.
            return self._kept.keep(
                node,
                node.rows * self._records.row_bytes,
                lambda: self._records.gather(lane, node.start, node.end).cpu(),
            )

        return tuple(node.id for node in nodes if not keep(node))

    def drop(self, ids: Iterable[NodeId]) -> None:
        self._kept.drop(ids)

    def forget(self, ids: Iterable[NodeId]) -> None:
        """As drop, but for what lies on disk."""
        self._kept.forget(ids)

    def lacks(self, key: Key) -> bool:
        """Whether it could be taken back."""
        return self._kept.lacks(key)

    def take_back(self, record: Record) -> Node | None:
        """Keeps rows that the neighbour kept, if they are what a stage like this one kept and there is room."""
        return self._kept.take_back(record)

    def take_gone(self) -> tuple[NodeId, ...]:
        """Nodes that have been given up since this was asked last."""
        return self._kept.take_gone()

    def close(self) -> None:
        """What waits to be written still is, for a moment; so are the other kinds of the same disk."""
        if self._disk is not None:
            self._disk.tier.close()

    # Inside

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
    return kept.data[max(0, start - node.start) : end - node.start]


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
