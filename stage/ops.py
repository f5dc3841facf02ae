"""What a frame does to a stage's rows beside computing: copies, chain nodes into lanes, lanes into chain nodes.

Decides the order and nothing else: what is in the table of nodes but cannot be had is taken out of it before the
ledger judges the frame; then the ops as the frame has them; then, behind the segments, the nodes to be stored. Each
is complete when its call returns, so that the next one may write where it read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from coordinator.applied import Applied
from coordinator.frames import (
    CopyRows,
    DropNodes,
    Frame,
    LaneId,
    LoadNodes,
    NodeId,
    StoreNodes,
)
from coordinator.held import Holding
from coordinator.ledger import Ledger
from stage.kv.checkpoints import Checkpoints
from stage.kv.mirror import Key, Record
from stage.kv.store import HostStore
from stage.model.slice import ModelSlice


class FrameOps:
    """The rows and the store of one stage. The thread that processes frames calls it."""

    def __init__(
        self, ledger: Ledger, model: ModelSlice, store: HostStore, checkpoints: Checkpoints
    ) -> None:
        self._ledger = ledger
        self._rows = model.rows
        self._states = model.states
        self._store = store
        self._checkpoints = checkpoints
        for node in store.on_disk():
            ledger.nodes.add(node)
        ledger.nodes.checkpoints.update(checkpoints.held(ledger.nodes.ids()))

    def prepare(self, frame: Frame) -> tuple[NodeId, ...]:
        """Gets hold of what the frame loads, before the ledger applies it. Returns the nodes that are no longer
        here, and are out of the table now.
        """
        if (frame.epoch, frame.seq) != (self._ledger.epoch, self._ledger.next_seq):
            return ()  # nothing of it will be applied
        lost = self._take_gone()
        for op in frame.ops:
            if isinstance(op, LoadNodes):
                known = [id_ for id_ in op.nodes if id_ in self._ledger.nodes]
                lost += self._store.fetch(known)
                if self._ledger.state_rows and not self._checkpoints.fetch(op.nodes[-1]):
                    lost.append(op.nodes[-1])
        self._ledger.nodes.drop(lost)
        return tuple(lost)

    def _take_gone(self) -> list[NodeId]:
        """Nodes of the table whose bytes were given up since this was asked last; the caller takes them out."""
        # Not lost yet: that would cost all that hangs on the node, which may never be loaded from this very end.
        self._ledger.nodes.checkpoints.difference_update(self._checkpoints.take_gone())
        return [id_ for id_ in self._store.take_gone() if id_ in self._ledger.nodes]

    def holding(self) -> Holding:
        """What lies here, and in the ledger's words."""
        self._ledger.nodes.drop(self._take_gone())
        return self._ledger.holding()

    def keep_only(self, held: Holding) -> None:
        """Gives the memory of all other nodes up, before the ledger forgets them."""
        known, kept = set(self._ledger.nodes.ids()), {node.id for node in held.nodes}
        self._store.forget(known - kept)
        self._checkpoints.forget(known - held.checkpoints)

    @property
    def stored_bytes(self) -> int:
        """In host memory."""
        return self._store.nbytes + self._checkpoints.nbytes

    def lacks(self, key: Key) -> bool:
        return self._store.lacks(key) or self._checkpoints.lacks(key)

    def take_back(self, record: Record) -> bool:
        """Keeps what the neighbour kept, and tells the ledger. A state of no use is not kept: nobody would drop it."""
        nodes = self._ledger.nodes
        if self._store.lacks(record.key):
            node = self._store.take_back(record)
            if node is not None:
                nodes.add(node)
                nodes.checkpoints.update(self._checkpoints.held([node.id]))
        else:
            node = self._checkpoints.take_back(record) if record.node in nodes else None
            if node is not None:
                nodes.checkpoints.add(node.id)
        return node is not None

    def run(self, frame: Frame, applied: Applied, refused: Collection[LaneId | None]) -> None:
        """In the frame's order: a copy may read what a later opening gives up."""
        for op in frame.ops:
            if isinstance(op, DropNodes):
                self._store.drop(op.nodes)
                self._checkpoints.drop((*op.nodes, *op.checkpoints))
            elif isinstance(op, CopyRows):
                if op in applied.moves:
                    self._rows.copy_rows(op.source, op.target, op.rows)
                    self._states.copy(op.source, op.target, op.rows)
            elif isinstance(op, LoadNodes):
                if op in applied.moves:
                    self._load(op)
            elif op.lane not in refused:
                # Void rows are zeroed: a mask does not keep one conversation's NaN from the next one.
                self._rows.clear(op.lane, op.cached_prefix)
                if op.cached_prefix == 0:
                    self._states.clear(op.lane)
        self._store.release()
        self._checkpoints.release()

    def _load(self, op: LoadNodes) -> None:
        self._store.load(op.lane, op.start, op.end, op.nodes)
        if self._ledger.state_rows:
            self._checkpoints.load(op.lane, op.end, op.nodes[-1])

    def store(
        self, stores: Iterable[StoreNodes], refused: Collection[LaneId | None]
    ) -> tuple[NodeId, ...]:
        """Keeps the rows that became nodes; returns what could not be kept, out of the table again. `refused`:
        lanes whose rows turned out to be void.
        """
        lost: list[NodeId] = []
        for op in stores:
            if op.lane in refused:
                lost += (span.node for span in op.spans)
            else:
                lost += self._keep(op)
        self._ledger.nodes.drop(lost)
        return tuple(lost)

    def _keep(self, op: StoreNodes) -> list[NodeId]:
        """A node that was there already only gets its checkpoint."""
        new = set(self._store.missing(span.node for span in op.spans))
        nodes = [self._ledger.nodes[span.node] for span in op.spans if span.node in new]
        lost = list(self._store.store(op.lane, nodes))
        marked = [self._ledger.nodes[span.node] for span in op.spans if span.checkpoint]
        lost.extend(node.id for node in marked if not self._checkpoints.save(op.lane, node))
        return lost

    def unknown(self, frame: Frame) -> Iterator[NodeId]:
        """Of the nodes that the frame asks to be stored, those that are not here: it was refused whole."""
        for op in frame.after:
            yield from (span.node for span in op.spans if span.node not in self._ledger.nodes)


def joined(*ids: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """Each once, in the order of their first mention."""
    return tuple(dict.fromkeys(id_ for group in ids for id_ in group))
