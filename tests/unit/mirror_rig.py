"""Stages that keep numbered bytes, for tests of what a neighbour keeps of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import torch

from coordinator.nodes import Node, node_id, root_of
from stage.kv.kept import KeptNodes
from stage.kv.mirror import Key, MirrorShelf, Record
from stage.kv.node_file import ROWS, STATE, FileKind, bytes_of
from stage.kv.outbox import Outbox

KINDS = tuple(
    FileKind("model", 0, 2, "float32", ((1, 2, 2),), "test", each) for each in (ROWS, STATE)
)
ROW_BYTES = 16
STATE_BYTES = 40
PLENTY = 2**20


def chain(rows: Sequence[int], first: int = 0) -> list[Node]:
    """Nodes behind one another, of so many rows each; `first`: the first token."""
    nodes: list[Node] = []
    parent, start = root_of("model"), 0
    for count in rows:
        tokens = array("i", range(first + start, first + start + count))
        nodes.append(Node(node_id(parent, tokens), parent, start, tokens))
        parent, start = nodes[-1].id, start + count
    return nodes


def empty(node: Node, holds: str) -> torch.Tensor:
    if holds == ROWS:
        return torch.zeros((node.rows, ROW_BYTES // 4))
    return torch.zeros(STATE_BYTES, dtype=torch.uint8)


class KeepingStage:
    """A stage, as far as its mirror knows it: no two things that it ever kept have the same bytes."""

    def __init__(
        self, outbox: Outbox, budget: int = PLENTY, kinds: Sequence[FileKind] = KINDS
    ) -> None:
        self.outbox = outbox
        self.stores = {
            kind.holds: KeptNodes(
                budget // 2,
                None,
                lambda node, holds=kind.holds: empty(node, holds),
                outbox.of(kind),
            )
            for kind in kinds
        }
        self.kept = 0

    def keep(self, node: Node, holds: str = ROWS) -> bool:
        self.kept += 1
        data = empty(node, holds)
        bytes_of(data)[:4] = self.kept.to_bytes(4, "big")
        return self.stores[holds].keep(node, data.nbytes, lambda: data)

    def drop(self, node: Node, holds: str = ROWS) -> None:
        self.stores[holds].drop([node.id])

    @property
    def contents(self) -> dict[Key, bytes]:
        return {
            (id_, holds): bytes(bytes_of(kept.data))
            for holds, store in self.stores.items()
            for id_ in tuple(store)
            if (kept := store.get(id_)) is not None
        }

    def lacks(self, key: Key) -> bool:
        return any(store.lacks(key) for store in self.stores.values())

    def take_back(self, record: Record) -> bool:
        return any(store.take_back(record) is not None for store in self.stores.values())


def told(outbox: Outbox) -> Iterator[Record | tuple[Key, ...]]:
    """What is to be sent now."""
    while (each := outbox.take(lambda: outbox.is_idle)) is not None:
        yield each


def hear(shelf: MirrorShelf, said: Record | tuple[Key, ...]) -> None:
    if isinstance(said, Record):
        shelf.put(said)
    else:
        shelf.drop(said)


def shelved(shelf: MirrorShelf) -> dict[Key, bytes]:
    records = (shelf.get(key) for key in shelf.for_giving())
    return {record.key: bytes(record.payload) for record in records if record is not None}
