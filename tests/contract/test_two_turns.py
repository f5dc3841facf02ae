"""A second turn that starts at cached_prefix=N answers as a cold lane does, on every ring.

Cold means: the same tokens on another lane from row 0. Every case counts the rows that were computed, so that
none can pass by reusing nothing, and the first test is the control: cold against cold.
"""

from __future__ import annotations

import pytest

from coordinator.frames import CopyRows, LaneId
from coordinator.requests import SamplingSpec
from fakering import texts
from fakering.hand import Hand

pytestmark = pytest.mark.asyncio(loop_scope="session")

A, B, COLD = 0, 1, 2  # lanes
COUNT = 5  # tokens of a turn
FIRST = 20  # tokens of the first prompt
COMMITTED = FIRST + COUNT - 1  # the last sampled token is in no row


def novel(hand: Hand, length: int, seed: int = 1) -> tuple[int, ...]:
    return texts.novel(length, seed, hand.info.vocab_size)


async def cold(hand: Hand, prompt: tuple[int, ...], **kinds) -> tuple[int, ...]:
    turn = await hand.turn(COLD, prompt, COUNT, **kinds)
    assert turn.prefilled == len(prompt)
    return turn.tokens


async def warm(hand: Hand, lane: int, prompt: tuple[int, ...], n: int, **kinds) -> tuple[int, ...]:
    turn = await hand.turn(lane, prompt, COUNT, cached_prefix=n, **kinds)
    assert turn.prefilled == len(prompt) - n
    return turn.tokens


async def first_turn(hand: Hand, lane: int = A) -> tuple[int, ...]:
    """Leaves the lane with COMMITTED rows; returns the history with one token more."""
    prompt = novel(hand, FIRST)
    history = prompt + (await hand.turn(lane, prompt, COUNT)).tokens
    assert hand.ledger.valid_rows(LaneId(lane)) == COMMITTED == len(history) - 1
    return history


async def test_two_cold_runs_agree_on_any_lane_and_with_any_chunks(hand: Hand) -> None:
    prompt = novel(hand, FIRST)
    runs = [await cold(hand, prompt, chunk=chunk) for chunk in (8, 3, 64)]
    runs.append((await hand.turn(B, prompt, COUNT)).tokens)
    assert len(set(runs)) == 1


@pytest.mark.parametrize("n", [0, 1, FIRST - 1, FIRST, COMMITTED - 1, COMMITTED])
async def test_a_second_turn_from_row_n_equals_cold(hand: Hand, n: int) -> None:
    prompt = await first_turn(hand) + novel(hand, 10, seed=2)
    assert await warm(hand, A, prompt, n) == await cold(hand, prompt)


@pytest.mark.parametrize("n", [7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("chunk", [1, 8])
async def test_a_second_turn_from_around_a_chunk_edge_equals_cold(
    hand: Hand, n: int, chunk: int
) -> None:
    prompt = (await first_turn(hand))[:n] + novel(hand, 12, seed=3)
    assert await warm(hand, A, prompt, n, chunk=chunk) == await cold(hand, prompt)


async def test_the_exact_prompt_again_computes_its_last_row_only(hand: Hand) -> None:
    prompt = novel(hand, FIRST)
    first = await hand.turn(A, prompt, COUNT)
    for _ in range(3):
        assert await warm(hand, A, prompt, FIRST - 1) == first.tokens
    assert await cold(hand, prompt) == first.tokens


async def test_a_lane_that_holds_the_whole_prompt_is_opened_and_rewound_by_one(hand: Hand) -> None:
    prompt = (await first_turn(hand))[:COMMITTED]
    job = hand.new_job()
    last = hand.prefill(A, job, COMMITTED - 1, prompt[-1:], SamplingSpec(temperature=0))
    reply = await hand.exchange((hand.open(A, job, prompt, COMMITTED),), (last,))
    assert reply.segments[0].tokens == (await cold(hand, prompt))[:1]


async def test_the_last_row_of_a_lane_is_as_good_as_any(hand: Hand) -> None:
    prompt = novel(hand, hand.info.max_rows)
    first = await hand.turn(A, prompt, 1)
    assert hand.ledger.valid_rows(LaneId(A)) == hand.info.max_rows
    again = await hand.turn(A, prompt, 1, cached_prefix=len(prompt) - 1)
    assert again.prefilled == 1
    assert first.tokens == again.tokens == (await hand.turn(COLD, prompt, 1)).tokens


async def test_another_sessions_prefix_is_taken_over_in_place(hand: Hand) -> None:
    history = await first_turn(hand)
    prompt = history[:12] + novel(hand, 10, seed=4)
    assert await warm(hand, A, prompt, 12) == await cold(hand, prompt)


async def test_a_copied_prefix_serves_two_sessions(hand: Hand) -> None:
    history = await first_turn(hand)
    other = history[:12] + novel(hand, 10, seed=4)
    copy = CopyRows(LaneId(A), LaneId(B), 12)
    assert await warm(hand, B, other, 12, ops=(copy,)) == await cold(hand, other)
    own = history + novel(hand, 6, seed=5)
    assert await warm(hand, A, own, COMMITTED) == await cold(hand, own)


async def test_a_copy_replaces_all_that_its_target_held(hand: Hand) -> None:
    history = await first_turn(hand)
    await hand.turn(B, novel(hand, 40, seed=6), COUNT)
    prompt = history[:9] + novel(hand, 5, seed=7)
    copy = CopyRows(LaneId(A), LaneId(B), 9)
    assert await warm(hand, B, prompt, 9, ops=(copy,)) == await cold(hand, prompt)


async def test_a_rewind_and_the_same_rows_once_more_equal_cold(hand: Hand) -> None:
    history = await first_turn(hand)
    branch = history[:10] + novel(hand, 5, seed=8)
    assert await warm(hand, A, branch, 10) == await cold(hand, branch)
    again = history + novel(hand, 3, seed=9)
    assert await warm(hand, A, again, 10) == await cold(hand, again)


async def test_a_divergence_in_the_first_turns_last_frame_is_cut_there(hand: Hand) -> None:
    history = await first_turn(hand)
    for row in (COMMITTED - 1, FIRST - 1, FIRST - 3):
        prompt = texts.changed(history, row, hand.info.vocab_size)
        n = min(row, hand.ledger.usable_prefix(LaneId(A), prompt, hand.root))
        assert n == row
        assert await warm(hand, A, prompt, n) == await cold(hand, prompt)
        await hand.turn(A, history[:FIRST], COUNT)


@pytest.mark.parametrize("waited", [False, True])
async def test_a_turn_cancelled_in_prefill_leaves_rows_to_reuse(hand: Hand, waited: bool) -> None:
    prompt = novel(hand, 32)
    job = hand.new_job()
    parts = [hand.prefill(A, job, start, prompt[start : start + 8]) for start in (0, 8)]
    frames = [hand.send((hand.open(A, job),), parts[:1]), hand.send(segments=parts[1:])]
    if waited:
        await hand.reply_to(frames[-1])
    assert await warm(hand, A, prompt, 16) == await cold(hand, prompt)


@pytest.mark.parametrize("waited", [False, True])
async def test_a_turn_cancelled_in_decode_leaves_rows_to_reuse(hand: Hand, waited: bool) -> None:
    prompt = novel(hand, FIRST)
    job = hand.new_job()
    frames = hand.send_prefill(A, job, prompt)
    tokens = (await hand.reply_to(frames[-1])).segments[0].tokens
    frame = hand.send(segments=(hand.verify(A, job, FIRST, (*tokens, 1, 2)),))
    if waited:
        await hand.reply_to(frame)
    follow_up = (*prompt, *tokens, *novel(hand, 6, seed=10))
    n = min(FIRST + 1, hand.ledger.usable_prefix(LaneId(A), follow_up, hand.root))
    assert n == FIRST + 1
    assert await warm(hand, A, follow_up, n) == await cold(hand, follow_up)


async def test_drafts_change_nothing_whether_accepted_or_rejected(hand: Hand) -> None:
    prompt = novel(hand, FIRST)
    plain = await cold(hand, prompt)
    wrong = tuple((token + 1) % hand.info.vocab_size for token in plain)
    job = hand.new_job()
    await hand.reply_to(hand.send_prefill(A, job, prompt)[-1])
    rejected = hand.verify(A, job, FIRST, (plain[0], wrong[1], wrong[2]))
    reply = await hand.exchange(segments=(rejected,))
    assert reply.segments[0].tokens[0] == plain[1]
    mixed = hand.verify(A, job, FIRST + 1, (plain[1], plain[2], wrong[3]))
    reply = await hand.exchange(segments=(mixed,))
    assert reply.segments[0].tokens[:2] == plain[2:4]
    last = hand.verify(A, job, FIRST + 3, plain[3:4])
    assert (await hand.exchange(segments=(last,))).segments[0].tokens == plain[4:5]


async def test_rejected_drafts_are_not_reused(hand: Hand) -> None:
    prompt = novel(hand, FIRST)
    plain = await cold(hand, prompt)
    wrong = (plain[1] + 1) % hand.info.vocab_size
    job = hand.new_job()
    await hand.reply_to(hand.send_prefill(A, job, prompt)[-1])
    await hand.exchange(segments=(hand.verify(A, job, FIRST, (plain[0], wrong, wrong)),))
    follow_up = prompt + plain[:3] + novel(hand, 4, seed=11)
    assert hand.ledger.usable_prefix(LaneId(A), follow_up, hand.root) == FIRST + 1
    assert await warm(hand, A, follow_up, FIRST + 1) == await cold(hand, follow_up)


async def test_lanes_that_share_a_frame_do_not_meet(hand: Hand) -> None:
    left, right = novel(hand, 8, seed=12), novel(hand, 5, seed=13)
    spec = SamplingSpec(temperature=0)
    alone = [(await cold(hand, prompt))[0] for prompt in (left, right)]
    jobs = hand.new_job(), hand.new_job()
    reply = await hand.exchange(
        (hand.open(A, jobs[0]), hand.open(B, jobs[1])),
        (hand.prefill(A, jobs[0], 0, left, spec), hand.prefill(B, jobs[1], 0, right, spec)),
    )
    assert [part.tokens[0] for part in reply.segments] == alone


async def test_a_seeded_turn_equals_cold_and_comes_with_logprobs(hand: Hand) -> None:
    spec = SamplingSpec(temperature=0.8, seed=5, logprobs=2)
    prompt = await first_turn(hand) + novel(hand, 4, seed=14)
    tokens = await warm(hand, A, prompt, COMMITTED, spec=spec)
    assert tokens == await cold(hand, prompt, spec=spec)
    job = hand.new_job()
    frames = hand.send_prefill(A, job, prompt, cached_prefix=COMMITTED, spec=spec)
    part = (await hand.reply_to(frames[-1])).segments[0]
    assert part.tokens == tokens[:1]
    assert len(part.logprobs) == 1
    assert part.logprobs[0].chosen <= 0.0
    assert len(part.logprobs[0].top) == 2
