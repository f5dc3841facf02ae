"""The chain index: which rows are worth keeping as nodes, which nodes hold a prompt's rows, and which go first.

The one index that decides; stages obey. Rows are stored in blocks of `node_rows` under the block before them, with a
shorter last one. A look-up changes nothing. A node counts from when every stage has acknowledged it. Beyond the room
that every stage has, leaves go first, the one used longest ago before all others; pinned ones stay. Pure bookkeeping:
it sends nothing, and what it gives up must be sent as DropNodes before whatever it hands out next.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from coordinator.chain_records import ChainMatch, Entry, NodeStatus
from coordinator.frames import NodeId, NodeSpan
from coordinator.nodes import Node, node_id
from coordinator.prefixes import common_prefix

# Entries of the heap of leaves below which it is not worth tidying.
_LEAST_HEAP = 64


class ChainIndex:
    """`capacity` counts rows that every stage has room for."""

    def __init__(
        self,
        capacity: int,
        stored: Iterable[Node] = (),
        *,
        node_rows: int,
        min_tail_rows: int,
        checkpoints: int | None = None,
        resumable: Collection[NodeId] = (),
    ) -> None:
        """`stored`: nodes that every stage has from before, parents first. A last block of fewer than
        `min_tail_rows` rows is computed again sooner than it is kept. `checkpoints`: how many there is room for; None:
        no layer needs any. `resumable`: stored nodes that have theirs.
        """
        self.capacity = capacity
        self._node_rows = node_rows
        self._min_tail_rows = min_tail_rows
        self._most_checkpoints = checkpoints
        self._checkpoints: set[NodeId] = set()
        self._dropped_checkpoints: list[NodeId] = []
        self.rows = self.pinned_rows = self._tick = 0
        self._entries: dict[NodeId, Entry] = {}
        self._firsts: dict[tuple[NodeId, int], set[NodeId]] = {}  # by parent and first token
        self._leaves: list[tuple[int, NodeId]] = []  # a heap; what is not true in it is skipped
        self._dropped: list[NodeId] = []
        self.lost_pins: set[NodeId] = set()  # pinned nodes that are gone; anchors take them out
        self.reconcile(stored, resumable)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, node: NodeId) -> bool:
        return node in self._entries

    # What is there

    def match(self, tokens: Sequence[int], root: NodeId) -> ChainMatch:
        """The root's deepest published chain over the first tokens that can be gone on from. Changes nothing."""
        if self._most_checkpoints is not None:
            return self._match_checkpoint(tokens, root)
        parent, depth, path = root, 0, []
        while depth < len(tokens):
            best, rows = self._best_child(parent, tokens[depth : depth + self._node_rows])
            if best is None:
                break
            path.append(best)
            depth += rows
            if rows < self._node_rows:
                break
            parent = best
        return ChainMatch(tuple(path), depth)

    def _best_child(self, parent: NodeId, block: Sequence[int]) -> tuple[NodeId | None, int]:
        best, longest = None, 0
        for child in self._firsts.get((parent, block[0]), ()):
            entry = self._entries[child]
            rows = common_prefix(entry.node.tokens, block) if entry.published else 0
            if rows > longest:
                best, longest = child, rows
        return best, longest

    def _match_checkpoint(self, tokens: Sequence[int], root: NodeId) -> ChainMatch:
        """Recurrent layers go on from the very end of a node with their state, and from nowhere else."""
        deepest = ChainMatch()
        path: list[NodeId] = []
        parent: NodeId | None = root
        depth = 0
        while parent is not None and depth < len(tokens):
            whole = None
            for child in self._firsts.get((parent, tokens[depth]), ()):
                entry = self._entries[child]
                end = entry.node.end
                if not entry.published or entry.node.tokens != array("i", tokens[depth:end]):
                    continue
                if entry.resumable and end > deepest.rows:
                    deepest = ChainMatch((*path, child), end)
                if entry.node.rows == self._node_rows:
                    whole = child
            if whole is not None:
                path.append(whole)
            parent = whole
            depth += self._node_rows
        return deepest

    def loadable(self, nodes: Sequence[NodeId]) -> bool:
        """Whether a lane can still be loaded from them, and gone on behind them."""
        if any(node not in self._entries for node in nodes):
            return False
        return self._most_checkpoints is None or self._entries[nodes[-1]].resumable

    def resumable(self) -> Iterator[NodeId]:
        """Nodes that every stage has the recurrent state at the end of."""
        return (node for node in self._checkpoints if self._entries[node].resumable)

    def node(self, node: NodeId) -> Node:
        return self._entries[node].node

    def nodes(self) -> Iterator[Node]:
        return (entry.node for entry in self._entries.values() if entry.published)

    def statuses(self) -> Iterator[NodeStatus]:
        for node in self.nodes():
            yield NodeStatus(node.id, node.parent, node.start, node.end, self.is_pinned(node.id))

    def is_pinned(self, node: NodeId) -> bool:
        return self._entries[node].pins > 0

    # What is stored

    def store(
        self,
        tokens: Sequence[int],
        root: NodeId,
        ends: Collection[int] = (),
        most: int | None = None,
    ) -> tuple[NodeSpan, ...]:
        """Nodes to be made of a lane's rows that have none yet, as many of the first as room can be made for.

        `ends`: row counts at which a node shall end too, with a checkpoint where layers need one; `most`: how many
        nodes at once. The caller sends them, behind what take_drops() gives.
        """
        self._tick += 1
        wanted = tuple(islice(self._missing(tokens, ends, root), most))
        keep = frozenset(self._path(tokens, root))
        made: list[NodeSpan] = []
        for node in wanted:
            checkpoint = node.end in ends and self._make_checkpoint_room(keep)
            if node.id in self._entries:
                if checkpoint:
                    made.append(self._mark(node))
                continue
            self._supersede(node)
            if node.start > 0 and node.parent not in self._entries:
                continue  # its parent found no room
            if not self._make_room(node.rows, keep | {span.node for span in made}):
                break
            self._add(node, published=False)
            if checkpoint:
                made.append(self._mark(node))
            else:
                made.append(NodeSpan(node.id, node.parent, node.start, node.end))
        return tuple(made)

    def _mark(self, node: Node) -> NodeSpan:
        self._entries[node.id].checkpoint = True
        self._checkpoints.add(node.id)
        return NodeSpan(node.id, node.parent, node.start, node.end, checkpoint=True)

    def _make_checkpoint_room(self, keep: frozenset[NodeId]) -> bool:
        if self._most_checkpoints is None:
            return False
        return self._limit_checkpoints(self._most_checkpoints - 1, keep)

    def _limit_checkpoints(self, most: int, keep: frozenset[NodeId]) -> bool:
        """The one used longest ago goes; of one conversation's the shallowest, which is pinned if it is its head."""
        while len(self._checkpoints) > most:
            held = (self._entries[node] for node in self._checkpoints)
            free = [entry for entry in held if not entry.pins and entry.settled]
            if not free:
                return False
            victim = min(free, key=lambda entry: (entry.used, entry.node.end))
            if victim.children or victim.node.rows == self._node_rows or victim.node.id in keep:
                self._checkpoints.remove(victim.node.id)
                self._dropped_checkpoints.append(victim.node.id)
                victim.checkpoint = victim.resumable = False
            else:
                self._drop(victim.node.id)  # a part of a block is worth nothing without it
        return True

    def use(self, nodes: Iterable[NodeId]) -> None:
        """A job goes on from these nodes: they are given up last."""
        self._tick += 1
        for node in nodes:
            entry = self._entries.get(node)
            if entry is not None:
                entry.used = self._tick
                self._push_leaf(entry)

    def publish(self, nodes: Iterable[NodeId]) -> None:
        """Every stage has them."""
        for node in nodes:
            entry = self._entries.get(node)
            if entry is not None:
                entry.published, entry.resumable = True, entry.checkpoint

    def lose(self, nodes: Iterable[NodeId]) -> None:
        """Some stage lacks them: they go everywhere, with all that hangs on them."""
        for node in nodes:
            if node not in self._entries:
                self._dropped.append(node)
            for gone in self._below(node):
                self._drop(gone)

    def reconcile(self, nodes: Iterable[Node], resumable: Collection[NodeId]) -> None:
        """Every stage has these nodes, parents first, and no others; and these of them with their checkpoint."""
        held = {node.id: node for node in nodes}
        # What was given up stays given up, though some drop may never have come to all stages.
        again = {node for node in self._dropped if node not in self._entries}
        states = frozenset(resumable).difference(self._dropped_checkpoints)
        self.lose([node for node in self._entries if node not in held])
        self._dropped = [node for node in held if node in again]
        self._dropped_checkpoints = [node for node in resumable if node not in states]
        for node in (node for node in held.values() if node.id not in again):
            entry = self._entries.get(node.id)
            if entry is None:
                self._restore(node, node.id in states)
            else:
                self._confirm(entry, node.id in states)
        self._make_room(0, frozenset())
        if self._most_checkpoints is not None:
            self._limit_checkpoints(self._most_checkpoints, frozenset())

    def _confirm(self, entry: Entry, resumable: bool) -> None:
        """A node that was known, whatever was under way with it."""
        entry.published = True
        if self._most_checkpoints is None:
            return
        entry.checkpoint = entry.resumable = resumable
        if resumable:
            self._checkpoints.add(entry.node.id)
            return
        self._checkpoints.discard(entry.node.id)
        if entry.node.rows < self._node_rows:
            self.lose([entry.node.id])  # a part of a block is worth nothing without it

    def take_drops(self) -> tuple[NodeId, ...]:
        """What is to be dropped by the stages before anything else is stored; asked once, it is the caller's."""
        dropped, self._dropped = tuple(dict.fromkeys(self._dropped)), []
        return dropped

    def undelivered(self, nodes: Iterable[NodeId], checkpoints: Iterable[NodeId]) -> None:
        """Nobody knows which stages have heard of these drops."""
        self._dropped.extend(nodes)
        self._dropped_checkpoints.extend(checkpoints)

    def take_checkpoint_drops(self) -> tuple[NodeId, ...]:
        """As take_drops, of nodes that only lose their checkpoint."""
        dropped, self._dropped_checkpoints = tuple(self._dropped_checkpoints), []
        return dropped

    # What stays

    def pin(self, nodes: Sequence[NodeId]) -> None:
        for node in nodes:
            entry = self._entries[node]
            self.pinned_rows += entry.node.rows if entry.pins == 0 else 0
            entry.pins += 1

    def unpin(self, nodes: Sequence[NodeId]) -> None:
        """Nodes that are gone meanwhile are ignored."""
        for node in nodes:
            entry = self._entries.get(node)
            if entry is None or not entry.pins:
                continue
            entry.pins -= 1
            self.pinned_rows -= entry.node.rows if entry.pins == 0 else 0
            self._push_leaf(entry)

    # Inside

    def _restore(self, node: Node, resumable: bool) -> None:
        """Takes in a node from before, unless nobody can go on from it."""
        is_orphan = node.start > 0 and node.parent not in self._entries
        is_part = self._most_checkpoints is not None and node.rows < self._node_rows
        if is_orphan or (is_part and not resumable):
            self._dropped.append(node.id)
            return
        self._add(node, published=True)
        if self._most_checkpoints is not None and resumable:
            entry = self._entries[node.id]
            entry.checkpoint = entry.resumable = True
            self._checkpoints.add(node.id)

    def _missing(
        self, tokens: Sequence[int], ends: Collection[int], parent: NodeId
    ) -> Iterator[Node]:
        for start in range(0, len(tokens), self._node_rows):
            end = min(start + self._node_rows, len(tokens))
            for stop in sorted(e for e in ends if start < e < end):
                yield from self._unless_known(parent, start, tokens[start:stop], ends)
            if (
                end - start < self._node_rows
                and end - start < self._min_tail_rows
                and end not in ends
            ):
                return
            block = array("i", tokens[start:end])
            yield from self._unless_known(parent, start, block, ends)
            parent = node_id(parent, block)

    def _unless_known(
        self, parent: NodeId, start: int, block: Sequence[int], ends: Collection[int]
    ) -> Iterator[Node]:
        node = node_id(parent, block)
        entry = self._entries.get(node)
        needs_state = self._most_checkpoints is not None and start + len(block) in ends
        if entry is None or (needs_state and not entry.checkpoint):
            yield Node(node, parent, start, array("i", block))

    def _path(self, tokens: Sequence[int], parent: NodeId) -> Iterator[NodeId]:
        """The whole blocks of these tokens that are known."""
        for start in range(0, len(tokens) - self._node_rows + 1, self._node_rows):
            parent = node_id(parent, tokens[start : start + self._node_rows])
            if parent not in self._entries:
                return
            yield parent

    def _supersede(self, node: Node) -> None:
        """A shorter block with the same tokens holds nothing that this one does not."""
        for sibling in tuple(self._firsts.get((node.parent, node.tokens[0]), ())):
            entry = self._entries[sibling]
            shorter = entry.node.rows < node.rows and not entry.pins and not entry.checkpoint
            if shorter and entry.published and node.tokens[: entry.node.rows] == entry.node.tokens:
                self._drop(sibling)

    def _make_room(self, rows: int, keep: frozenset[NodeId]) -> bool:
        set_aside = []
        while self.rows + rows > self.capacity and self._leaves:
            item = heapq.heappop(self._leaves)
            entry = self._entries.get(item[1])
            if entry is None or entry.children or entry.pins or entry.used != item[0]:
                continue
            if entry.node.id in keep or not entry.settled:
                set_aside.append(item)
                continue
            self._drop(entry.node.id)
        for item in set_aside:
            heapq.heappush(self._leaves, item)
        return self.rows + rows <= self.capacity

    def _add(self, node: Node, *, published: bool) -> None:
        entry = Entry(node, self._tick, published)
        self._entries[node.id] = entry
        self._firsts.setdefault((node.parent, node.tokens[0]), set()).add(node.id)
        if node.parent in self._entries:
            self._entries[node.parent].children.add(node.id)
        self.rows += node.rows
        self._push_leaf(entry)

    def _drop(self, node: NodeId) -> None:
        entry = self._entries.pop(node)
        self._checkpoints.discard(node)
        first = (entry.node.parent, entry.node.tokens[0])
        self._firsts[first].discard(node)
        if not self._firsts[first]:
            del self._firsts[first]
        parent = self._entries.get(entry.node.parent)
        if parent is not None:
            parent.children.discard(node)
            self._push_leaf(parent)
        self.rows -= entry.node.rows
        if entry.pins:
            self.pinned_rows -= entry.node.rows
            self.lost_pins.add(node)
        self._dropped.append(node)

    def _push_leaf(self, entry: Entry) -> None:
        if not entry.children:
            heapq.heappush(self._leaves, (entry.used, entry.node.id))
        if len(self._leaves) > 4 * len(self._entries) + _LEAST_HEAP:
            self._leaves = [(e.used, e.node.id) for e in self._entries.values() if not e.children]
            heapq.heapify(self._leaves)

    def _below(self, node: NodeId) -> list[NodeId]:
        """The node and all that hang on it, children before parents."""
        order, stack = [], [node] if node in self._entries else []
        while stack:
            order.append(stack.pop())
            stack.extend(self._entries[order[-1]].children)
        return order[::-1]
