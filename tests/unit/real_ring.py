"""SmolLM2 on a ring of threads, and one turn's answer of it. For tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.requests import Finished, Request, TokenDelta
from stage.config import RingConfig
from stage.local_ring import LocalRing


@asynccontextmanager
async def smollm2_ring(folder: Path, *ends: int, lanes: int) -> AsyncIterator[RingDriver]:
    """`ends`: the layers at which its stages end."""
    splits = tuple(zip((0, *ends), ends, strict=False))
    ring = LocalRing(RingConfig(folder, "smollm2", splits, lanes=lanes, max_rows=512))
    driver = RingDriver("ring", ring, SchedulerSettings(), SystemClock())
    await driver.start(lambda progress: None)
    try:
        yield driver
    finally:
        await driver.stop()


async def answered(driver: RingDriver, request: Request) -> tuple[tuple[int, ...], Finished]:
    tokens: list[int] = []
    async with driver.submit(request) as stream:
        async for event in stream:
            if isinstance(event, TokenDelta):
                tokens.extend(event.tokens)
            elif isinstance(event, Finished):
                return tuple(tokens), event
    raise AssertionError("the stream ended without a word")
