"""The fake ring's chain store: rows as they really were, a budget of rows, and scripted losses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.frames import (
    DropNodes,
    LaneId,
    LoadNodes,
    NodeId,
    NodeSpan,
    Op,
    RefusalCode,
    Reply,
    StoreNodes,
)
from coordinator.nodes import node_id, root_of
from fakering import texts
from fakering.faults import FaultScript, KeepNothing, LoseNode, Restart
from fakering.hand import Hand, Turn
from fakering.model import FakeModel
from fakering.ring import FakeRing

VOCAB = 97
MODEL = FakeModel(VOCAB)
PROMPT = texts.novel(12, 1, VOCAB)
CUT = 8  # two nodes: rows [0, 8) and [8, 12)
A, B = 0, 1  # lanes


async def start(faults: FaultScript = (), host_rows: int = 100) -> Hand:
    ring = FakeRing(3, 2, 64, vocab_size=VOCAB, faults=faults, host_rows=host_rows)
    return Hand(ring, await ring.start(lambda progress: None), reply_timeout_s=1.0)


def spans(hand: Hand) -> tuple[NodeSpan, NodeSpan]:
    root = root_of(hand.info.model_fingerprint)
    first = node_id(root, PROMPT[:CUT])
    second = node_id(first, PROMPT[CUT:])
    return NodeSpan(first, root, 0, CUT), NodeSpan(second, first, CUT, len(PROMPT))


def ids(hand: Hand) -> tuple[NodeId, ...]:
    return tuple(span.node for span in spans(hand))


def load(hand: Hand) -> Op:
    return LoadNodes(LaneId(B), 0, len(PROMPT), ids(hand))


async def store(hand: Hand, lane: int = A) -> Reply:
    after = (StoreNodes(LaneId(lane), spans(hand)),)
    return await hand.reply_to(hand.submit(replace(hand.frame(), after=after)))


async def warm(hand: Hand) -> Turn:
    """A turn in another lane, which computes one token more than the nodes hold."""
    return await hand.turn(B, (*PROMPT, 5), 6, cached_prefix=len(PROMPT), ops=(load(hand),))


async def refused_load(hand: Hand) -> Reply:
    reply = await hand.exchange((load(hand), hand.open(B, hand.new_job(), PROMPT, len(PROMPT))))
    assert {(refusal.code, refusal.lane) for refusal in reply.refusals} == {(RefusalCode.KV_GAP, B)}
    return reply


async def assert_heals(hand: Hand) -> None:
    """Dropped everywhere, computed again and stored again, the nodes serve as before."""
    await hand.exchange((DropNodes(ids(hand)),))
    await hand.turn(A, PROMPT, 1)
    assert (await store(hand)).lost == ()
    assert (await warm(hand)).tokens == MODEL.oracle((*PROMPT, 5), 6)


@pytest.mark.parametrize("what", ["tokens", "activations"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("node", [0, 1])
async def test_one_wrong_row_of_a_node_changes_the_text(stage: int, node: int, what: str) -> None:
    """Nothing compares a node's bytes with what they ought to be."""
    hand = await start()
    await hand.turn(A, PROMPT, 1)
    await store(hand)
    right = MODEL.oracle((*PROMPT, 5), 6)
    assert (await warm(hand)).tokens == right
    getattr(hand.ring.network.stages[stage].kept[ids(hand)[node]], what)[2] ^= 1
    assert (await warm(hand)).tokens != right


async def test_a_node_made_of_a_wrong_row_is_wrong() -> None:
    hand = await start()
    await hand.turn(A, PROMPT, 1)
    hand.ring.network.stages[1].rows.tokens[A, 3] ^= 1
    assert (await store(hand)).lost == ()
    assert (await warm(hand)).tokens != MODEL.oracle((*PROMPT, 5), 6)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("which", [0, 1])
async def test_a_lost_node_is_found_when_it_is_loaded(stage: int, which: int) -> None:
    hand = await start((LoseNode(stage, nth=0, which=which),))
    await hand.turn(A, PROMPT, 1)
    assert (await store(hand)).lost == ()
    reply = await refused_load(hand)
    assert {refusal.stage for refusal in reply.refusals} == {stage}
    assert reply.lost == ids(hand)[which : which + 1]
    await assert_heals(hand)


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_what_a_stage_cannot_keep_it_reports(stage: int) -> None:
    hand = await start((KeepNothing(stage, nth=0),))
    await hand.turn(A, PROMPT, 1)
    assert (await store(hand)).lost == ids(hand)
    held = [set(ids(hand)) <= fake.kept.keys() for fake in hand.ring.network.stages]
    assert held == [number != stage for number in range(3)]
    assert (await refused_load(hand)).lost == ids(hand)
    await assert_heals(hand)


@pytest.mark.parametrize(("host_rows", "lost"), [(0, 2), (3, 2), (7, 1), (8, 1), (11, 1), (12, 0)])
async def test_what_finds_no_room_is_lost_and_the_lane_goes_on(host_rows: int, lost: int) -> None:
    hand = await start(host_rows=host_rows)
    turn = await hand.turn(A, PROMPT, 1)
    reply = await store(hand)
    assert (len(reply.lost), reply.refusals) == (lost, ())
    for stage in hand.ring.network.stages:
        assert sum(kept.end - kept.start for kept in stage.kept.values()) <= host_rows
        assert stage.kept.keys() == set(stage.ledger.nodes.ids())
    again = await hand.turn(A, (*PROMPT, *turn.tokens), 4, cached_prefix=len(PROMPT))
    assert again.tokens == MODEL.oracle((*PROMPT, *turn.tokens), 4)


async def test_dropped_nodes_make_room() -> None:
    hand = await start(host_rows=12)
    for _ in range(3):
        await hand.turn(A, PROMPT, 1)
        assert (await store(hand)).lost == ()
        await hand.exchange((DropNodes(ids(hand)),))
    assert [len(stage.kept) for stage in hand.ring.network.stages] == [0, 0, 0]


async def test_a_restarted_stage_has_no_nodes_and_says_so() -> None:
    hand = await start((Restart(1, nth=3),))
    await hand.turn(A, PROMPT, 1)  # two chunks
    await store(hand)
    await hand.exchange((hand.open(A, hand.new_job()),))
    assert [len(stage.kept) for stage in hand.ring.network.stages] == [2, 0, 2]
    assert (await refused_load(hand)).lost == ids(hand)
    await assert_heals(hand)


async def test_a_ring_that_starts_again_has_no_nodes() -> None:
    hand = await start()
    await hand.turn(A, PROMPT, 1)
    await store(hand)
    await hand.ring.stop()
    info = await hand.ring.start(lambda progress: None)
    assert (info.host_rows, info.held.nodes) == (100, ())
    hand = Hand(hand.ring, info, reply_timeout_s=1.0)
    assert (await refused_load(hand)).lost == ids(hand)
