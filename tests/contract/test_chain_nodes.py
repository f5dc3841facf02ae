"""Rows that left their lane and come back answer as a cold lane does, on every ring.

A lane's rows become nodes, another lane takes them over, and the tokens are those of a lane that computed them all.
Nodes that a stage does not have are refused, told and computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import pytest_asyncio

from coordinator.frames import (
    CopyRows,
    DropNodes,
    Epoch,
    Frame,
    LaneId,
    LoadNodes,
    NodeId,
    NodeSpan,
    Op,
    RefusalCode,
    Reply,
    Segment,
    StoreNodes,
)
from coordinator.nodes import node_id, root_of
from coordinator.requests import GREEDY
from fakering import texts
from fakering.hand import Hand

pytestmark = pytest.mark.asyncio(loop_scope="session")

A, B, COLD = 0, 1, 2  # lanes
COUNT = 4
CUTS = (0, 16, 32, 40)  # any cuts will do: the grid is the coordinator's
LENGTH = 44


def novel(hand: Hand, seed: int = 1, length: int = LENGTH) -> tuple[int, ...]:
    return texts.novel(length, seed, hand.info.vocab_size)


def spans(hand: Hand, prompt: Sequence[int], cuts: Sequence[int] = CUTS) -> tuple[NodeSpan, ...]:
    parent, made = root_of(hand.info.model_fingerprint), []
    for start, end in pairwise(cuts):
        made.append(NodeSpan(node_id(parent, prompt[start:end]), parent, start, end))
        parent = made[-1].node
    return tuple(made)


def ids(hand: Hand, prompt: Sequence[int]) -> tuple[NodeId, ...]:
    return tuple(span.node for span in spans(hand, prompt))


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def no_nodes(hand: Hand) -> None:
    """The suite has one ring, whose nodes outlive an epoch: what a case loads it must have stored itself."""
    await exchange(hand, (DropNodes(ids(hand, novel(hand))),))


async def exchange(
    hand: Hand,
    ops: tuple[Op, ...] = (),
    segments: tuple[Segment, ...] = (),
    after: tuple[StoreNodes, ...] = (),
) -> Reply:
    frame = replace(hand.frame(ops, segments), after=after)
    return await hand.reply_to(hand.submit(frame))


async def stored(hand: Hand) -> tuple[int, ...]:
    """A prompt whose rows a lane has computed, and which are nodes now."""
    prompt = novel(hand)
    await hand.turn(A, prompt, 1)
    reply = await exchange(hand, after=(StoreNodes(LaneId(A), spans(hand, prompt)),))
    assert (reply.refusals, reply.lost, reply.segments) == ((), (), ())
    return prompt


def loading(hand: Hand, lane: int, prompt: Sequence[int], start: int, end: int) -> LoadNodes:
    needed = [s for s in spans(hand, prompt) if s.start < end and s.end > start]
    return LoadNodes(LaneId(lane), start, end, tuple(span.node for span in needed))


async def from_nodes(hand: Hand, lane: int, prompt: tuple[int, ...], end: int) -> tuple[int, ...]:
    op = loading(hand, lane, prompt, 0, end)
    turn = await hand.turn(lane, prompt, COUNT, cached_prefix=end, ops=(op,))
    assert turn.prefilled == len(prompt) - end
    return turn.tokens


async def cold(hand: Hand, prompt: tuple[int, ...]) -> tuple[int, ...]:
    return (await hand.turn(COLD, prompt, COUNT)).tokens


async def lose(hand: Hand, nodes: tuple[NodeId, ...]) -> None:
    """The stages lose the nodes, and this replica does not hear of it."""
    frame = hand.frame((DropNodes(nodes),))
    hand.ring.submit(frame)
    hand.ledger.apply(Frame(frame.epoch, frame.seq))
    assert (await hand.next_reply()).seq == frame.seq


async def test_a_ring_says_how_many_rows_it_keeps(hand: Hand) -> None:
    assert hand.info.host_rows > LENGTH
    assert hand.info.held.nodes == ()


@pytest.mark.parametrize("end", [1, 15, 16, 17, 32, 40])
async def test_a_lane_that_begins_with_nodes_equals_cold(hand: Hand, end: int) -> None:
    prompt = await stored(hand)
    await hand.turn(A, novel(hand, 9), 1)  # the rows' own lane has gone on
    await hand.turn(B, novel(hand, 8), 1)  # and the other one held something else
    assert await from_nodes(hand, B, prompt, end) == await cold(hand, prompt)


@pytest.mark.parametrize("start", [1, 16, 20])
async def test_nodes_continue_the_rows_that_a_lane_has(hand: Hand, start: int) -> None:
    prompt = await stored(hand)
    await hand.turn(B, prompt[:start] + novel(hand, 7, 10), 1)
    op = loading(hand, B, prompt, start, 40)
    turn = await hand.turn(B, prompt, COUNT, cached_prefix=40, ops=(op,))
    assert turn.prefilled == LENGTH - 40
    assert turn.tokens == await cold(hand, prompt)


async def test_nodes_are_made_of_what_the_very_frame_computed(hand: Hand) -> None:
    prompt, job = novel(hand), hand.new_job()
    segment = hand.prefill(A, job, 0, prompt, GREEDY)
    store = StoreNodes(LaneId(A), spans(hand, prompt))
    reply = await exchange(hand, (hand.open(A, job),), (segment,), (store,))
    assert (reply.refusals, reply.lost) == ((), ())
    assert await from_nodes(hand, B, prompt, 40) == await cold(hand, prompt)


async def test_nodes_are_copies_made_before_the_next_frame_writes(hand: Hand) -> None:
    prompt = await stored(hand)
    job = hand.new_job()
    other = hand.prefill(A, job, 0, novel(hand, 5), GREEDY)
    store = StoreNodes(LaneId(A), spans(hand, prompt))
    hand.send((DropNodes(ids(hand, prompt)),))
    await hand.turn(A, prompt, 1)
    hand.submit(replace(hand.frame(), after=(store,)))
    last = hand.send((hand.open(A, job),), (other,))
    assert (await hand.reply_to(last)).lost == ()
    assert await from_nodes(hand, B, prompt, 40) == await cold(hand, prompt)


async def test_nodes_outlive_an_epoch(hand: Hand) -> None:
    prompt = await stored(hand)
    await hand.open_epoch(Epoch(hand.ledger.epoch + 1))
    assert await from_nodes(hand, B, prompt, 40) == await cold(hand, prompt)


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_lost_node_is_a_gap_that_heals(hand: Hand, lost: int) -> None:
    prompt = await stored(hand)
    gone = ids(hand, prompt)[lost : lost + 1]
    await lose(hand, gone)
    job = hand.new_job()
    ops = (loading(hand, B, prompt, 0, 40), hand.open(B, job, prompt, 40))
    rest = hand.prefill(B, job, 40, prompt[40:], GREEDY)
    reply = await exchange(hand, ops, (rest,))
    assert {(refusal.code, refusal.lane) for refusal in reply.refusals} == {(RefusalCode.KV_GAP, B)}
    assert reply.lost == gone
    assert reply.segments[0].refused
    assert (await exchange(hand, (DropNodes(gone),))).lost == ()
    healed = await hand.turn(B, prompt, COUNT)
    assert healed.tokens == await cold(hand, prompt)
    await stored(hand)
    assert await from_nodes(hand, B, prompt, 40) == healed.tokens


async def test_a_dropped_node_can_be_stored_anew_in_the_same_frame(hand: Hand) -> None:
    prompt = await stored(hand)
    store = StoreNodes(LaneId(A), spans(hand, prompt))
    reply = await exchange(hand, (DropNodes(ids(hand, prompt)),), after=(store,))
    assert reply.lost == ()
    assert await from_nodes(hand, B, prompt, 40) == await cold(hand, prompt)


async def test_ops_take_effect_in_their_order(hand: Hand) -> None:
    """Loaded, copied on, and only then dropped."""
    prompt = await stored(hand)
    job = hand.new_job()
    ops = (
        loading(hand, B, prompt, 0, 40),
        CopyRows(LaneId(B), LaneId(A), 32),
        DropNodes(ids(hand, prompt)),
        hand.open(A, job, prompt, 32),
    )
    reply = await exchange(hand, ops, (hand.prefill(A, job, 32, prompt[32:], GREEDY),))
    assert (reply.refusals, reply.lost) == ((), ())
    assert reply.segments[0].tokens == (await cold(hand, prompt))[:1]


async def test_what_a_lane_does_not_hold_becomes_no_node(hand: Hand) -> None:
    prompt = novel(hand)
    await hand.turn(A, prompt[:36], 1)
    wanted = spans(hand, prompt)
    reply = await exchange(hand, after=(StoreNodes(LaneId(A), wanted),))
    assert (reply.refusals, reply.lost) == ((), (wanted[2].node,))
    turn = await hand.turn(A, prompt, COUNT, cached_prefix=36)
    assert turn.tokens == await cold(hand, prompt)


async def test_a_wrong_claim_about_a_lane_stores_nothing(hand: Hand) -> None:
    prompt = novel(hand)
    await hand.turn(A, texts.changed(prompt, 20, hand.info.vocab_size), 1)
    reply = await exchange(hand, after=(StoreNodes(LaneId(A), spans(hand, prompt)),))
    assert set(reply.lost) == set(ids(hand, prompt)[1:])
