"""Chain nodes over several replicas: whatever is stored, lost, dropped and loaded, a lane's rows are its tokens'.

A coordinator's replica and three stages, with frames between them. The stages here keep rows that know what they were
computed from; one loses nodes. The coordinator is bolder than the real one: it loads, skips and claims what is not so.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from coordinator.applied import Applied, Standing
from coordinator.frames import (
    CopyRows,
    DropNodes,
    Epoch,
    Frame,
    JobId,
    LaneId,
    LoadNodes,
    NodeId,
    NodeSpan,
    Op,
    OpenLane,
    Refusal,
    Segment,
    SegmentKind,
    StoreNodes,
)
from coordinator.ledger import Ledger
from coordinator.nodes import Node, NodeTable, node_id, root_of
from coordinator.prefixes import digest_of
from coordinator.requests import GREEDY

STAGES, LANES, MAX_ROWS = 3, 2, 12
FRAIL = 1  # the stage that loses nodes
ROOT = root_of("model")

stages = st.integers(0, STAGES - 1)
lanes = st.integers(0, LANES - 1)
rows = st.integers(0, 7)
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
ways = st.sampled_from(["careful", "bold", "skipping", "beyond"])
troubles = st.sampled_from(["loses", "loses", "loses", "full", "full", "anew", "epoch"])
cuts = st.sets(st.integers(1, 8), min_size=2, max_size=4)


def row_of(before: int, token: int) -> int:
    """What a row holds: it was computed from its token and from all that the row before it was computed from."""
    return hash((before, token))


def cold(path: Sequence[int]) -> list[int]:
    made = [0]
    for token in path:
        made.append(row_of(made[-1], token))
    return made[1:]


@dataclass
class Message:
    """A frame on its way, and what stages say of it."""

    frame: Frame
    refusals: tuple[Refusal, ...] = ()
    lost: tuple[NodeId, ...] = ()
    least: dict[int, int] = field(default_factory=dict)
    loaded_by: dict[int, int] = field(default_factory=dict)  # stages, by lane


class Stage:
    """Does what its ledger lets it do, with rows of its own."""

    def __init__(self, index: int) -> None:
        self.ledger = Ledger(LANES, MAX_ROWS, stage=index)
        self.rows = [[0] * MAX_ROWS for _ in range(LANES)]
        self.kept: dict[NodeId, tuple[int, list[int]]] = {}
        self.inbox: deque[Message] = deque()
        self.is_full = False

    def take(self) -> Message | None:
        """None: the frame was applied before, or is of another epoch."""
        message = self.inbox.popleft()
        wanted = [n for op in message.frame.ops if isinstance(op, LoadNodes) for n in op.nodes]
        gone = [node for node in wanted if node in self.ledger.nodes and node not in self.kept]
        self.ledger.nodes.drop(gone)
        applied = self.ledger.apply(message.frame, message.refusals)
        if applied.standing is not Standing.NEW:
            return None
        self._move(message, applied)
        for segment in applied.segments:
            self._compute(segment)
        unkept = self._keep(applied)
        message.refusals += applied.refusals
        message.lost += (*gone, *applied.lost, *unkept)
        for lane in range(LANES):
            have = self.ledger.valid_rows(LaneId(lane))
            message.least[lane] = min(have, message.least.get(lane, have))
        return message

    def _move(self, message: Message, applied: Applied) -> None:
        for move in applied.moves:
            if isinstance(move, CopyRows):
                self.rows[move.target][: move.rows] = self.rows[move.source][: move.rows]
                continue
            for start, held in (self.kept[node] for node in move.nodes):
                for row in range(max(start, move.start), min(start + len(held), move.end)):
                    self.rows[move.lane][row] = held[row - start]
            message.loaded_by[move.lane] = message.loaded_by.get(move.lane, 0) + 1
        for op in message.frame.ops:
            for node in op.nodes if isinstance(op, DropNodes) else ():
                self.kept.pop(node, None)

    def _compute(self, segment: Segment) -> None:
        buffer = self.rows[segment.lane]
        for row, token in enumerate(segment.tokens, segment.start):
            buffer[row] = row_of(buffer[row - 1] if row else 0, token)

    def _keep(self, applied: Applied) -> tuple[NodeId, ...]:
        spans = [(op.lane, span) for op in applied.stores for span in op.spans]
        lost = tuple(span.node for _, span in spans if self.is_full)
        self.ledger.nodes.drop(lost)
        for lane, span in spans if not lost else ():
            self.kept[span.node] = span.start, self.rows[lane][span.start : span.end]
        self.is_full = self.is_full and not lost
        return lost


class NodeMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.replica = Ledger(LANES, MAX_ROWS)
        self.stages = [Stage(index) for index in range(STAGES)]
        self.jobs = 0
        self.paths: dict[NodeId, tuple[int, ...]] = {ROOT: ()}  # tokens of a node and its ancestors
        self.chains: dict[NodeId, tuple[NodeId, ...]] = {}  # from the root down to a node
        self.believed: set[NodeId] = set()  # sent to be stored, and not dropped since
        self.published: set[NodeId] = set()
        self.harmed: set[NodeId] = set()  # what the frail stage lost without a word
        self.to_drop: list[NodeId] = []
        self.held = 0  # frames that are sent and do not travel by themselves

    # Frames go out

    def send(
        self,
        ops: Sequence[Op] = (),
        segments: Sequence[Segment] = (),
        after: Sequence[StoreNodes] = (),
    ) -> None:
        if self.to_drop:
            ops = (DropNodes(tuple(self.to_drop)), *ops)
            self.published.difference_update(self.to_drop)
            self.believed.difference_update(self.to_drop)
            self.to_drop = []
        self.believed |= {span.node for op in after for span in op.spans}
        epoch, seq = self.replica.epoch, self.replica.next_seq
        frame = Frame(epoch, seq, tuple(ops), tuple(segments), after=tuple(after))
        self.replica.apply(frame)
        self.stages[0].inbox.append(Message(frame))
        self.held = max(0, self.held - 1)
        for stage in range(0 if self.held else STAGES):
            self.run_dry(stage)

    def opening(self, lane: int, prefix: Sequence[int]) -> OpenLane:
        self.jobs += 1
        return OpenLane(LaneId(lane), JobId(self.jobs), len(prefix), digest_of(prefix), ROOT)

    def writing(self, lane: int, start: int, ids: tuple[int, ...]) -> Segment:
        return Segment(LaneId(lane), JobId(self.jobs), start, ids, SegmentKind.VERIFY, GREEDY)

    @rule(lane=lanes, keep=rows, ids=tokens, rejected=tokens, ends=st.none() | cuts)
    def a_turn(
        self, lane: int, keep: int, ids: tuple[int, ...], rejected: tuple, ends: set[int] | None
    ) -> None:
        """With drafts that were rejected; what it leaves may become nodes in the very frame that writes it."""
        prefix = self.replica.tokens(LaneId(lane), keep)
        self.send((self.opening(lane, prefix),), (self.writing(lane, len(prefix), rejected),))
        spans = () if ends is None else self.spans((*prefix, *ids), ends)
        after = (StoreNodes(LaneId(lane), spans),) if spans else ()
        self.send((), (self.writing(lane, len(prefix), ids),), after)

    @rule(source=lanes, count=rows)
    def a_copy(self, source: int, count: int) -> None:
        target = LaneId((source + 1) % LANES)
        if have := self.replica.tokens(LaneId(source), count):
            self.send((CopyRows(LaneId(source), target, len(have)), self.opening(target, have)))

    def spans(self, path: Sequence[int], ends: set[int]) -> tuple[NodeSpan, ...]:
        """A chain over the tokens, cut at these rows."""
        parent, made = ROOT, []
        for start, end in pairwise(sorted({0, *(min(end, len(path)) for end in ends)})):
            node = node_id(parent, path[start:end])
            made.append(NodeSpan(node, parent, start, end))
            self.paths[node] = tuple(path[:end])
            self.chains[node] = tuple(span.node for span in made)
            parent = node
        return tuple(made)

    @rule(lane=lanes, ends=cuts)
    def rows_become_nodes(self, lane: int, ends: set[int]) -> None:
        if path := self.replica.tokens(LaneId(lane)):
            self.send(after=(StoreNodes(LaneId(lane), self.spans(path, ends)),))

    @precondition(lambda self: self.chains)
    @rule(lane=lanes, off=st.integers(-1, 1), data=st.data())
    def rows_are_said_to_hang_on_others(self, lane: int, off: int, data: st.DataObject) -> None:
        """Under any parent, whatever the lane holds before, and not always where the parent ends."""
        parent = data.draw(st.sampled_from([ROOT, *self.chains]))
        start = max(0 if parent == ROOT else 1, len(self.paths[parent]) + off)
        if ids := self.replica.tokens(LaneId(lane))[start:]:
            node = node_id(parent, ids)
            self.paths.setdefault(node, (*self.paths[parent], *ids))
            self.chains[node] = (*self.chains.get(parent, ()), node)
            span = NodeSpan(node, parent, start, start + len(ids))
            self.send(after=(StoreNodes(LaneId(lane), (span,)),))

    @precondition(lambda self: self.chains)
    @rule(lane=lanes, less=st.integers(0, 3), way=ways, ids=tokens, data=st.data())
    def a_lane_goes_on_from_nodes(
        self, lane: int, less: int, way: str, ids: tuple[int, ...], data: st.DataObject
    ) -> None:
        """Careful: from published nodes, behind rows that are theirs."""
        is_careful = way == "careful" and bool(self.published)
        known = sorted(self.published if is_careful else self.chains)
        long = [node for node in known if way != "skipping" or len(self.chains[node]) > 1]
        last = data.draw(st.sampled_from(long or known))
        path = self.paths[last]
        start = self.replica.usable_prefix(LaneId(lane), path, ROOT)
        if not is_careful:
            have = len(path) if way == "beyond" else self.replica.valid_rows(LaneId(lane))
            start = data.draw(st.integers(0, min(have, len(path) - 1)))
        end = max(start + 1, len(path) - less)
        if not start < end <= min(len(path), MAX_ROWS):
            return
        chain = self.chains[last]
        pairs = zip((ROOT, *chain), chain, strict=False)
        needed = [n for up, n in pairs if start < len(self.paths[n]) and len(self.paths[up]) < end]
        if way == "skipping" and len(needed) > 1:
            del needed[data.draw(st.integers(0, len(needed) - 1))]
        ops: tuple[Op, ...] = (LoadNodes(LaneId(lane), start, end, tuple(needed)),)
        if way == "beyond":  # the rows before it are right, as far as there are any
            have = self.replica.usable_prefix(LaneId(lane), path[:start], ROOT)
            ops = (self.opening(lane, path[: max(0, have - 1)]), *ops)
        ops = (*ops, self.opening(lane, path[:end]))
        self.send(ops, (self.writing(lane, end, ids),) if end < MAX_ROWS else ())

    @precondition(lambda self: self.chains)
    @rule(data=st.data(), below=st.booleans())
    def nodes_are_dropped(self, data: st.DataObject, below: bool) -> None:
        """With all that hangs on them, as the index does it, or without."""
        node = data.draw(st.sampled_from(sorted(self.chains)))
        self.to_drop += [n for n in self.chains if n == node or (below and node in self.chains[n])]

    # They arrive

    @rule(count=st.integers(2, 6), upto=stages)
    def frames_travel_slowly(self, count: int, upto: int) -> None:
        """Some stages have taken what others have not."""
        self.held = count
        for stage in range(upto):
            self.run_dry(stage)

    def run_dry(self, stage: int) -> None:
        while self.stages[stage].inbox:
            message = self.stages[stage].take()
            if message is None:
                continue
            if stage + 1 < STAGES:
                self.stages[stage + 1].inbox.append(message)
            else:
                self.answered(message)

    def answered(self, message: Message) -> None:
        refused = {refusal.lane for refusal in message.refusals}
        for op in message.frame.ops:
            if isinstance(op, LoadNodes) and op.lane not in refused:
                assert message.loaded_by[op.lane] == STAGES, "served from a part of the stages"
        for lane in refused:
            self.replica.truncate(lane, message.least[lane])
        wanted = {span.node for op in message.frame.after for span in op.spans}
        self.believed -= set(message.lost)
        self.published = (self.published | wanted) & self.believed
        self.to_drop += message.lost

    # What goes wrong

    @rule(kind=troubles, data=st.data())
    def something_goes_wrong(self, kind: str, data: st.DataObject) -> None:
        stage = self.stages[data.draw(stages)]
        if kind == "loses" and self.stages[FRAIL].kept:
            node = data.draw(st.sampled_from(sorted(self.stages[FRAIL].kept)))
            del self.stages[FRAIL].kept[node]
            self.harmed.add(node)
        stage.is_full = stage.is_full or kind == "full"
        if kind == "anew":
            self.start_anew(stage)
        elif kind == "epoch":
            self.open_epoch()

    def start_anew(self, stage: Stage) -> None:
        """With nothing in it, and counting frames as before."""
        self.harmed |= stage.kept.keys()
        stage.kept.clear()
        stage.rows = [[0] * MAX_ROWS for _ in range(LANES)]
        stage.ledger.nodes.drop(stage.ledger.nodes.ids())
        for lane in range(LANES):
            stage.ledger.truncate(LaneId(lane), 0)

    def open_epoch(self) -> None:
        """What was on its way is gone; what it stored or dropped is in doubt, and goes."""
        for frame in [message.frame for stage in self.stages for message in stage.inbox]:
            self.to_drop += [span.node for op in frame.after for span in op.spans]
            drops = [op for op in frame.ops if isinstance(op, DropNodes)]
            self.to_drop += [node for op in drops for node in op.nodes]
        self.replica.reset(Epoch(self.replica.epoch + 1))
        for stage in self.stages:
            stage.inbox.clear()
            stage.ledger.reset(self.replica.epoch)

    # What must hold

    @invariant()
    def rows_are_those_of_their_tokens(self) -> None:
        """In lanes and in nodes."""
        for stage in self.stages:
            for lane, buffer in enumerate(stage.rows):
                path = stage.ledger.tokens(LaneId(lane))
                assert buffer[: len(path)] == cold(path)
            for node, (start, held) in stage.kept.items():
                path = self.paths[node]
                assert (start + len(held), held) == (len(path), cold(path)[start:])

    @invariant()
    def a_stage_keeps_what_its_table_says_but_for_what_it_lost(self) -> None:
        for stage in self.stages:
            table = set(stage.ledger.nodes.ids())
            assert stage.kept.keys() <= table
            assert table - stage.kept.keys() <= self.harmed

    @invariant()
    def what_is_published_every_stage_has(self) -> None:
        if not any(stage.inbox for stage in self.stages):
            sound = self.published - self.harmed
            assert all(sound <= stage.kept.keys() for stage in self.stages)


NodeMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
TestNodesOverThreeStages = NodeMachine.TestCase


# The machine's own teeth: each of these makes it fail.


def _believes_any_span(self: NodeTable, span: NodeSpan, lane: Sequence[int]) -> Node:
    return Node(span.node, span.parent, span.start, array("i", lane[span.start : span.end]))


PLANTED = {
    "lead_fault": (NodeTable, lambda *_: None),
    "chain_fault": (NodeTable, lambda *_: None),
    "_chain_differs": (NodeTable, lambda *_: None),
    "missing": (NodeTable, lambda *_: ()),
    "make": (NodeTable, _believes_any_span),
    "_node_guard": (Ledger, lambda *_: None),
    "_gap_guard": (Ledger, lambda *_: None),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, wrong = PLANTED[name]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(Exception):  # noqa: B017, PT011 -- whatever a wrong row breaks first
        _play(starts=8)


def _play(starts: int) -> None:
    """Runs that differ, without a search for the shortest that fails."""
    quick = settings(max_examples=100, deadline=None, database=None, phases=[Phase.generate])
    for start in range(starts):
        machine = seed(start)(type("Machine", (NodeMachine,), {}))
        run_state_machine_as_test(machine, settings=quick)
