"""The memo of a whole prompt: an exact resend samples from kept logits, computes no row, and says the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.frames import Frame, JobId, LaneId, Segment, SegmentKind
from coordinator.memos import MemoSlots, MemoTable
from coordinator.requests import (
    GREEDY,
    Finished,
    Request,
    SamplingSpec,
    SessionId,
    TokenDelta,
)
from coordinator.ring import Ring
from fakering.clock import VirtualClock
from fakering.faults import Fault, Restart
from fakering.hand import Hand
from fakering.ring import FakeRing
from stage.config import RingConfig
from stage.local_ring import LocalRing
from stage.memos import memo_slots, row_bytes

_PROMPT = tuple(1 + 7 * n % 80 for n in range(150))
_WARM = SamplingSpec(temperature=0.8, top_p=0.95, seed=7, logprobs=3)


class _Watched:
    """A driver, and every frame that it sent."""

    def __init__(self, ring: Ring, clock: VirtualClock | None) -> None:
        self.frames: list[Frame] = []
        self._clock = clock
        self.driver = RingDriver("ring", ring, SchedulerSettings(), clock or SystemClock())
        submit = ring.submit

        def record(frame: Frame) -> None:
            self.frames.append(frame)
            submit(frame)

        ring.submit = record  # type: ignore[method-assign]

    async def ask(self, request: Request) -> tuple[tuple[TokenDelta, ...], Finished]:
        asking = self._ask(request)
        return await (asking if self._clock is None else self._clock.drive(asking))

    async def _ask(self, request: Request) -> tuple[tuple[TokenDelta, ...], Finished]:
        deltas: list[TokenDelta] = []
        async with self.driver.submit(request) as stream:
            async for event in stream:
                if isinstance(event, TokenDelta):
                    deltas.append(event)
                elif isinstance(event, Finished):
                    return tuple(deltas), event
        raise AssertionError("the stream ended without a word")

    def prefilled(self, since: int) -> int:
        """Rows that were computed of prompts since the frame with that place."""
        segments = [segment for frame in self.frames[since:] for segment in frame.segments]
        return sum(s.width for s in segments if s.kind is SegmentKind.PREFILL)


@asynccontextmanager
async def _watched(ring: Ring, clock: VirtualClock | None = None) -> AsyncIterator[_Watched]:
    watched = _Watched(ring, clock)
    await watched.driver.start(lambda progress: None)
    try:
        yield watched
    finally:
        await watched.driver.stop()


@asynccontextmanager
async def _fake(*faults: Fault) -> AsyncIterator[_Watched]:
    clock = VirtualClock()
    ring = FakeRing(2, 2, 512, vocab_size=90, faults=faults, clock=clock, step_s=0.01)
    async with _watched(ring, clock) as watched:
        yield watched


def _request(prompt: tuple[int, ...] = _PROMPT, sampling: SamplingSpec = GREEDY) -> Request:
    return Request(prompt, sampling, max_new_tokens=6, session=SessionId("a"))


def _tokens(deltas: tuple[TokenDelta, ...]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.tokens)


@pytest.mark.parametrize(
    "sampling", [GREEDY, _WARM, replace(_WARM, seed=8, repetition_penalty=1.3)]
)
async def test_an_exact_resend_computes_no_row_and_says_the_same(
    sampling: SamplingSpec,
) -> None:
    async with _fake() as ring:
        cold, _ = await ring.ask(replace(_request(sampling=sampling), reuse=False))
        await ring.ask(_request())
        since = len(ring.frames)
        again, finished = await ring.ask(_request(sampling=sampling))
        assert finished.usage.cached_prefix == len(_PROMPT)
        assert ring.prefilled(since) == 0
        assert _tokens(again) == _tokens(cold)


async def test_real_logits_are_kept_bit_for_bit(tiny_model: Path) -> None:
    """Log-probabilities tell more than tokens: they would show another rounding."""
    config = RingConfig(tiny_model, "tiny", ((0, 2), (2, 4)), lanes=2, max_rows=512)
    async with _watched(LocalRing(config)) as ring:
        for sampling in (_WARM, GREEDY, replace(_WARM, seed=99)):
            cold, _ = await ring.ask(replace(_request(sampling=sampling), reuse=False))
            since = len(ring.frames)
            again, finished = await ring.ask(_request(sampling=sampling))
            assert finished.usage.cached_prefix == len(_PROMPT)
            assert ring.prefilled(since) == 0
            assert _tokens(again) == _tokens(cold)
            assert [d.logprobs for d in again][0] == [d.logprobs for d in cold][0]


async def test_a_prompt_that_merely_begins_like_another_computes_what_it_must() -> None:
    async with _fake() as ring:
        await ring.ask(_request())
        for prompt in (_PROMPT[:-1], (*_PROMPT[:-1], 5), (*_PROMPT, 5)):
            since = len(ring.frames)
            deltas, _ = await ring.ask(_request(prompt))
            assert ring.prefilled(since) >= 1
            assert _tokens(deltas) == FakeRing(1, 1, 8, vocab_size=90).language.oracle(prompt, 6)


async def test_a_request_that_reuses_nothing_recalls_nothing() -> None:
    async with _fake() as ring:
        await ring.ask(_request())
        since = len(ring.frames)
        _, finished = await ring.ask(replace(_request(), reuse=False))
        assert finished.usage.cached_prefix == 0
        assert ring.prefilled(since) == len(_PROMPT)


async def test_a_stage_that_lost_them_costs_a_row() -> None:
    """What no ledger foresaw: the last row is computed again, the rows before it are not."""
    async with _fake() as ring:
        first, _ = await ring.ask(_request())
        fake = ring.driver._ring
        assert isinstance(fake, FakeRing)
        fake.network.stages[-1].ledger.memos.clear()
        since = len(ring.frames)
        again, finished = await ring.ask(_request())
        assert _tokens(again) == _tokens(first)
        assert finished.usage.cached_prefix == len(_PROMPT) - 1
        assert ring.prefilled(since) == 1
        _, third = await ring.ask(_request())
        assert third.usage.cached_prefix == len(_PROMPT), "what was computed is kept again"


async def test_a_new_epoch_forgets_them() -> None:
    async with _fake(Restart(1, 4)) as ring:
        answers = [await ring.ask(_request()) for _ in range(4)]
        assert len({_tokens(deltas) for deltas, _ in answers}) == 1


async def test_more_prompts_than_slots_stay_right() -> None:
    async with _fake() as ring:
        prompts = [(*_PROMPT[:100], last) for last in range(1, 9)]
        for prompt in prompts * 2:
            deltas, _ = await ring.ask(_request(prompt))
            assert _tokens(deltas) == FakeRing(1, 1, 8, vocab_size=90).language.oracle(prompt, 6)


def test_slots_are_given_to_the_prompt_used_longest_ago() -> None:
    table = MemoTable()
    slots = MemoSlots(table, slots=3, lanes=2)
    for slot, prompt in enumerate([(1,), (2,), (3,)]):
        assert slots.choose(prompt) == slot
        table.keep(slot, prompt)
    assert slots.recall((1,)) == 0
    assert slots.choose((4,)) == 1, "the first one was just recalled"
    assert slots.choose((3,)) == 2, "a prompt that is there stays where it is"
    assert MemoSlots(table, slots=2, lanes=2).choose((1,)) is None, "too few to be safe"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Segment(LaneId(0), JobId(0), 4, (), SegmentKind.RECALL, GREEDY),
        lambda: Segment(LaneId(0), JobId(0), 0, (), SegmentKind.RECALL, GREEDY, memo=0),
        lambda: Segment(LaneId(0), JobId(0), 4, (1,), SegmentKind.RECALL, GREEDY, memo=0),
        lambda: Segment(LaneId(0), JobId(0), 4, (), SegmentKind.RECALL, None, memo=0),
        lambda: Segment(LaneId(0), JobId(0), 4, (), SegmentKind.PREFILL, GREEDY, memo=0),
        lambda: Segment(LaneId(0), JobId(0), 4, (1,), SegmentKind.PREFILL, None, memo=0),
        lambda: Segment(LaneId(0), JobId(0), 4, (1,), SegmentKind.VERIFY, GREEDY, memo=0),
        lambda: Segment(LaneId(0), JobId(0), 4, (1,), SegmentKind.PREFILL, GREEDY, memo=-1),
        lambda: Segment(LaneId(0), JobId(0), 4, (1,), SegmentKind.PREFILL, GREEDY, memo=1 << 40),
    ],
)
def test_a_memo_that_means_nothing_does_not_construct(make: object) -> None:
    with pytest.raises(ValueError, match="memo|segment|RECALL"):
        make()  # type: ignore[operator]


async def test_a_slot_that_is_read_and_written_in_one_frame_gives_what_lay_in_it(
    tiny_model: Path,
) -> None:
    """No frame of ours does so; a stage answers all the same what the frame says, and outlives a slot too many."""
    config = RingConfig(tiny_model, "tiny", ((0, 4),), lanes=2, max_rows=512)
    ring = LocalRing(config)
    info = await ring.start(lambda progress: None)
    try:
        hand = Hand(ring, info)
        first, other = hand.new_job(), hand.new_job()
        asked = replace(hand.prefill(0, first, 0, _PROMPT, GREEDY), memo=0)
        reply = await hand.exchange([hand.open(0, first)], [asked])
        recall = Segment(LaneId(0), first, len(_PROMPT), (), SegmentKind.RECALL, GREEDY, memo=0)
        written = replace(hand.prefill(1, other, 0, _PROMPT[:9], GREEDY), memo=0)
        both = await hand.exchange([hand.open(1, other)], [recall, written])
        assert both.segments[0].tokens == reply.segments[0].tokens
        assert both.segments[1].tokens != reply.segments[0].tokens, "the test could not fail"
        beyond = [replace(written, memo=info.memos), replace(recall, memo=info.memos)]
        refused = await hand.exchange([hand.open(1, other)], beyond)
        assert [refusal.lane for refusal in refused.refusals] == [0]
        again = await hand.exchange([hand.open(1, other)], [written])
        assert again.segments[0].tokens == both.segments[1].tokens, "the stage is alive"
    finally:
        await ring.stop()


def test_logits_take_a_small_part_of_the_store_or_nothing() -> None:
    row = row_bytes(1000)
    assert memo_slots(64 * row * 10, 1000, lanes=4) == 10
    assert memo_slots(64 * row * 4, 1000, lanes=4) == 0, "as few as lanes are of no use"
    assert memo_slots(2**40, 1000, lanes=4) == 64
    assert memo_slots(2**40, 1000, lanes=100) == 200
    assert memo_slots(0, 1000, lanes=1) == 0
