"""What a ring refuses, frame by frame, and that the refused lane heals at its next OpenLane.

The last test turns each guard of the ledger off and shows that a case here then fails.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import replace

import pytest

from coordinator.frames import (
    CopyRows,
    Epoch,
    Frame,
    JobId,
    LaneId,
    Op,
    RefusalCode,
    Reply,
    Segment,
)
from coordinator.ledger import Ledger
from coordinator.requests import GREEDY
from fakering import texts
from fakering.hand import Hand
from fakering.ring import FakeRing

pytestmark = pytest.mark.asyncio(loop_scope="session")

A, B, COLD = 0, 1, 2  # lanes
COUNT = 4
FIRST = 16


def novel(hand: Hand, length: int = FIRST, seed: int = 1) -> tuple[int, ...]:
    return texts.novel(length, seed, hand.info.vocab_size)


async def assert_heals(hand: Hand, lane: int = A) -> None:
    """The lane still refuses, and serves right tokens from its next OpenLane on."""
    prompt = novel(hand, seed=99)
    healed = await hand.turn(lane, prompt, COUNT)
    control = await hand.turn(COLD, prompt, COUNT)
    assert healed.tokens == control.tokens


async def refused(
    hand: Hand,
    code: RefusalCode,
    ops: Sequence[Op] = (),
    segments: Sequence[Segment] = (),
    lane: int = A,
) -> Reply:
    reply = await hand.exchange(ops, segments)
    assert [(refusal.code, refusal.lane) for refusal in reply.refusals] == [(code, lane)]
    parts = [part for part in reply.segments if part.lane == lane]
    assert all(part.refused and part.tokens == () for part in parts)
    return reply


async def started(hand: Hand, lane: int = A, seed: int = 1) -> JobId:
    """A job with FIRST rows in its lane."""
    job = hand.new_job()
    frames = hand.send_prefill(lane, job, novel(hand, seed=seed), chunk=FIRST)
    await hand.reply_to(frames[-1])
    return job


async def test_a_segment_past_the_frontier_is_a_gap(hand: Hand) -> None:
    job = await started(hand)
    await refused(hand, RefusalCode.KV_GAP, (), (hand.verify(A, job, FIRST + 1, (1,)),))
    again = hand.verify(A, job, FIRST, (1,))
    assert (await hand.exchange((), (again,))).segments[0].refused
    await assert_heals(hand)


async def test_a_prefix_past_the_frontier_is_a_gap(hand: Hand) -> None:
    await started(hand)
    prompt = novel(hand) + novel(hand, 4, seed=2)
    job = hand.new_job()
    opening = hand.open(A, job, prompt, FIRST + 1)
    rest = hand.prefill(A, job, FIRST + 1, prompt[FIRST + 1 :], GREEDY)
    await refused(hand, RefusalCode.KV_GAP, (opening,), (rest,))
    await assert_heals(hand)


async def test_a_copy_of_more_rows_than_there_are_is_a_gap(hand: Hand) -> None:
    await started(hand)
    copy = CopyRows(LaneId(A), LaneId(B), FIRST + 1)
    await refused(hand, RefusalCode.KV_GAP, (copy,), lane=B)
    await assert_heals(hand, B)


@pytest.mark.parametrize("row", [0, FIRST // 2, FIRST - 1])
async def test_other_tokens_than_claimed_are_wrong_content(hand: Hand, row: int) -> None:
    await started(hand)
    claimed = texts.changed(novel(hand), row, hand.info.vocab_size) + novel(hand, 4, seed=2)
    job = hand.new_job()
    opening = hand.open(A, job, claimed, FIRST)
    rest = hand.prefill(A, job, FIRST, claimed[FIRST:], GREEDY)
    reply = await refused(hand, RefusalCode.KV_CONTENT, (opening,), (rest,))
    assert [(rows.lane, rows.valid_rows) for rows in reply.lanes] == [(A, FIRST)]
    await assert_heals(hand)


async def test_a_refused_lane_keeps_its_rows_for_a_truer_claim(hand: Hand) -> None:
    await started(hand)
    prompt = novel(hand)
    wrong = texts.changed(prompt, FIRST - 1, hand.info.vocab_size)
    opening = hand.open(A, hand.new_job(), wrong, FIRST)
    await refused(hand, RefusalCode.KV_CONTENT, (opening,))
    turn = await hand.turn(A, prompt, COUNT, cached_prefix=FIRST - 1)
    assert turn.prefilled == 1
    assert turn.tokens == (await hand.turn(COLD, prompt, COUNT)).tokens


async def test_rows_behind_a_rewind_are_void(hand: Hand) -> None:
    job = await started(hand)
    await hand.exchange((), (hand.verify(A, job, 4, novel(hand)[4:6]),))
    opening = hand.open(A, hand.new_job(), novel(hand), 7)
    await refused(hand, RefusalCode.KV_GAP, (opening,))
    await assert_heals(hand)


async def test_rows_that_an_opening_gave_up_are_void(hand: Hand) -> None:
    await started(hand)
    await hand.exchange((hand.open(A, hand.new_job(), novel(hand), 6),))
    opening = hand.open(A, hand.new_job(), novel(hand), 7)
    reply = await refused(hand, RefusalCode.KV_GAP, (opening,))
    assert [(rows.lane, rows.valid_rows) for rows in reply.lanes] == [(A, 6)]
    await assert_heals(hand)


async def test_rows_beyond_the_last_are_refused(hand: Hand) -> None:
    limit = hand.info.max_rows
    prompt = novel(hand, limit)
    await hand.turn(A, prompt, 1)
    job = hand.new_job()
    opening = hand.open(A, job, prompt, limit - 1)
    await refused(
        hand, RefusalCode.ROW_LIMIT, (opening,), (hand.verify(A, job, limit - 1, (1, 2)),)
    )
    await assert_heals(hand)


async def test_a_segment_of_another_job_is_a_bad_frame(hand: Hand) -> None:
    job = await started(hand)
    stranger = JobId(job + 1000)
    await refused(hand, RefusalCode.BAD_FRAME, (), (hand.verify(A, stranger, FIRST, (1,)),))
    await assert_heals(hand)


async def test_a_lane_that_does_not_exist_is_a_bad_frame(hand: Hand) -> None:
    beyond = hand.info.lanes
    job = hand.new_job()
    opening = hand.open(beyond, job)
    segment = hand.prefill(beyond, job, 0, (1, 2))
    await refused(hand, RefusalCode.BAD_FRAME, (opening,), (segment,), lane=beyond)
    await assert_heals(hand)


async def test_a_token_that_does_not_exist_is_a_bad_frame(hand: Hand) -> None:
    job = await started(hand)
    segment = hand.verify(A, job, FIRST, (1, hand.info.vocab_size))
    await refused(hand, RefusalCode.BAD_FRAME, (), (segment,))
    await assert_heals(hand)


async def test_other_lanes_of_the_frame_are_served(hand: Hand) -> None:
    job, other = await started(hand), hand.new_job()
    prompt = novel(hand, 8, seed=3)
    opening = hand.open(B, other)
    good = hand.prefill(B, other, 0, prompt, GREEDY)
    bad = hand.verify(A, job, FIRST + 5, (1,))
    reply = await refused(hand, RefusalCode.KV_GAP, (opening,), (bad, good))
    tokens = (await hand.turn(COLD, prompt, 1)).tokens
    assert [part.tokens for part in reply.segments] == [(), tokens]
    await assert_heals(hand)


async def test_a_duplicate_is_neither_applied_nor_answered(hand: Hand) -> None:
    prompt = novel(hand)
    job = hand.new_job()
    frames = hand.send_prefill(A, job, prompt, chunk=8)
    hand.ring.submit(frames[0])
    tokens = (await hand.reply_to(frames[-1])).segments[0].tokens
    hand.ring.submit(frames[0])
    hand.ring.submit(replace(frames[1], segments=()))
    turn = hand.verify(A, job, FIRST, tokens)
    reply = await hand.reply_to(hand.send(segments=(turn,)))
    assert reply.refusals == ()
    assert tokens + reply.segments[0].tokens == (await hand.turn(COLD, prompt, 2)).tokens


async def test_a_skipped_frame_is_out_of_order_until_it_comes(hand: Hand) -> None:
    job = await started(hand)
    segment = hand.verify(A, job, FIRST, (1,))
    due = hand.frame((), (segment,))
    early = Frame(due.epoch, hand.ledger.next_seq + 1, (), (hand.verify(A, job, FIRST, (2,)),))
    hand.ring.submit(early)
    reply = await hand.next_reply()
    assert (reply.epoch, reply.seq) == (early.epoch, early.seq)
    assert [(r.code, r.lane) for r in reply.refusals] == [(RefusalCode.FRAME_ORDER, None)]
    assert reply.segments[0].refused
    served = await hand.reply_to(hand.submit(due))
    prompt = (*novel(hand), 1)
    assert served.segments[0].tokens == (await hand.turn(COLD, prompt, 1)).tokens


async def test_a_frame_of_an_older_epoch_is_stale(hand: Hand) -> None:
    await started(hand)
    await hand.open_epoch(Epoch(hand.ledger.epoch + 1))
    job = hand.new_job()
    opening, segment = hand.open(A, job), hand.prefill(A, job, 0, (1, 2), GREEDY)
    stale = Frame(Epoch(hand.ledger.epoch - 1), hand.ledger.next_seq, (opening,), (segment,))
    hand.ring.submit(stale)
    reply = await hand.next_reply()
    assert (reply.epoch, reply.seq) == (stale.epoch, stale.seq)
    assert [(r.code, r.lane) for r in reply.refusals] == [(RefusalCode.STALE_EPOCH, None)]
    assert reply.segments[0].refused
    await assert_heals(hand)


async def test_a_new_epoch_keeps_the_rows_that_every_stage_holds(hand: Hand) -> None:
    await started(hand)
    held = hand.ledger.holding()
    await hand.open_epoch(Epoch(hand.ledger.epoch + 1))
    assert hand.ledger.holding().lanes == held.lanes
    prompt = (*novel(hand), 1, 2)
    warm = await hand.turn(A, prompt, COUNT, cached_prefix=FIRST)
    assert warm.prefilled == 2
    assert warm.tokens == (await hand.turn(COLD, prompt, COUNT)).tokens
    opening = hand.open(B, hand.new_job(), novel(hand), hand.ledger.valid_rows(LaneId(B)) + 1)
    await refused(hand, RefusalCode.KV_GAP, (opening,), lane=B)


async def test_replies_come_in_order_and_a_cancelled_wait_loses_none(hand: Hand) -> None:
    job = hand.new_job()
    waiting = asyncio.ensure_future(hand.ring.next_reply())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    frames = hand.send_prefill(A, job, novel(hand, 24), chunk=4)
    replies = [await hand.next_reply() for _ in frames]
    assert [reply.seq for reply in replies] == [frame.seq for frame in frames]
    for reply in replies:
        assert [timing.stage for timing in reply.timings] == list(range(hand.info.stages))


GUARDS = (
    "_gap_guard",
    "_content_guard",
    "_order_guard",
    "_epoch_guard",
    "_row_limit_guard",
    "_job_guard",
    "_lane_guard",
)
CASES = [
    case
    for name, case in list(globals().items())
    if name.startswith("test_") and list(inspect.signature(case).parameters) == ["hand"]
]
CASES.append(lambda hand: test_other_tokens_than_claimed_are_wrong_content(hand, FIRST - 1))


async def failing_cases() -> int:
    """How many of this file's cases fail on a fake ring."""
    failed = 0
    for case in CASES:
        ring = FakeRing(2, 3, 64, vocab_size=97)
        hand = Hand(ring, await ring.start(lambda progress: None), reply_timeout_s=0.05)
        try:
            await case(hand)
        except Exception:  # whatever a test fails with
            failed += 1
    return failed


async def test_no_case_fails_while_all_guards_are_on() -> None:
    assert len(CASES) > 10
    assert await failing_cases() == 0


@pytest.mark.parametrize("guard", GUARDS)
async def test_without_a_guard_the_suite_fails(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, guard, lambda *_: None)
    assert await failing_cases() > 0
