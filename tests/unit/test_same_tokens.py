"""Same seed, same tokens: whatever was cached, with or without drafts, on any number of stages."""

from __future__ import annotations

import asyncio
from pathlib import Path

from coordinator.driver import RingDriver
from coordinator.requests import Request, SamplingSpec, SessionId
from tests.unit.real_ring import answered, smollm2_ring

_SAMPLING = SamplingSpec(
    temperature=0.8, top_p=0.95, seed=20, presence_penalty=0.5, repetition_penalty=1.1
)
# A period of 24, so that the drafter has something to say.
_PROMPT = tuple(100 + 37 * (n % 24) for n in range(160))
_NEXT = (*_PROMPT, *range(900, 940))


def _turn(prompt: tuple[int, ...], session: str | None = None, *, draft: bool = True) -> Request:
    owner = None if session is None else SessionId(session)
    return Request(prompt, _SAMPLING, max_new_tokens=20, session=owner, draft=draft)


async def _answers(driver: RingDriver) -> set[tuple[int, ...]]:
    """The next turn's tokens: cold, plain, warm in place, warm from another lane, and beside others."""
    cold, first = await answered(driver, _turn(_NEXT))
    assert first.usage.cached_prefix == 0
    plain, undrafted = await answered(driver, _turn(_NEXT, draft=False))
    assert undrafted.timings.drafted == 0
    await answered(driver, _turn(_PROMPT, "a"))
    warm, reused = await answered(driver, _turn(_NEXT, "a"))
    assert reused.usage.cached_prefix >= len(_PROMPT)
    together = await asyncio.gather(
        *(answered(driver, _turn(_NEXT, name)) for name in ("b", "c", "a"))
    )
    return {cold, plain, warm, *(tokens for tokens, _ in together)}


async def test_tokens_depend_on_the_request_alone(smollm2_dir: Path) -> None:
    seen: set[tuple[int, ...]] = set()
    for ends in ((30,), (15, 30), (7, 20, 30)):
        async with smollm2_ring(smollm2_dir, *ends, lanes=3) as driver:
            seen |= await _answers(driver)
    assert len(seen) == 1
    assert len(set(next(iter(seen)))) > 5


async def test_another_seed_gives_other_tokens(smollm2_dir: Path) -> None:
    """Shows that the test above could fail."""
    other = SamplingSpec(temperature=0.8, top_p=0.95, seed=21)
    async with smollm2_ring(smollm2_dir, 15, 30, lanes=3) as driver:
        first, _ = await answered(driver, _turn(_PROMPT))
        second, _ = await answered(driver, Request(_PROMPT, other, max_new_tokens=20))
    assert first != second
