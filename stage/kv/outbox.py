"""What a stage still has to tell the neighbour that keeps its nodes' bytes.

Decides what the neighbour lacks and what it has too much of. It holds no bytes that the stage's store does not hold:
what the store gives up before it was sent is never sent, so a slow neighbour costs no memory, and whoever stores or
drops a node never waits. What is told in this order is never more than the store's budget on the other side: what the
store gave up is told first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from coordinator.frames import NodeId
from coordinator.nodes import Node
from stage.kv.mirror import Key, Record
from stage.kv.node_file import Damaged, FileKind, Foreign, bytes_of, packed, unpacked

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Kept:
    node: Node
    data: Tensor
    kind: FileKind


class Outbox:
    """The thread of the frames says what it keeps; another one takes what is to be sent."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Guarded by _changed, from here on.
        self._here: dict[Key, _Kept] = {}
        self._there: set[Key] = set()  # once all is sent that was taken
        self._pending: dict[Key, None] = {}  # here, and not there
        self._doomed: dict[Key, None] = {}  # there, and no longer here

    def of(self, kind: FileKind) -> Mirrored:
        return Mirrored(self, kind)

    @property
    def is_idle(self) -> bool:
        """Nothing waits to be taken."""
        with self._changed:
            return not (self._pending or self._doomed)

    def kept(self, node: Node, data: Tensor, kind: FileKind) -> None:
        key = (node.id, kind.holds)
        with self._changed:
            self._here[key] = _Kept(node, data, kind)
            if key not in self._there:
                self._pending[key] = None
                self._changed.notify_all()

    def gone(self, key: Key) -> None:
        with self._changed:
            self._here.pop(key, None)
            self._pending.pop(key, None)
            if key in self._there:
                # Also when it is kept again before this is told: its bytes may be others then.
                self._there.remove(key)
                self._doomed[key] = None
                self._changed.notify_all()

    def reconcile(self, there: Iterable[Key]) -> None:
        """What the neighbour has, as it says itself, with nothing on the way to it."""
        with self._changed:
            had = set(there)
            self._there = had & self._here.keys()
            self._doomed = dict.fromkeys(had - self._there)
            self._pending = {key: None for key in self._here if key not in had}

    def take(self, is_over: Callable[[], bool]) -> Record | tuple[Key, ...] | None:
        """What the neighbour is to be told next: a record, or what it is to drop. Waits for it; None: it is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_idle or is_over())
            if is_over():
                return None
            if self._doomed:
                doomed, self._doomed = tuple(self._doomed), {}
                return doomed
            key = next(iter(self._pending))
            del self._pending[key]
            self._there.add(key)
            kept = self._here[key]
        head, payload = packed(kept.node, kept.data, kept.kind)
        return Record(kept.node.id, kept.node.parent, kept.kind.holds, head, payload)

    def wake(self) -> None:
        """Has whoever waits ask again whether it is over."""
        with self._changed:
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Mirrored:
    """One of a stage's stores, whose bytes a neighbour keeps too."""

    outbox: Outbox
    kind: FileKind

    def kept(self, node: Node, data: Tensor) -> None:
        self.outbox.kept(node, data, self.kind)

    def gone(self, id_: NodeId) -> None:
        self.outbox.gone((id_, self.kind.holds))

    def read(self, record: Record, empty: Callable[[Node], Tensor]) -> tuple[Node, Tensor] | None:
        """What the record holds, unless it is not what this stage would have kept."""
        try:
            node = unpacked(record.head, record.payload, self.kind)
            data = empty(node)
            if (node.id, data.nbytes) != (record.node, len(record.payload)):
                raise Damaged("it holds another node, or not all of it")
        except (Damaged, Foreign) as error:
            log.warning("missed a mirrored node=%s reason=%s", record.node.hex(), error)
            return None
        bytes_of(data)[:] = record.payload
        return node, data
