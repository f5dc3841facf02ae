"""How turns begin and end: what a refused, closed, late or cut turn leaves behind."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.errors import (
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    InvalidValue,
    QueueFull,
    ServerEnded,
    Shed,
)
from coordinator.requests import GREEDY, SessionId
from coordinator.router import Router
from fakering.model import FakeModel
from fakering.ring import FakeRing
from gateway.chat.byte_tokenizer import ByteTokenizer
from gateway.service import GenerationService
from gateway.turns import TextPrompt, TurnDelta, TurnEvent, TurnFinished, TurnRequest

S = SessionId("s")
ENDLESS = FakeModel(258, low=32, high=127)


@dataclass(frozen=True)
class House:
    driver: RingDriver
    router: Router
    service: GenerationService

    async def run(self, turn: TurnRequest) -> list[TurnEvent]:
        async with aclosing(self.service.generate(turn)) as events:
            return [event async for event in events]


@asynccontextmanager
async def house(step_s: float = 0.0) -> AsyncIterator[House]:
    """Two lanes of 512 rows; answers that never end by themselves."""
    clock, tokenizer = SystemClock(), ByteTokenizer()
    ring = FakeRing(2, 2, 512, vocab_size=258, language=ENDLESS, step_s=step_s)
    driver = RingDriver("ring-0", ring, SchedulerSettings(), clock)
    router = Router([driver], session_limit=8)
    await driver.start(lambda _: None)
    try:
        service = GenerationService("fake", router, tokenizer, clock, random.Random(7))
        yield House(driver, router, service)
    finally:
        await driver.stop()


def text_of(events: list[TurnEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TurnDelta))


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if holds():
            return
        await asyncio.to_thread(lambda: None)
    raise AssertionError("it never came")


async def test_a_refused_turn_leaves_its_sessions_history_as_it_was() -> None:
    async with house() as it:
        await it.run(TurnRequest(TextPrompt("abc"), session=S, max_tokens=3))
        before = it.router.history(S)
        for refused in (TextPrompt("x" * 600), TextPrompt("")):
            with pytest.raises((ContextTooLong, InvalidValue)):
                await it.run(TurnRequest(refused, session=S))
        assert before is not None
        assert it.router.history(S) == before


async def test_a_session_that_never_had_a_turn_is_not_known() -> None:
    async with house() as it:
        with pytest.raises(ContextTooLong):
            await it.run(TurnRequest(TextPrompt("x" * 600), session=S))
        assert not it.service.close_session(S)


async def test_a_turn_that_leaves_the_queue_leaves_no_history() -> None:
    async with house(step_s=0.001) as it:
        running = [it.service.generate(TurnRequest(TextPrompt(p))) for p in "ab"]
        for events in running:
            await anext(events)
        waiting = asyncio.create_task(it.run(TurnRequest(TextPrompt("c"), session=S)))
        await until(lambda: it.driver.status().waiting_jobs == 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        for events in running:
            await events.aclose()
        assert it.router.history(S) is None


class _Held(ByteTokenizer):
    """Reads a prompt only once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = threading.Event(), threading.Event()

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        self.asked.set()
        self.may.wait()
        return super().encode_prompt(text)


async def test_closing_a_session_takes_back_a_turn_that_is_still_being_read() -> None:
    async with house() as it:
        it.service._prepare._tokenizer = held = _Held()
        turn = asyncio.create_task(it.run(TurnRequest(TextPrompt("abc"), session=S)))
        await asyncio.to_thread(held.asked.wait)
        assert it.service.open_turns == 1
        assert it.service.close_session(S)
        with pytest.raises(Cancelled):
            await turn
        held.may.set()
        assert not it.service.close_session(S)
        assert it.service.open_turns == it.driver.status().running_jobs == 0


async def test_a_deadline_holds_while_the_prompt_is_read() -> None:
    async with house() as it:
        it.service._prepare._tokenizer = held = _Held()
        with pytest.raises(DeadlineExceeded):
            await it.run(TurnRequest(TextPrompt("abc"), timeout_s=0.02))
        held.may.set()


async def test_a_turns_history_is_there_before_its_end_is_told() -> None:
    async with house() as it:
        for stop in ((), (ByteTokenizer().decode(ENDLESS.oracle(tuple(b"abc"), 9)[5:8]),)):
            turn = TurnRequest(
                TextPrompt("abc"), session=S, sampling=GREEDY, max_tokens=9, stop=stop
            )
            async with aclosing(it.service.generate(turn)) as events:
                async for event in events:
                    known = it.router.history(S) is not None
                    assert known == isinstance(event, TurnFinished)
            it.service.close_session(S)


async def test_a_stop_string_tells_the_coordinators_own_times_and_drafts() -> None:
    async with house(step_s=0.001) as it:
        turn = TurnRequest(TextPrompt("abc" * 100), sampling=GREEDY, max_tokens=100)
        whole = await it.run(turn)
        stop = text_of(whole)[60:64]
        cut = (await it.run(replace(turn, reuse=False, stop=(stop,))))[-1]
    assert isinstance(cut, TurnFinished)
    assert cut.matched_stop == stop
    # Two stages need 1 ms each for the prompt.
    assert cut.timings.prefill_s >= 0.002 > cut.timings.queue_s
    assert cut.timings.decode_s > 0


async def test_whatever_is_turned_away_unread_is_told_of() -> None:
    """Not only turns: what counts tokens waits in the same line."""
    async with house() as it:
        told: list[Shed] = []
        it.service.intake.told = told.append
        it.service._workers._may_wait = 0
        for asked in (
            it.service.count_tokens(TextPrompt("abc")),
            it.service.tokenize(TextPrompt("abc")),
            it.service.detokenize((1, 2)),
            it.service.pin_prefix(TextPrompt("abc")),
            it.service.converted(10**6, str),
        ):
            with pytest.raises(QueueFull):
                await asked
        assert told == [Shed.READING] * 5


async def test_a_turn_that_is_being_read_when_the_server_ends_is_told_so() -> None:
    async with house() as it:
        it.service._prepare._tokenizer = held = _Held()
        turn = asyncio.create_task(it.run(TurnRequest(TextPrompt("abc"), session=S)))
        await asyncio.to_thread(held.asked.wait)
        async with asyncio.timeout(5):
            await it.service.drain(0.0)
            with pytest.raises(ServerEnded):
                await turn
        held.may.set()
        assert not it.service.open_turns
