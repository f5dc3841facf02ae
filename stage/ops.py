"""What a frame does to a stage's rows beside computing: copies, chain nodes into lanes, lanes into chain nodes.

Decides the order and nothing else: what is in the table of nodes but cannot be had is taken out of it before the
ledger judges the frame; then the ops as the frame has them; then, behind the segments, the nodes to be stored. Each
is complete when its call returns, so that the next one may write where it read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from coordinator.frames import (
    CopyRows,
    DropNodes,
    Frame,
    LaneId,
    LoadNodes,
    NodeId,
    StoreNodes,
)
from coordinator.ledger import Applied, Ledger
from stage.kv.rows import KvRows
from stage.kv.store import HostStore


class FrameOps:
    """The rows and the store of one stage. The thread that processes frames calls it."""

    def __init__(self, ledger: Ledger, rows: KvRows, store: HostStore) -> None:
        self._ledger = ledger
        self._rows = rows
        self._store = store
        for node in store.on_disk():
            ledger.nodes.add(node)

    def prepare(self, frame: Frame) -> tuple[NodeId, ...]:
        """Gets hold of what the frame loads, before the ledger applies it. Returns the nodes that are no longer
        here, and are out of the table now.
        """
        if (frame.epoch, frame.seq) != (self._ledger.epoch, self._ledger.next_seq):
            return ()  # nothing of it will be applied
        lost = [id_ for id_ in self._store.take_gone() if id_ in self._ledger.nodes]
        for op in frame.ops:
            if isinstance(op, LoadNodes):
                known = [id_ for id_ in op.nodes if id_ in self._ledger.nodes]
                lost += self._store.fetch(known)
        self._ledger.nodes.drop(lost)
        return tuple(lost)

    def run(self, frame: Frame, applied: Applied, refused: Collection[LaneId | None]) -> None:
        """In the frame's order: a copy may read what a later opening gives up."""
        for op in frame.ops:
            if isinstance(op, DropNodes):
                self._store.drop(op.nodes)
            elif isinstance(op, CopyRows):
                if op in applied.moves:
                    self._rows.copy_rows(op.source, op.target, op.rows)
            elif isinstance(op, LoadNodes):
                if op in applied.moves:
                    self._store.load(op.lane, op.start, op.end, op.nodes)
            elif op.lane not in refused:
                # Void rows are zeroed: a mask does not keep one conversation's NaN from the next one.
                self._rows.clear(op.lane, op.cached_prefix)
        self._store.release()

    def store(
        self, stores: Iterable[StoreNodes], refused: Collection[LaneId | None]
    ) -> tuple[NodeId, ...]:
        """Keeps the rows that became nodes; returns what could not be kept, out of the table again. `refused`:
        lanes whose rows turned out to be void.
        """
        lost: list[NodeId] = []
        for op in stores:
            ids = [span.node for span in op.spans]
            if op.lane in refused:
                lost += ids
            else:
                lost += self._store.store(op.lane, [self._ledger.nodes[id_] for id_ in ids])
        self._ledger.nodes.drop(lost)
        return tuple(lost)

    def unknown(self, frame: Frame) -> Iterator[NodeId]:
        """Of the nodes that the frame asks to be stored, those that are not here: it was refused whole."""
        for op in frame.after:
            yield from (span.node for span in op.spans if span.node not in self._ledger.nodes)


def joined(*ids: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """Each once, in the order of their first mention."""
    return tuple(dict.fromkeys(id_ for group in ids for id_ in group))
