"""Chain nodes: blocks of tokens under a parent, and the table of those that a replica knows.

Part of the replicated state machine: frames change the table, on the coordinator and on every stage alike. Decides
what a node's identity is and whether rows of a lane may come from nodes or become some. It holds no rows, and does
not know which nodes are worth keeping: the chain index does.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from coordinator.frames import DIGEST_BYTES, LoadNodes, NodeId, NodeSpan


def root_of(fingerprint: str, tenant: str = "") -> NodeId:
    """The parent of all chains of one model and one tenant: rows of another model or tenant never match."""
    shared = hashlib.blake2b(fingerprint.encode(), digest_size=DIGEST_BYTES).digest()
    if not tenant:
        return NodeId(shared)
    # No node's id can be a root: ids are made without `person`. And what comes before the name is of one length.
    raw = shared + tenant.encode()
    return NodeId(hashlib.blake2b(raw, digest_size=DIGEST_BYTES, person=b"tenant").digest())


def node_id(parent: NodeId, tokens: Sequence[int]) -> NodeId:
    raw = array("i", tokens).tobytes()
    return NodeId(hashlib.blake2b(parent + raw, digest_size=DIGEST_BYTES).digest())


@dataclass(frozen=True, slots=True)
class Node:
    """Rows [start, end) of every sequence that begins with its ancestors' tokens and its own."""

    id: NodeId
    parent: NodeId
    start: int
    tokens: array[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def rows(self) -> int:
        return len(self.tokens)


class NodeTable:
    """Which nodes exist. A match always compares tokens; an id alone proves nothing."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, Node] = {}
        self.checkpoints: set[NodeId] = set()  # nodes with the recurrent state at their end

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: NodeId) -> bool:
        return node in self._nodes

    def __getitem__(self, node: NodeId) -> Node:
        return self._nodes[node]

    def ids(self) -> tuple[NodeId, ...]:
        return tuple(self._nodes)

    def all(self) -> tuple[Node, ...]:
        """Parents first."""
        return tuple(sorted(self._nodes.values(), key=lambda node: node.start))

    def replace(self, nodes: Iterable[Node], checkpoints: Iterable[NodeId]) -> None:
        """These are there now, and no others."""
        self._nodes = {node.id: node for node in nodes}
        self.checkpoints = set(checkpoints)

    def add(self, node: Node) -> None:
        self._nodes.setdefault(node.id, node)

    def drop(self, nodes: Iterable[NodeId]) -> None:
        for node in nodes:
            self._nodes.pop(node, None)
            self.checkpoints.discard(node)

    def missing(self, nodes: Iterable[NodeId]) -> tuple[NodeId, ...]:
        return tuple(node for node in nodes if node not in self._nodes)

    def chain_fault(self, op: LoadNodes) -> str | None:
        """Why the op's nodes, all of which are known, do not make up its rows."""
        nodes = [self._nodes[node] for node in op.nodes]
        if not nodes[0].start <= op.start < nodes[0].end:
            return f"row {op.start} does not lie in the first node"
        if not nodes[-1].start < op.end <= nodes[-1].end:
            return f"row {op.end - 1} does not lie in the last node"
        for parent, child in zip(nodes, nodes[1:], strict=False):
            if (child.parent, child.start) != (parent.id, parent.end):
                return "the nodes are no chain"
        return None

    def lead_fault(self, op: LoadNodes, lane: Sequence[int], root: NodeId) -> str | None:
        """Why the lane's rows before `start`, of that root, are not those that the nodes were computed behind."""
        return self._chain_differs(op.nodes[0], lane, op.start, root) if op.start else None

    def tokens_of(self, op: LoadNodes) -> array[int]:
        """The tokens of rows [start, end)."""
        out = array("i")
        for id_ in op.nodes:
            node = self._nodes[id_]
            out.extend(node.tokens[max(0, op.start - node.start) : op.end - node.start])
        return out

    def take(
        self, spans: Iterable[NodeSpan], lane: Sequence[int], first: int, root: NodeId
    ) -> tuple[NodeSpan, ...]:
        """Makes nodes of a lane's rows, whose recurrent state is known from row `first` on, under their root. Returns
        the spans that are nodes now, or have a checkpoint now, and did not before.
        """
        made = []
        for span in spans:
            if self._has(span) or (span.checkpoint and span.end < first):
                continue
            node = self.make(span, lane, root)
            if node is not None:
                self.add(node)
                made.append(span)
                if span.checkpoint:
                    self.checkpoints.add(node.id)
        return tuple(made)

    def lacking(self, spans: Iterable[NodeSpan]) -> Iterator[NodeId]:
        """Those that are not there, and parents for want of which they are not."""
        for span in spans:
            if not self._has(span):
                if span.start > 0 and span.parent not in self._nodes:
                    yield span.parent
                yield span.node

    def _has(self, span: NodeSpan) -> bool:
        return span.node in (self.checkpoints if span.checkpoint else self._nodes)

    def make(self, span: NodeSpan, lane: Sequence[int], root: NodeId) -> Node | None:
        """The node that these rows of a lane are, or None where they are not what the span claims."""
        tokens = array("i", lane[span.start : span.end])
        if len(tokens) != span.end - span.start or node_id(span.parent, tokens) != span.node:
            return None
        parent = self._nodes.get(span.parent)
        if span.start != (0 if parent is None else parent.end):
            # An id does not say where its rows begin: the true child would find it taken.
            return None
        if span.start == 0 and span.parent != root:
            return None
        if span.start > 0 and self._chain_differs(span.parent, lane, span.start, root) is not None:
            return None
        return Node(span.node, span.parent, span.start, tokens)

    def _chain_differs(
        self, last: NodeId, lane: Sequence[int], end: int, root: NodeId
    ) -> str | None:
        """How the first `end` rows of a lane, of that root, differ from those of a chain that reaches over them."""
        node = self._nodes.get(last)
        if node is not None and node.end < end:
            return f"the chain ends at row {node.end}"
        while node is not None:
            have = array("i", lane[node.start : min(node.end, end)])
            if have != node.tokens[: len(have)]:
                return f"rows {node.start} to {node.end} hold other tokens than the chain"
            if node.start == 0:
                return None if node.parent == root else "the chain is of another root"
            node = self._nodes.get(node.parent)
        return "a node of the chain is gone"
