"""The ledger's rules for chain nodes: what becomes one, what comes back, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from coordinator.applied import Applied, Standing
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
    Refusal,
    RefusalCode,
    Segment,
    SegmentKind,
    Seq,
    StoreNodes,
)
from coordinator.ledger import Ledger
from coordinator.nodes import NodeTable, node_id, root_of
from coordinator.prefixes import digest_of

A, B = LaneId(0), LaneId(1)
ROOT = root_of("model")
TOKENS = tuple(range(10, 22))
STRAY = NodeId(b"s" * 16)


def spans_of(tokens: Sequence[int], *ends: int) -> tuple[NodeSpan, ...]:
    spans, parent, start = [], ROOT, 0
    for end in ends:
        node = node_id(parent, tokens[start:end])
        spans.append(NodeSpan(node, parent, start, end))
        parent, start = node, end
    return tuple(spans)


SPANS = spans_of(TOKENS, 4, 8, 12)
IDS = tuple(span.node for span in SPANS)


class Driven(Ledger):
    """A ledger that is given frames in order."""

    def take(
        self,
        ops: Sequence[Op] = (),
        segments: Sequence[Segment] = (),
        after: Sequence[StoreNodes] = (),
        refused: Sequence[Refusal] = (),
    ) -> Applied:
        frame = Frame(self.epoch, self.next_seq, tuple(ops), tuple(segments), after=tuple(after))
        return self.apply(frame, refused)


@pytest.fixture
def ledger() -> Driven:
    """Lane A holds TOKENS, stored as three nodes."""
    ledger = Driven(2, 16)
    open_a = OpenLane(A, JobId(1), 0, digest_of(()), ROOT)
    prefill = Segment(A, JobId(1), 0, TOKENS, SegmentKind.PREFILL)
    applied = ledger.take([open_a], [prefill], [StoreNodes(A, SPANS)])
    assert applied.stores == (StoreNodes(A, SPANS),)
    assert not applied.lost
    return ledger


def codes(applied: Applied) -> list[RefusalCode]:
    return [refusal.code for refusal in applied.refusals]


def test_a_lane_goes_on_from_nodes(ledger: Driven) -> None:
    load = LoadNodes(B, 0, 10, IDS)
    opening = OpenLane(B, JobId(2), 10, digest_of(TOKENS[:10]), ROOT)
    applied = ledger.take([load, opening])
    assert applied.moves == (load,)
    assert not applied.refusals
    assert ledger.tokens(B) == TOKENS[:10]


def test_rows_that_a_lane_has_need_not_be_loaded_again(ledger: Driven) -> None:
    ledger.take([LoadNodes(B, 0, 6, IDS[:2])])
    assert not ledger.take([LoadNodes(B, 6, 12, IDS[1:])]).refusals
    assert ledger.tokens(B) == TOKENS


@pytest.mark.parametrize(
    ("load", "code"),
    [
        (LoadNodes(B, 0, 4, (STRAY,)), RefusalCode.KV_GAP),
        (LoadNodes(B, 4, 8, IDS[1:2]), RefusalCode.KV_GAP),  # rows before it are not there
        (LoadNodes(B, 0, 9, (IDS[0], IDS[2])), RefusalCode.BAD_FRAME),  # no chain
        (LoadNodes(B, 0, 4, IDS[:2]), RefusalCode.BAD_FRAME),  # more nodes than rows
        (LoadNodes(B, 0, 9, IDS[:2]), RefusalCode.BAD_FRAME),  # fewer
        (LoadNodes(LaneId(9), 0, 4, IDS[:1]), RefusalCode.BAD_FRAME),
    ],
)
def test_what_the_nodes_do_not_bear_out_is_refused_and_no_row_trusted(
    ledger: Driven, load: LoadNodes, code: RefusalCode
) -> None:
    applied = ledger.take([load])
    assert codes(applied) == [code]
    assert not applied.moves
    if load.lane == B:
        assert ledger.is_blocked(B)
        assert ledger.valid_rows(B) == 0


@pytest.mark.parametrize(
    "load",
    [LoadNodes(B, 2, 8, IDS[1:2]), LoadNodes(B, 4, 8, IDS[:2]), LoadNodes(B, 3, 8, IDS[1:2])],
)
def test_a_load_begins_in_its_first_node(ledger: Driven, load: LoadNodes) -> None:
    """Neither before it nor behind it, though the lane's rows are right so far."""
    ledger.take([LoadNodes(B, 0, 4, IDS[:1])])
    assert codes(ledger.take([load])) == [RefusalCode.BAD_FRAME]
    assert ledger.valid_rows(B) == load.start


def test_a_loaded_lane_takes_nothing_before_it_is_opened(ledger: Driven) -> None:
    ledger.take([OpenLane(B, JobId(2), 0, digest_of(()), ROOT)])
    more = Segment(B, JobId(2), 12, (1, 2), SegmentKind.PREFILL)
    assert codes(ledger.take([LoadNodes(B, 0, 12, IDS)], [more])) == [RefusalCode.BAD_FRAME]
    assert ledger.tokens(B) == TOKENS


def test_a_load_behind_other_tokens_is_refused(ledger: Driven) -> None:
    """The rows of a node were computed behind its ancestors' tokens, and behind no others."""
    other = Segment(B, JobId(2), 0, (1, 2, 3, 4), SegmentKind.PREFILL)
    ledger.take([OpenLane(B, JobId(2), 0, digest_of(()), ROOT)], [other])
    assert codes(ledger.take([LoadNodes(B, 4, 8, IDS[1:2])])) == [RefusalCode.KV_CONTENT]


def test_a_load_behind_an_ancestor_that_is_gone_is_refused(ledger: Driven) -> None:
    ledger.take([LoadNodes(B, 0, 4, IDS[:1])])
    ledger.take([DropNodes(IDS[:1])])
    assert codes(ledger.take([LoadNodes(B, 4, 8, IDS[1:2])])) == [RefusalCode.KV_CONTENT]


def test_a_load_beyond_the_lanes_last_row_is_refused() -> None:
    small, large = Driven(1, 8), Driven(1, 16)
    for ledger in (small, large):
        for span in SPANS:
            node = ledger.nodes.make(span, TOKENS, ROOT)
            assert node is not None
            ledger.nodes.add(node)
    assert not large.take([LoadNodes(A, 0, 12, IDS)]).refusals
    assert codes(small.take([LoadNodes(A, 0, 12, IDS)])) == [RefusalCode.ROW_LIMIT]


def test_missing_nodes_are_named(ledger: Driven) -> None:
    applied = ledger.take([LoadNodes(B, 0, 9, (IDS[0], STRAY, IDS[2]))])
    assert applied.lost == (STRAY,)


@pytest.mark.parametrize(
    "span",
    [
        NodeSpan(STRAY, ROOT, 0, 4),  # another id than its tokens have
        replace(SPANS[0], end=5),
        replace(SPANS[1], parent=IDS[2]),
        spans_of((*TOKENS, 1, 2), 14)[0],  # rows that are not valid
        replace(spans_of(TOKENS, 12)[0], end=14),  # more rows than its id stands for
    ],
)
def test_what_rows_do_not_bear_out_becomes_no_node_and_the_lane_goes_on(
    ledger: Driven, span: NodeSpan
) -> None:
    ledger.take([DropNodes(IDS)])
    applied = ledger.take(after=[StoreNodes(A, (span,))])
    assert span.node in applied.lost
    assert not applied.stores
    assert not ledger.is_blocked(A)
    assert ledger.valid_rows(A) == len(TOKENS)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_node_begins_where_its_parent_ends(ledger: Driven, start: int) -> None:
    """Its id does not say where its rows begin: the true child would find the id taken."""
    ledger.take([DropNodes(IDS[1:])])
    parent, tokens = IDS[0], TOKENS[start : start + 4]
    span = NodeSpan(node_id(parent, tokens), parent, start, start + 4)
    applied = ledger.take(after=[StoreNodes(A, (span,))])
    assert (applied.stores, applied.lost) == ((), (span.node,))
    assert ledger.nodes.ids() == IDS[:1]


def test_a_frame_that_was_applied_stores_and_drops_nothing_again(ledger: Driven) -> None:
    ledger.take([DropNodes(IDS[2:])])
    seen = Frame(ledger.epoch, Seq(ledger.next_seq - 1), (DropNodes(IDS[:1]),))
    again = replace(seen, ops=(), after=(StoreNodes(A, SPANS[2:]),))
    for frame in (seen, again):
        assert ledger.apply(frame) == Applied(Standing.APPLIED)
    assert ledger.nodes.ids() == IDS[:2]


def test_a_node_once_made_stays_as_it_is() -> None:
    table, first = NodeTable(), NodeTable().make(SPANS[0], TOKENS, ROOT)
    assert first is not None
    table.add(first)
    table.add(replace(first, start=1))
    assert table[first.id] is first


def test_a_parent_that_is_gone_is_named_with_its_child(ledger: Driven) -> None:
    ledger.take([DropNodes(IDS)])
    assert set(ledger.take(after=[StoreNodes(A, SPANS[1:2])]).lost) == set(IDS[:2])


def test_a_node_is_no_node_behind_other_tokens_than_its_ancestors(ledger: Driven) -> None:
    other = Segment(B, JobId(2), 0, (1, 2, 3, 4, *TOKENS[4:8]), SegmentKind.PREFILL)
    ledger.take([DropNodes(IDS[1:])])
    ledger.take([OpenLane(B, JobId(2), 0, digest_of(()), ROOT)], [other])
    assert ledger.take(after=[StoreNodes(B, SPANS[1:2])]).lost == (IDS[1],)


def test_the_first_writer_wins(ledger: Driven) -> None:
    applied = ledger.take(after=[StoreNodes(A, SPANS)])
    assert not applied.stores
    assert not applied.lost


def test_a_lane_that_an_earlier_stage_refused_stores_nothing(ledger: Driven) -> None:
    ledger.take([DropNodes(IDS)])
    refused = Refusal(RefusalCode.KV_GAP, 0, A, "elsewhere")
    applied = ledger.take(after=[StoreNodes(A, SPANS)], refused=[refused])
    assert set(applied.lost) == set(IDS)
    assert len(ledger.nodes) == 0


def test_nodes_outlive_an_epoch_and_unknown_ones_are_dropped_without_a_word(
    ledger: Driven,
) -> None:
    ledger.reset(Epoch(1))
    assert not ledger.take([DropNodes((STRAY,))]).refusals
    assert not ledger.take([LoadNodes(A, 0, 12, IDS)]).refusals
    assert ledger.tokens(A) == TOKENS


_GUARDS = ["_node_guard", "_gap_guard", "_lead_guard"]


@pytest.mark.parametrize("guard", _GUARDS)
def test_each_guard_is_needed(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, a load that must be refused is taken, or fails in another way."""
    monkeypatch.setattr(Ledger, guard, lambda self, *_: None)
    ledger = Driven(2, 16)
    prefill = Segment(A, JobId(1), 0, TOKENS, SegmentKind.PREFILL)
    ledger.take([OpenLane(A, JobId(1), 0, digest_of(()), ROOT)], [prefill], [StoreNodes(A, SPANS)])
    other = Segment(B, JobId(2), 0, (1, 2, 3, 4), SegmentKind.PREFILL)
    ledger.take([OpenLane(B, JobId(2), 0, digest_of(()), ROOT)], [other])
    wrong = {
        "_node_guard": LoadNodes(A, 0, 9, (IDS[0], IDS[2])),
        "_gap_guard": LoadNodes(B, 8, 12, IDS[2:]),
        "_lead_guard": LoadNodes(B, 4, 8, IDS[1:2]),
    }[guard]
    if guard == "_gap_guard":
        # Here the other guard finds it too, by another name.
        assert codes(ledger.take([wrong])) == [RefusalCode.KV_CONTENT]
    else:
        assert not ledger.take([wrong]).refusals
