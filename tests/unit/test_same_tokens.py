"""Same seed, same tokens: whatever was cached, with or without drafts, on any number of stages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.requests import Finished, Request, SamplingSpec, SessionId, TokenDelta
from stage.config import RingConfig
from stage.local_ring import LocalRing

_SAMPLING = SamplingSpec(
    temperature=0.8, top_p=0.95, seed=20, presence_penalty=0.5, repetition_penalty=1.1
)
# A period of 24, so that the drafter has something to say.
_PROMPT = tuple(100 + 37 * (n % 24) for n in range(160))
_NEXT = (*_PROMPT, *range(900, 940))


@asynccontextmanager
async def _ring(folder: Path, *ends: int) -> AsyncIterator[RingDriver]:
    splits = tuple(zip((0, *ends), ends, strict=False))
    ring = LocalRing(RingConfig(folder, "smollm2", splits, lanes=3, max_rows=512))
    driver = RingDriver("ring", ring, SchedulerSettings(), SystemClock())
    await driver.start(lambda progress: None)
    try:
        yield driver
    finally:
        await driver.stop()


async def _answer(driver: RingDriver, request: Request) -> tuple[tuple[int, ...], Finished]:
    tokens: list[int] = []
    async with driver.submit(request) as stream:
        async for event in stream:
            if isinstance(event, TokenDelta):
                tokens.extend(event.tokens)
            elif isinstance(event, Finished):
                return tuple(tokens), event
    raise AssertionError("the stream ended without a word")


def _turn(prompt: tuple[int, ...], session: str | None = None, *, draft: bool = True) -> Request:
    owner = None if session is None else SessionId(session)
    return Request(prompt, _SAMPLING, max_new_tokens=20, session=owner, draft=draft)


async def _answers(driver: RingDriver) -> set[tuple[int, ...]]:
    """The next turn's tokens: cold, plain, warm in place, warm from another lane, and beside others."""
    cold, first = await _answer(driver, _turn(_NEXT))
    assert first.usage.cached_prefix == 0
    plain, undrafted = await _answer(driver, _turn(_NEXT, draft=False))
    assert undrafted.timings.drafted == 0
    await _answer(driver, _turn(_PROMPT, "a"))
    warm, reused = await _answer(driver, _turn(_NEXT, "a"))
    assert reused.usage.cached_prefix >= len(_PROMPT)
    together = await asyncio.gather(
        *(_answer(driver, _turn(_NEXT, name)) for name in ("b", "c", "a"))
    )
    return {cold, plain, warm, *(tokens for tokens, _ in together)}


async def test_tokens_depend_on_the_request_alone(smollm2_dir: Path) -> None:
    seen: set[tuple[int, ...]] = set()
    for ends in ((30,), (15, 30), (7, 20, 30)):
        async with _ring(smollm2_dir, *ends) as driver:
            seen |= await _answers(driver)
    assert len(seen) == 1
    assert len(set(next(iter(seen)))) > 5


async def test_another_seed_gives_other_tokens(smollm2_dir: Path) -> None:
    """Shows that the test above could fail."""
    other = SamplingSpec(temperature=0.8, top_p=0.95, seed=21)
    async with _ring(smollm2_dir, 15, 30) as driver:
        first, _ = await _answer(driver, _turn(_PROMPT))
        second, _ = await _answer(driver, Request(_PROMPT, other, max_new_tokens=20))
    assert first != second
