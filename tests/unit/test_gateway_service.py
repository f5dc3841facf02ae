"""The service turns text into jobs and tokens into text, over a real coordinator and a fake ring."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.errors import (
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    InvalidValue,
    ModelNotFound,
    RingUnavailable,
)
from coordinator.requests import FinishReason, SamplingSpec, SessionId
from coordinator.router import Router
from fakering.model import FakeModel
from fakering.ring import FakeRing
from gateway.chat.byte_tokenizer import END, ByteTokenizer
from gateway.chat.messages import Message
from gateway.service import GenerationService
from gateway.turns import (
    ChatPrompt,
    TextPrompt,
    TokenPrompt,
    TurnDelta,
    TurnFinished,
    TurnRequest,
    TurnStarted,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateway.turns import TurnEvent

GREEDY = SamplingSpec(temperature=0.0)
S = SessionId("s")
LANGUAGE = FakeModel(258, low=32, high=127, end_token=END)
ENDLESS = FakeModel(258, low=32, high=127)


class House:
    def __init__(self, *, language: FakeModel, max_rows: int, step_s: float) -> None:
        self.tokenizer = ByteTokenizer()
        clock = SystemClock()
        self.language = language
        ring = FakeRing(2, 2, max_rows, vocab_size=258, language=language, step_s=step_s)
        self.driver = RingDriver("ring-0", ring, SchedulerSettings(), clock)
        self.router = Router([self.driver], session_limit=8)
        rng = random.Random(7)
        self.service = GenerationService("fake", self.router, self.tokenizer, clock, rng)

    async def run(self, turn: TurnRequest) -> list[TurnEvent]:
        async with aclosing(self.service.generate(turn)) as events:
            return [event async for event in events]


@asynccontextmanager
async def house(
    language: FakeModel = LANGUAGE, max_rows: int = 512, step_s: float = 0.0
) -> AsyncIterator[House]:
    made = House(language=language, max_rows=max_rows, step_s=step_s)
    await made.driver.start(lambda _: None)
    try:
        yield made
    finally:
        await made.driver.stop()


def text_of(events: list[TurnEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TurnDelta))


def ids_of(events: list[TurnEvent]) -> tuple[int, ...]:
    return tuple(i for event in events if isinstance(event, TurnDelta) for i in event.token_ids)


async def test_a_turn_is_started_then_deltas_then_finished() -> None:
    async with house() as it:
        events = await it.run(TurnRequest(TextPrompt("abc"), sampling=GREEDY))
        expected = it.language.oracle(tuple(b"abc"), 500, stop={END})
    assert isinstance(events[0], TurnStarted)
    assert ids_of(events) == expected
    assert text_of(events) == it.tokenizer.decode(expected)
    finished = events[-1]
    assert isinstance(finished, TurnFinished)
    assert (finished.reason, finished.matched_stop) == (FinishReason.STOP, END)
    assert finished.usage.generated_tokens == len(expected)


async def test_without_max_tokens_a_turn_goes_on_to_the_lanes_last_row() -> None:
    async with house(ENDLESS, max_rows=64) as it:
        events = await it.run(TurnRequest(TextPrompt("abcd"), sampling=GREEDY))
    assert isinstance(events[-1], TurnFinished)
    assert events[-1].reason is FinishReason.LENGTH
    assert len(ids_of(events)) >= 60


async def test_a_stop_string_ends_the_job_and_is_not_shown() -> None:
    async with house(ENDLESS) as it:
        answer = it.tokenizer.decode(ENDLESS.oracle(tuple(b"abc"), 100))
        stop = answer[20:23]
        place = answer.index(stop)
        turn = TurnRequest(TextPrompt("abc"), sampling=GREEDY, stop=("no such", stop))
        events = await it.run(turn)
        status = it.driver.status()
    finished = events[-1]
    assert text_of(events) == answer[:place]
    assert isinstance(finished, TurnFinished)
    assert (finished.reason, finished.matched_stop) == (FinishReason.STOP, stop)
    assert finished.usage.generated_tokens == len(ids_of(events)) == place + 3
    assert [event for event in events if isinstance(event, TurnFinished)] == [finished]
    assert (status.running_jobs, status.waiting_jobs) == (0, 0)


async def test_after_a_stop_string_the_session_goes_on_from_what_was_shown() -> None:
    async with house(ENDLESS) as it:
        answer = ENDLESS.oracle(tuple(b"abc"), 100)
        stop = it.tokenizer.decode(answer[20:23])
        place = it.tokenizer.decode(answer).index(stop)
        await it.run(TurnRequest(TextPrompt("abc"), session=S, sampling=GREEDY, stop=(stop,)))
        history = it.router.history(S)
    assert history is not None
    assert history.token_ids == tuple(b"abc") + answer[:place]
    assert history.text == "abc" + it.tokenizer.decode(answer[:place])


async def test_the_next_turn_of_a_session_reuses_prompt_and_answer() -> None:
    async with house() as it:
        asked = (Message("user", "hello " * 20),)
        first = await it.run(TurnRequest(ChatPrompt(asked), session=S, sampling=GREEDY))
        history = it.router.history(S)
        assert history is not None
        again = history.text + "\n<|start|>user\nmore<|end|>\n<|start|>assistant\n"
        second = await it.run(TurnRequest(TextPrompt(again), session=S, sampling=GREEDY))
    started = first[0]
    assert isinstance(started, TurnStarted)
    assert history.token_ids[started.prompt_tokens :] == ids_of(first)
    assert isinstance(second[0], TurnStarted)
    # The last token of an answer was sampled but never written to a row.
    assert second[0].cached_prefix == len(history.token_ids) - 1
    assert second[0].miss is None


class _Merging(ByteTokenizer):
    """Knows "ab" as one token, as a vocabulary with merges would, though a model may write a and b."""

    def encode(self, text: str) -> tuple[int, ...]:
        ids = super().encode(text)
        merged: list[int] = []
        for token in ids:
            if merged and (merged[-1], token) == (97, 98):
                merged[-1] = 0
            else:
                merged.append(token)
        return tuple(merged)


async def test_a_sessions_own_ids_are_kept_where_its_text_would_tokenize_otherwise() -> None:
    async with house() as it:
        it.service._prepare._tokenizer = _Merging()
        own = (256, *b"ab", 257)
        turn = TurnRequest(TokenPrompt(own), session=S, sampling=GREEDY, max_tokens=1)
        await it.run(turn)
        history = it.router.history(S)
        assert history is not None
        text = history.text + "<|end|>"
        events = await it.run(TurnRequest(TextPrompt(text), session=S, max_tokens=1))
        cold = await it.service.count_tokens(TextPrompt(text))
    assert isinstance(events[0], TurnStarted)
    assert events[0].prompt_tokens == cold + 1
    assert events[0].cached_prefix == len(own)


async def test_a_seed_is_drawn_only_when_it_matters_and_always_told() -> None:
    async with house() as it:

        async def seed(**given: object) -> int:
            event = (await it.run(TurnRequest(TextPrompt("abc"), max_tokens=1, **given)))[0]
            assert isinstance(event, TurnStarted)
            return event.seed

        rng = random.Random(7)
        assert await seed(sampling=GREEDY) == 0
        assert [await seed(), await seed()] == [rng.getrandbits(53), rng.getrandbits(53)]
        assert await seed(seed=2**64 - 1) == 2**64 - 1
        with pytest.raises(InvalidValue, match="seed"):
            await seed(seed=-1)


async def test_the_told_seed_gives_the_same_answer_again() -> None:
    async with house() as it:
        first = await it.run(TurnRequest(TextPrompt("abc"), max_tokens=30))
        assert isinstance(first[0], TurnStarted)
        second = await it.run(TurnRequest(TextPrompt("abc"), max_tokens=30, seed=first[0].seed))
        other = await it.run(TurnRequest(TextPrompt("abc"), max_tokens=30, seed=1))
    assert ids_of(first) == ids_of(second) != ids_of(other)


async def test_a_left_turn_frees_its_lane_and_is_remembered() -> None:
    async with house(ENDLESS, step_s=0.001) as it:
        events = it.service.generate(TurnRequest(TextPrompt("abc"), session=S, sampling=GREEDY))
        seen = [await anext(events) for _ in range(4)]
        await events.aclose()
        history, status = it.router.history(S), it.driver.status()
    assert history is not None
    assert history.token_ids == tuple(b"abc") + ids_of(seen)
    assert (status.running_jobs, status.waiting_jobs) == (0, 0)


async def test_closing_a_session_ends_its_turn_and_nothing_brings_it_back() -> None:
    async with house(ENDLESS, step_s=0.001) as it:
        async with aclosing(
            it.service.generate(TurnRequest(TextPrompt("abc"), session=S))
        ) as events:
            await anext(events)
            assert it.service.close_session(S)
            with pytest.raises(Cancelled):
                [_ async for _ in events]
        assert it.router.history(S) is None
        assert not it.service.close_session(S)


async def test_a_deadline_ends_a_turn_with_its_own_error() -> None:
    async with house(ENDLESS, step_s=0.001) as it:
        with pytest.raises(DeadlineExceeded):
            await it.run(TurnRequest(TextPrompt("abc"), timeout_s=0.02))
        assert it.driver.status().running_jobs == 0


async def test_logprobs_come_one_for_each_token() -> None:
    async with house() as it:
        sampling = SamplingSpec(temperature=0.0, logprobs=2)
        events = await it.run(TurnRequest(TextPrompt("abc"), sampling=sampling, max_tokens=9))
    deltas = [event for event in events if isinstance(event, TurnDelta)]
    assert sum(len(delta.logprobs) for delta in deltas) == len(ids_of(events)) > 0
    assert all(len(row.top) == 2 for delta in deltas for row in delta.logprobs)


async def test_an_own_stop_token_ends_a_turn_and_is_not_shown() -> None:
    async with house(ENDLESS) as it:
        answer = ENDLESS.oracle(tuple(b"abc"), 30)
        stop = answer[12]
        end = answer.index(stop)
        turn = TurnRequest(TextPrompt("abc"), sampling=GREEDY, stop_token_ids=(stop,))
        events = await it.run(turn)
    assert ids_of(events) == answer[: end + 1]
    assert text_of(events) == it.tokenizer.decode(answer[:end])
    assert isinstance(events[-1], TurnFinished)
    assert events[-1].matched_stop == stop


async def test_ignore_eos_goes_on_over_the_models_end() -> None:
    always = FakeModel(258, low=32, high=127, end_token=END, end_one_in=1)
    async with house(always) as it:
        turn = TurnRequest(TextPrompt("abc"), sampling=GREEDY, max_tokens=5, ignore_eos=True)
        events = await it.run(turn)
    assert len(ids_of(events)) == 5


class _NeverAsked(ByteTokenizer):
    def encode(self, text: str) -> tuple[int, ...]:
        raise AssertionError("tokenized a text that cannot fit")


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    async with house() as it:
        it.service._prepare._tokenizer = _NeverAsked()
        for prompt in (
            TextPrompt("x" * 5_000_000),
            ChatPrompt((Message("user", "x" * 5_000_000),)),
        ):
            with pytest.raises(ContextTooLong):
                await it.run(TurnRequest(prompt))


BAD_TURNS = [
    (TurnRequest(ChatPrompt(())), "messages"),
    (TurnRequest(TextPrompt("")), "prompt"),
    (TurnRequest(TokenPrompt(())), "prompt"),
    (TurnRequest(TokenPrompt((1, -1))), "token_ids"),
    (TurnRequest(TokenPrompt((1, 258))), "token_ids"),
    (TurnRequest(TextPrompt("a"), max_tokens=0), "max_tokens"),
    (TurnRequest(TextPrompt("a"), max_tokens=-3), "max_tokens"),
    (TurnRequest(TextPrompt("a"), stop=("",)), "stop"),
    (TurnRequest(TextPrompt("a"), stop_token_ids=(999,)), "stop_token_ids"),
    (TurnRequest(TextPrompt("a"), session=SessionId("s" * 257)), "session_id"),
    (
        TurnRequest(TextPrompt("a"), sampling=SamplingSpec(logit_bias=((258, 1.0),))),
        "logit_bias",
    ),
]


@pytest.mark.parametrize(("turn", "field"), BAD_TURNS)
async def test_a_bad_value_is_refused_by_its_field(turn: TurnRequest, field: str) -> None:
    async with house() as it:
        with pytest.raises(InvalidValue) as refused:
            await it.run(turn)
        assert refused.value.field == field
        assert await it.run(TurnRequest(TextPrompt("abc"), max_tokens=1))


async def test_another_model_is_not_found() -> None:
    async with house() as it:
        with pytest.raises(ModelNotFound):
            await it.run(TurnRequest(TextPrompt("a"), model="other"))
        with pytest.raises(ModelNotFound):
            await it.service.count_tokens(TextPrompt("a"), model="other")


async def test_before_a_ring_has_started_a_turn_is_unavailable() -> None:
    it = House(language=LANGUAGE, max_rows=64, step_s=0.0)
    with pytest.raises(RingUnavailable):
        await it.run(TurnRequest(TextPrompt("a")))


async def test_turns_at_once_do_not_mix() -> None:
    async with house() as it:
        prompts = [f"prompt {n}" for n in range(6)]
        turns = [TurnRequest(TextPrompt(p), sampling=GREEDY, max_tokens=20) for p in prompts]
        answers = await asyncio.gather(*(it.run(turn) for turn in turns))
        expected = [it.language.oracle(tuple(p.encode()), 20, stop={END}) for p in prompts]
    assert [ids_of(events) for events in answers] == expected
