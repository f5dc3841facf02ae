"""What one stage keeps for another one: the bytes of the nodes that lie in the other one's host memory.

Decides how much of it fits, and in which order it is best given back. It understands none of the bytes: whether they
are what the other stage computed is for that stage, or the one in its place, to find out. No sockets, no threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.frames import NodeId
from stage.kv.node_file import ROWS, Buffer

# A node, and what is kept of it: its rows or the state at its end (FileKind.holds).
Key = tuple[NodeId, str]


@dataclass(frozen=True, slots=True)
class Record:
    """What one stage keeps of one node."""

    node: NodeId
    parent: NodeId
    holds: str
    stamp: int  # of these very bytes: what is kept again after it was given up may be other ones
    head: Buffer  # as in a node's file
    payload: Buffer

    @property
    def key(self) -> Key:
        return self.node, self.holds

    @property
    def nbytes(self) -> int:
        return len(self.head) + len(self.payload)


class MirrorShelf:
    """One thread at a time uses it."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # bytes of payloads, as the other stage counts them
        self.nbytes = 0
        self._records: dict[Key, Record] = {}  # kept longest ago first

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: Key) -> bool:
        return key in self._records

    def put(self, record: Record) -> bool:
        """False when there is no room: what came first stays, since what comes later may hang on it."""
        self.drop([record.key])
        if self.nbytes + len(record.payload) > self.budget:
            return False
        self._records[record.key] = record
        self.nbytes += len(record.payload)
        return True

    def get(self, key: Key) -> Record | None:
        return self._records.get(key)

    def drop(self, keys: Iterable[Key]) -> None:
        for key in keys:
            record = self._records.pop(key, None)
            if record is not None:
                self.nbytes -= len(record.payload)

    def clear(self) -> None:
        self.drop(tuple(self._records))

    def for_giving(self) -> dict[Key, int]:
        """All keys, with their stamps: the chain whose last node came last goes first, and of a chain its first node,
        so that wherever the giving ends, what was given can be used.
        """
        of_node: dict[NodeId, list[Record]] = {}
        for record in self._records.values():
            of_node.setdefault(record.node, []).append(record)
        given: dict[Key, int] = {}
        for last in reversed(self._records.values()):
            for node in reversed(_chain(last.node, of_node, given)):
                records = sorted(of_node[node], key=_is_behind_rows)
                given.update((record.key, record.stamp) for record in records)
        return given


def _is_behind_rows(record: Record) -> bool:
    """A state is of no use before its node's rows are there."""
    return record.holds != ROWS


def _chain(
    node: NodeId, of_node: dict[NodeId, list[Record]], given: dict[Key, int]
) -> list[NodeId]:
    """The node and those that it hangs on, but for what has been given already; last node first."""
    chain: dict[NodeId, None] = {}
    while node in of_node and node not in chain and of_node[node][0].key not in given:
        chain[node] = None
        node = of_node[node][0].parent
    return list(chain)
