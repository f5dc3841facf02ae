"""Roots in the ledger: rows, nodes and memos of one root are never another's, on whichever replica."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from coordinator.applied import Applied
from coordinator.frames import (
    NO_ROOT,
    CopyRows,
    Frame,
    JobId,
    LaneId,
    LoadNodes,
    NodeId,
    NodeSpan,
    Op,
    OpenLane,
    RefusalCode,
    Segment,
    SegmentKind,
    StoreNodes,
)
from coordinator.ledger import Ledger
from coordinator.nodes import Node, node_id, root_of
from coordinator.prefixes import digest_of
from coordinator.requests import GREEDY
from stage.build import StageReport, ring_info
from stage.config import RingConfig

A, B = LaneId(0), LaneId(1)
MINE, THEIRS, SHARED = root_of("model", "me"), root_of("model", "them"), root_of("model")
TOKENS = tuple(range(10, 22))


def take(
    ledger: Ledger,
    *ops: Op,
    segments: tuple[Segment, ...] = (),
    after: tuple[StoreNodes, ...] = (),
) -> Applied:
    return ledger.apply(Frame(ledger.epoch, ledger.next_seq, ops, segments, after=after))


def opening(lane: LaneId, rows: int, root: NodeId) -> OpenLane:
    return OpenLane(lane, JobId(1), rows, digest_of(TOKENS[:rows]), root)


def span(root: NodeId, start: int = 0, end: int = 8) -> NodeSpan:
    parent = root if start == 0 else node_id(root, TOKENS[:start])
    return NodeSpan(node_id(parent, TOKENS[start:end]), parent, start, end)


@pytest.fixture
def ledger() -> Ledger:
    """Lane A holds my TOKENS; the first eight are a node, and a memo lies in slot 0."""
    ledger = Ledger(2, 16)
    write = Segment(A, JobId(1), 0, TOKENS, SegmentKind.PREFILL, GREEDY, memo=0)
    stores = (StoreNodes(A, (span(MINE),)),)
    applied = take(ledger, opening(A, 0, MINE), segments=(write,), after=stores)
    assert (applied.refusals, applied.lost) == ((), ())
    return ledger


def codes(applied: Applied) -> list[RefusalCode]:
    return [refusal.code for refusal in applied.refusals]


@pytest.mark.parametrize("root", [THEIRS, SHARED, NO_ROOT], ids=["theirs", "shared", "none"])
def test_rows_of_another_root_are_refused_and_void_for_a_cold_start(
    ledger: Ledger, root: NodeId
) -> None:
    assert ledger.usable_prefix(A, TOKENS, root) == 0
    assert ledger.restore_point(A, TOKENS, 12, root) == 0
    assert codes(take(ledger, opening(A, 4, root))) == [RefusalCode.KV_CONTENT]
    assert not take(ledger, opening(A, 0, root)).refusals
    assert (ledger.valid_rows(A), ledger.root(A)) == (0, root)


def test_ones_own_rows_are_gone_on_from(ledger: Ledger) -> None:
    assert ledger.usable_prefix(A, TOKENS, MINE) == len(TOKENS)
    assert not take(ledger, opening(A, 4, MINE)).refusals


def test_a_copy_is_of_the_root_of_what_was_copied(ledger: Ledger) -> None:
    copied = take(ledger, CopyRows(A, B, 6), opening(B, 6, THEIRS))
    assert codes(copied) == [RefusalCode.KV_CONTENT]
    assert not take(ledger, CopyRows(A, B, 6), opening(B, 6, MINE)).refusals


def test_a_lane_that_is_loaded_is_of_the_nodes_root(ledger: Ledger) -> None:
    load = LoadNodes(B, 0, 8, (span(MINE).node,))
    take(ledger, opening(B, 0, THEIRS))
    assert codes(take(ledger, load, opening(B, 8, THEIRS))) == [RefusalCode.KV_CONTENT]
    assert not take(ledger, load, opening(B, 8, MINE)).refusals


def test_nodes_do_not_go_on_behind_rows_of_another_root(ledger: Ledger) -> None:
    write = Segment(B, JobId(1), 0, TOKENS[:4], SegmentKind.PREFILL)
    load = LoadNodes(B, 4, 8, (span(MINE).node,))
    take(ledger, opening(B, 0, THEIRS), segments=(write,))
    assert codes(take(ledger, load)) == [RefusalCode.KV_CONTENT]
    take(ledger, opening(B, 0, MINE), segments=(write,))
    assert not take(ledger, load).refusals


def test_rows_become_nodes_of_their_own_root_only(ledger: Ledger) -> None:
    for root in (THEIRS, SHARED):
        applied = take(ledger, after=(StoreNodes(A, (span(root),)),))
        assert (applied.stores, applied.lost) == ((), (span(root).node,))
    write = Segment(B, JobId(1), 0, TOKENS, SegmentKind.PREFILL)
    behind = StoreNodes(B, (span(MINE, 8, 12),))
    applied = take(ledger, opening(B, 0, THEIRS), segments=(write,), after=(behind,))
    assert applied.lost == (span(MINE, 8, 12).node,)


def test_a_memo_is_recalled_under_its_own_root_only(ledger: Ledger) -> None:
    recall = Segment(B, JobId(1), 12, (), SegmentKind.RECALL, GREEDY, memo=0)
    write = Segment(B, JobId(1), 0, TOKENS, SegmentKind.PREFILL)
    assert ledger.memos.find(TOKENS, THEIRS) is None
    take(ledger, opening(B, 0, THEIRS), segments=(write,))
    assert codes(take(ledger, segments=(recall,))) == [RefusalCode.KV_GAP]
    take(ledger, opening(B, 0, MINE), segments=(write,))
    assert not take(ledger, segments=(recall,)).refusals
    assert ledger.memos.find(TOKENS, MINE) == 0


def test_a_root_is_of_the_model_and_the_tenant_and_no_nodes_id() -> None:
    names = ["", "a", "b", "ab", "abc", "abcd", "a" * 4096, "ä", "\0"]
    roots = {root_of(model, name) for model in ("x", "xa", "") for name in names}
    assert len(roots) == 3 * len(names)
    # The blocks whose bytes are a tenant's name hang on the model's own root under other ids.
    block = array("i", b"abcd")
    assert node_id(root_of("x"), block) != root_of("x", "abcd")
    assert root_of("model").hex() == "d4b24a65839c66d0d37c029dfbb09332", "stores from before stay"


def test_a_ring_takes_all_tenants_nodes_in_at_its_start_and_no_orphan() -> None:
    """Whose they are is known to none but him: his root is where their chain begins."""
    nodes = []
    for root in (MINE, THEIRS, SHARED):
        first = Node(node_id(root, TOKENS[:8]), root, 0, array("i", TOKENS[:8]))
        nodes += [first, Node(node_id(first.id, TOKENS[8:]), first.id, 8, array("i", TOKENS[8:]))]
    orphan = Node(node_id(NodeId(b"o" * 16), (1,)), NodeId(b"o" * 16), 8, array("i", (1,)))
    misplaced = Node(node_id(nodes[0].id, (1,)), nodes[0].id, 0, array("i", (1,)))
    stored = (misplaced, *nodes, orphan)
    report = StageReport(1, "model", 199, 4, "", True, "cpu", False, stored=stored)
    config = RingConfig(Path("model"), "tiny", ((0, 4),), lanes=1, max_rows=16)
    held = [node.id for node in ring_info(config, [report]).held.nodes]
    assert sorted(held) == sorted(node.id for node in nodes)
