"""Masks on every ring: a masked row samples what it may, and no other row notices."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from coordinator.constraints import allows
from coordinator.frames import RefusalCode, SegmentReply
from coordinator.requests import GREEDY, SamplingSpec
from fakering import texts
from fakering.hand import Hand
from fakering.toys import ToyConstraint, mask_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

SPECS = [GREEDY, SamplingSpec(temperature=0.8, seed=5)]


def _prompt(hand: Hand, seed: int = 1) -> tuple[int, ...]:
    return texts.novel(12, seed, hand.info.vocab_size)


async def _first(hand: Hand, lane: int, spec: SamplingSpec, mask: bytes = b"") -> SegmentReply:
    job, prompt = hand.new_job(), _prompt(hand)
    part = hand.prefill(lane, job, 0, prompt, spec, (mask,) if mask else ())
    return (await hand.exchange((hand.open(lane, job),), (part,))).segments[0]


@pytest.mark.parametrize("spec", SPECS, ids=["greedy", "sampled"])
async def test_a_masked_row_samples_what_its_mask_lets_follow(
    hand: Hand, spec: SamplingSpec
) -> None:
    size = hand.info.vocab_size
    [free] = (await _first(hand, 0, spec)).tokens
    for seed in range(8):
        allowed = random.Random(seed).sample(range(size), 3)
        mask = mask_of(allowed, size)
        runs = {(await _first(hand, lane, spec, mask)).tokens for lane in (0, 1)}
        assert len(runs) == 1
        [(token,)] = runs
        assert token in allowed
    both = mask_of((free, *allowed), size)
    assert (await _first(hand, 0, spec, both)).tokens == (free,)


@pytest.mark.parametrize("spec", SPECS, ids=["greedy", "sampled"])
async def test_rows_without_a_mask_say_the_same_beside_rows_with_one(
    hand: Hand, spec: SamplingSpec
) -> None:
    """One frame: a masked verify segment between two that are not."""
    size = hand.info.vocab_size
    prompts = [_prompt(hand, seed) for seed in (1, 2, 3)]
    drafts = texts.novel(3, 9, hand.info.vocab_size)
    spec = SamplingSpec(temperature=spec.temperature, seed=spec.seed, logprobs=2)
    replies = []
    for masked in (False, True):
        jobs = [hand.new_job() for _ in prompts]
        for lane, prompt in enumerate(prompts):
            part = hand.prefill(lane, jobs[lane], 0, prompt)
            await hand.exchange((hand.open(lane, jobs[lane]),), (part,))
        masks = tuple(mask_of(range(n, size, 5), size) for n in range(3)) if masked else ()
        parts = [
            hand.verify(lane, jobs[lane], 12, drafts, spec, masks if lane == 1 else ())
            for lane in range(3)
        ]
        replies.append((await hand.exchange(segments=parts)).segments)
    for lane in (0, 2):
        assert replies[0][lane].tokens == replies[1][lane].tokens
        assert replies[0][lane].logprobs == replies[1][lane].logprobs
    assert replies[0][1].tokens != replies[1][1].tokens
    for token, mask in zip(replies[1][1].tokens, masks, strict=True):
        assert allows(mask, token)


@pytest.mark.parametrize("spec", SPECS, ids=["greedy", "sampled"])
async def test_rows_of_one_segment_have_masks_of_their_own(hand: Hand, spec: SamplingSpec) -> None:
    """One verify segment of right drafts samples what frames of one row each did."""
    toy, prompt = ToyConstraint(hand.info.vocab_size, seed=4), _prompt(hand)
    job, said = hand.new_job(), []
    part = hand.prefill(0, job, 0, prompt, spec, toy.masks((), ()))
    said += (await hand.exchange((hand.open(0, job),), (part,))).segments[0].tokens
    while len(said) < 5:
        row = len(prompt) + len(said) - 1
        step = hand.verify(0, job, row, said[-1:], spec, toy.masks(said, ()))
        said += (await hand.exchange(segments=(step,))).segments[0].tokens
    assert toy.obeyed(said)
    other = hand.new_job()
    await hand.exchange((hand.open(1, other),), (hand.prefill(1, other, 0, prompt),))
    masks = toy.masks(said[:1], said[1:4])
    wide = hand.verify(1, other, len(prompt), said[:4], spec, masks)
    assert list((await hand.exchange(segments=(wide,))).segments[0].tokens) == said[1:]
    assert all(left != right for left, right in pairwise(masks))


async def test_a_row_without_a_limit_among_masked_rows_is_free(hand: Hand) -> None:
    size, prompt = hand.info.vocab_size, _prompt(hand)
    replies = []
    for masks in ((), (mask_of((3,), size), b"")):
        job = hand.new_job()
        await hand.exchange((hand.open(0, job),), (hand.prefill(0, job, 0, prompt),))
        step = hand.verify(0, job, len(prompt), (1, 2), GREEDY, masks)
        replies.append((await hand.exchange(segments=(step,))).segments[0].tokens)
    assert replies[1][0] == 3
    assert replies[0][1] == replies[1][1]


async def test_a_mask_of_another_vocabulary_is_refused_before_anything_is_computed(
    hand: Hand,
) -> None:
    size = hand.info.vocab_size
    job, prompt = hand.new_job(), _prompt(hand)
    beyond = mask_of((size + 3,), size + 8)
    part = hand.prefill(0, job, 0, prompt, GREEDY, (beyond,))
    other = hand.prefill(1, job, 0, prompt, GREEDY)
    reply = await hand.exchange((hand.open(0, job), hand.open(1, job)), (part, other))
    refused = [(refusal.code, refusal.stage) for refusal in reply.refusals]
    assert refused == [(RefusalCode.BAD_FRAME, 0)]
    assert reply.segments[0].refused
    assert len(reply.segments[1].tokens) == 1
