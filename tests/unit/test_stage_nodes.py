"""Stages in a row that keep chain nodes: what they store, load, lose and say of it, by hand and without threads."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coordinator.frames import (
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
    RefusalCode,
    Reply,
    Segment,
    SegmentKind,
    Seq,
    StoreNodes,
)
from coordinator.nodes import Node, node_id, root_of
from coordinator.prefixes import digest_of
from coordinator.requests import GREEDY
from fakering import texts
from stage.build import build_stage, ring_info
from stage.config import RingConfig
from stage.messages import FrameMessage, ReplyMessage

JOB = JobId(1)
PROMPT = texts.novel(100, 1, 199)
CUTS = (0, 64, 90)
COLD = 2  # a lane


class Chain:
    """Each frame is taken by hand from one stage to the next."""

    def __init__(self, model: Path, **rest) -> None:
        splits = ((0, 1), (1, 3), (3, 4))
        self.config = RingConfig(model, "tiny", splits, lanes=3, max_rows=128, **rest)
        built = [build_stage(self.config, n, "cpu", lambda _: None) for n in range(3)]
        self.stages = [stage for stage, _ in built]
        self.reports = [report for _, report in built]
        self.next_seq = 0
        self.root = root_of(self.reports[0].fingerprint)

    def frame(
        self,
        ops: tuple[Op, ...] = (),
        segments: tuple[Segment, ...] = (),
        after: tuple[StoreNodes, ...] = (),
    ) -> Reply:
        frame = Frame(Epoch(0), Seq(self.next_seq), ops, segments, after=after)
        self.next_seq += 1
        return self.carry(FrameMessage(Epoch(0), frame))

    def carry(self, message: FrameMessage) -> Reply:
        outcome: FrameMessage | ReplyMessage | None = message
        for stage in self.stages:
            assert isinstance(outcome, FrameMessage)
            outcome = stage.process(outcome)
        assert isinstance(outcome, ReplyMessage)
        return outcome.reply

    def spans(self, prompt: tuple[int, ...] = PROMPT, cuts=CUTS) -> tuple[NodeSpan, ...]:
        parent, spans = self.root, []
        for start, end in zip(cuts, cuts[1:], strict=False):
            spans.append(NodeSpan(node_id(parent, prompt[start:end]), parent, start, end))
            parent = spans[-1].node
        return tuple(spans)

    @property
    def ids(self) -> tuple[NodeId, ...]:
        return tuple(span.node for span in self.spans())

    def store(self, lane: int = 0, prompt: tuple[int, ...] = PROMPT) -> Reply:
        """The lane computes the prompt and becomes nodes, in one frame."""
        after = (StoreNodes(LaneId(lane), self.spans(prompt)),)
        return self.frame((self.opening(lane),), (prefill(lane, prompt),), after)

    def load(self, lane: int = 1, ops: tuple[Op, ...] = ()) -> Reply:
        """A lane begins with the nodes' rows and goes on."""
        end = CUTS[-1]
        ops = (*ops, LoadNodes(LaneId(lane), 0, end, self.ids), self.opening(lane, PROMPT[:end]))
        return self.frame(ops, (prefill(lane, PROMPT[end:], end),))

    def opening(self, lane: int, prefix: tuple[int, ...] = ()) -> OpenLane:
        return OpenLane(LaneId(lane), JOB, len(prefix), digest_of(prefix), self.root)

    def cold(self) -> tuple[int, ...]:
        reply = self.frame((self.opening(COLD),), (prefill(COLD, PROMPT),))
        assert reply.refusals == ()
        return reply.segments[0].tokens


def prefill(lane: int, tokens: tuple[int, ...], start: int = 0) -> Segment:
    end = start + len(tokens)
    return Segment(LaneId(lane), JOB, start, tokens, SegmentKind.PREFILL, GREEDY, end)


@contextmanager
def started(model: Path, **rest) -> Iterator[Chain]:
    chain = Chain(model, **rest)
    try:
        yield chain
    finally:
        for stage in chain.stages:
            stage.close()


@pytest.fixture
def chain(tiny_model: Path) -> Iterator[Chain]:
    with started(tiny_model) as chain:
        yield chain


def assert_served(chain: Chain, reply: Reply) -> None:
    assert (reply.refusals, reply.lost) == ((), ())
    assert reply.segments[0].tokens == chain.cold()


def assert_gap(reply: Reply, stage: int, lost: tuple[NodeId, ...]) -> None:
    refusals = {(refusal.code, refusal.stage, refusal.lane) for refusal in reply.refusals}
    assert refusals == {(RefusalCode.KV_GAP, stage, 1)}
    assert reply.lost == lost
    assert reply.segments[0].refused


def test_nodes_of_one_lane_are_bit_identical_rows_of_another(chain: Chain) -> None:
    assert chain.store().lost == ()
    chain.frame((chain.opening(0),), (prefill(0, PROMPT[::-1]),))  # nodes are copies
    assert_served(chain, chain.load())
    for stage in chain.stages:
        rows = stage.model.rows
        for layer in range(rows.layers):
            pairs = zip(rows.view(layer, 1, 128), rows.view(layer, COLD, 128), strict=True)
            assert all(torch.equal(left, right) for left, right in pairs)


def test_nodes_outlive_an_epoch(chain: Chain) -> None:
    chain.store()
    for stage in chain.stages:
        stage.open_epoch(Epoch(0))
    chain.next_seq = 0
    assert_served(chain, chain.load())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_that_lost_bytes_says_so_and_heals(chain: Chain, stage: int) -> None:
    chain.store()
    chain.stages[stage].store.drop(chain.ids[1:])
    assert_gap(chain.load(), stage, chain.ids[1:])
    assert chain.ids[1] not in chain.stages[stage].ledger.nodes
    assert chain.frame((DropNodes(chain.ids[1:]),)).lost == ()
    assert all(each.store.missing(chain.ids) == chain.ids[1:] for each in chain.stages)
    assert chain.store().lost == ()
    assert_served(chain, chain.load())


def test_a_node_is_dropped_in_the_order_of_the_ops(chain: Chain) -> None:
    chain.store()
    dropping = DropNodes(chain.ids[1:])
    assert_gap(chain.load(ops=(dropping,)), 0, chain.ids[1:])
    chain.store()
    end = CUTS[-1]
    loading = LoadNodes(LaneId(1), 0, end, chain.ids)
    segment = prefill(1, PROMPT[end:], end)
    reply = chain.frame((loading, dropping, chain.opening(1, PROMPT[:end])), (segment,))
    assert_served(chain, reply)
    assert all(stage.store.missing(chain.ids) == chain.ids[1:] for stage in chain.stages)


def test_what_one_stage_has_no_room_for_is_lost(chain: Chain) -> None:
    narrow = chain.stages[1].store
    row_bytes = 2 * 2 * (16 + 16) * 4  # two layers, two heads
    narrow._kept.budget = 70 * row_bytes
    assert narrow.capacity_rows == 70
    reply = chain.store()
    assert narrow.nbytes == 64 * row_bytes
    assert reply.refusals == ()
    assert reply.lost == chain.ids[1:]
    assert chain.ids[1] not in chain.stages[1].ledger.nodes
    assert chain.ids[0] in chain.stages[1].ledger.nodes


def test_rows_that_turn_out_not_to_be_numbers_become_no_nodes(chain: Chain) -> None:
    chain.frame((chain.opening(0),), (prefill(0, PROMPT),))
    keys, _ = chain.stages[2].model.rows.view(0, 0, 10)
    keys.fill_(float("nan"))
    reply = chain.frame(
        (),
        (replace(prefill(0, (7,), len(PROMPT)), kind=SegmentKind.VERIFY),),
        (StoreNodes(LaneId(0), chain.spans()),),
    )
    assert reply.lost == chain.ids
    assert all(id_ not in chain.stages[2].ledger.nodes for id_ in chain.ids)


def test_a_frame_refused_whole_makes_no_nodes(chain: Chain) -> None:
    chain.frame((chain.opening(0),), (prefill(0, PROMPT),))
    after = (StoreNodes(LaneId(0), chain.spans()),)
    early = Frame(Epoch(0), Seq(chain.next_seq + 1), after=after)
    reply = chain.carry(FrameMessage(Epoch(0), early))
    assert [refusal.code for refusal in reply.refusals] == [RefusalCode.FRAME_ORDER]
    assert reply.lost == chain.ids
    assert chain.frame(after=after).lost == ()
    assert chain.carry(FrameMessage(Epoch(0), early)).lost == ()


def on_disk(chain: Chain) -> tuple[Node, ...]:
    parent, nodes = chain.root, []
    for span in chain.spans():
        tokens = array("i", PROMPT[span.start : span.end])
        nodes.append(Node(span.node, parent, span.start, tokens))
        parent = span.node
    return tuple(nodes)


def test_a_restart_finds_the_nodes_and_serves_from_them(tiny_model: Path, tmp_path: Path) -> None:
    with started(tiny_model, kv_disk=tmp_path) as chain:
        assert ring_info(chain.config, chain.reports).held.nodes == ()
        chain.store()
    with started(tiny_model, kv_disk=tmp_path) as again:
        info = ring_info(again.config, again.reports)
        assert info.held.nodes == on_disk(again)
        assert 0 < info.host_rows == min(report.host_rows for report in again.reports)
        assert all(len(stage.store) == 0 for stage in again.stages)
        assert_served(again, again.load())
        again.frame((DropNodes(again.ids),))
    assert list(tmp_path.iterdir()) == []


def test_a_ring_names_only_what_all_stages_have_with_all_it_hangs_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    with started(tiny_model, kv_disk=tmp_path) as chain:
        chain.store()
        first, second = on_disk(chain)
        reports = [replace(report, stored=(first, second)) for report in chain.reports]
        assert ring_info(chain.config, reports).held.nodes == (first, second)
        reports[1] = replace(reports[1], stored=(first,))
        assert ring_info(chain.config, reports).held.nodes == (first,)
        reports[1] = replace(reports[1], stored=(second,))
        assert ring_info(chain.config, reports).held.nodes == ()


def test_a_damaged_file_costs_a_miss_and_never_a_token(tiny_model: Path, tmp_path: Path) -> None:
    with started(tiny_model, kv_disk=tmp_path) as chain:
        chain.store()
    with started(tiny_model, kv_disk=tmp_path) as chain:
        name = f"{chain.ids[1].hex()}.1-3.kv"
        data = bytearray((tmp_path / name).read_bytes())
        data[-5] ^= 1
        (tmp_path / name).write_bytes(data)
        assert_gap(chain.load(), 1, chain.ids[1:])
        reply = chain.frame((chain.opening(1),), (prefill(1, PROMPT),))
        assert reply.segments[0].tokens == chain.cold()


def test_a_store_of_no_bytes_promises_no_rows(tiny_model: Path) -> None:
    with started(tiny_model, kv_host_bytes=0) as chain:
        assert ring_info(chain.config, chain.reports).host_rows == 0
        assert chain.store().lost == chain.ids
