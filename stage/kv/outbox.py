"""What a stage still has to tell the neighbour that keeps its nodes' bytes.

Decides what the neighbour lacks and what it has too much of. It holds no bytes that the stage's store does not hold:
what the store gives up before it was sent is never sent, so a slow neighbour costs no memory, and whoever stores or
drops a node never waits. What is told in this order is never more than the store's budget on the other side: what the
store gave up is told first.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

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
    stamp: int


class Outbox:
    """The thread of the frames says what it keeps; another one takes what is to be sent."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # No other process stamps alike: what it left behind is told from what is kept here.
        self._stamps = itertools.count(secrets.randbits(62))
        # Guarded by _changed, from here on.
        self._here: dict[Key, _Kept] = {}
        self._there: set[Key] = set()  # these very bytes, once all has arrived that was taken
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
            self._here[key] = _Kept(node, data, kind, next(self._stamps))
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

    def came_from_there(self, record: Record) -> None:
        """What is here now is what the neighbour gave back."""
        with self._changed:
            if record.key in self._here:
                self._here[record.key] = replace(self._here[record.key], stamp=record.stamp)

    def reconcile(self, there: Mapping[Key, int]) -> None:
        """What the neighbour has, and its stamps, as it says itself, with nothing on the way to it."""
        with self._changed:
            here = self._here
            self._there = {key for key, kept in here.items() if there.get(key) == kept.stamp}
            self._doomed = {key: None for key in there if key not in self._there}
            self._pending = {key: None for key in here if key not in self._there}

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
        node, holds = kept.node, kept.kind.holds
        return Record(node.id, node.parent, holds, kept.stamp, *packed(node, kept.data, kept.kind))

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
