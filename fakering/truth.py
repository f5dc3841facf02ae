"""What the stages of a fake ring really hold, told from their buffers: the measure of what anybody believes.

It asks a ledger what ought to be there and never takes its word for it. What it computes that coordinator/held.py
computes too, it computes in a way of its own. Raises Breach; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.frames import NO_ROOT, LaneId, NodeId
from coordinator.held import HeldLane, Holding
from coordinator.nodes import Node
from fakering.model import Hashes, KeptRows, context_hashes
from fakering.stages import FakeStage


class Breach(AssertionError):
    """An invariant of the whole is broken."""


def require(holds: bool, breach: str) -> None:
    if not holds:
        raise Breach(breach)


def check_rows(stage: FakeStage, lane: LaneId, tokens: Sequence[int], first: int = 0) -> None:
    """The stage's buffers hold the rows of these tokens, and a state at each row count from `first` on."""
    rows, where = len(tokens), f"stage {stage.index}, lane {lane}"
    ids = np.asarray(tokens, dtype=np.uint64)
    require(np.array_equal(stage.rows.tokens[lane, :rows], ids), f"{where}: rows of other tokens")
    context = context_hashes(ids)
    made_of = stage.rows.activations[lane, :rows]
    require(np.array_equal(made_of, context), f"{where}: rows that were computed wrong")
    if stage.ledger.state_rows:
        for count in range(max(first, 1), rows + 1):
            _check_state(stage.rows.state(lane, count), context, count, where)


def _check_state(state: int | None, context: Hashes, rows: int, where: str) -> None:
    require(state is not None, f"{where}: no state at row {rows}")
    require(state == int(context[rows - 1]), f"{where}: a wrong state at row {rows}")


class RightNodes:
    """Nodes of stages, each looked at once: what is kept never changes."""

    def __init__(self) -> None:
        self._right: dict[tuple[int, NodeId], KeptRows] = {}

    def check(self, stage: FakeStage) -> None:
        """What the stage keeps are the rows of its nodes, and no others."""
        nodes, where = stage.ledger.nodes, f"stage {stage.index}"
        require(stage.kept.keys() == set(nodes.ids()), f"{where} keeps other rows than nodes")
        states = {node for node, kept in stage.kept.items() if kept.state is not None}
        require(states == nodes.checkpoints, f"{where} keeps other states than checkpoints")
        for node in nodes.all():
            key, kept = (stage.index, node.id), stage.kept[node.id]
            if self._right.get(key) is not kept:
                _check_node(stage, node, _chain(stage, node))
                self._right[key] = kept


def _chain(stage: FakeStage, node: Node) -> tuple[int, ...]:
    tokens = tuple(node.tokens)
    while node.start:
        node = stage.ledger.nodes[node.parent]
        tokens = (*node.tokens, *tokens)
    return tokens


def _check_node(stage: FakeStage, node: Node, chain: Sequence[int]) -> None:
    where, kept = f"stage {stage.index}, node {node.id.hex()[:6]}", stage.kept[node.id]
    context = context_hashes(np.asarray(chain, dtype=np.uint64))
    require((kept.start, kept.end) == (node.start, len(chain)), f"{where}: other rows")
    require(kept.tokens.tolist() == list(node.tokens), f"{where}: rows of other tokens")
    require(np.array_equal(kept.activations, context[node.start :]), f"{where}: wrong rows")
    if kept.state is not None:
        require(kept.state == int(context[-1]), f"{where}: a wrong state")


def check_agreed(stages: Sequence[FakeStage], held: Holding) -> None:
    """What is said to be held by all is so: neither more nor less."""
    for lane in map(LaneId, range(stages[0].ledger.lanes)):
        _check_lane(stages, lane, held.lane(lane))
    kept = [stage.kept for stage in stages]
    everywhere = set(kept[0]).intersection(*kept)
    parents = {node.id: node for node in stages[0].ledger.nodes.all()}
    usable: set[NodeId] = set()
    for id_, node in parents.items():  # parents come first
        if id_ in everywhere and (node.start == 0 or node.parent in usable):
            usable.add(id_)
    require({node.id for node in held.nodes} == usable, "other nodes than all stages have")
    states = {id_ for id_ in usable if all(k[id_].state is not None for k in kept)}
    require(held.checkpoints == states, "other checkpoints than all stages have")


def _check_lane(stages: Sequence[FakeStage], lane: LaneId, held: HeldLane) -> None:
    known = [stage.ledger.tokens(lane) for stage in stages]
    roots = {stage.ledger.root(lane) for stage in stages}
    rows = 0
    while all(rows < len(tokens) and tokens[rows] == known[0][rows] for tokens in known):
        rows += 1
    first = max(stage.ledger.holding().lane(lane).first for stage in stages)
    if len(roots) > 1 or rows < first:
        rows = 0
    require(tuple(held.tokens) == known[0][:rows], f"lane {lane}: not what all stages have")
    require(held.root == (roots.pop() if rows else NO_ROOT), f"lane {lane}: another root")
    require(held.first == (first if rows else 0), f"lane {lane}: goes on from {held.first}")
    for stage in stages:
        check_rows(stage, lane, held.tokens, held.first)


def check_opened(stages: Sequence[FakeStage], held: Holding, right: RightNodes) -> None:
    """Every stage begins the epoch with just this."""
    for stage in stages:
        has = stage.ledger.holding()
        where = f"stage {stage.index}"
        lanes = range(stage.ledger.lanes)
        require(all(has.lane(n) == held.lane(n) for n in lanes), f"{where} begins with other lanes")
        ids = {node.id: node for node in has.nodes}
        require(ids == {node.id: node for node in held.nodes}, f"{where} begins with other nodes")
        require(has.checkpoints == held.checkpoints, f"{where} begins with other checkpoints")
        require(len(stage.ledger.memos) == 0, f"{where} begins with memos of before")
        right.check(stage)
