"""Ten thousand frames through a real ring leave memory, threads and tasks as they were."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import psutil
import pytest

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.requests import Request, SessionId
from stage.config import RingConfig
from stage.local_ring import LocalRing

# Until all sessions are known and the allocators' pools have their size: flat from about 5,000 frames on.
_WARM_UP = 6_000
_FRAMES = 10_000
# Allocators give memory back in lumps; a leak of 1 kB a frame would be 10 MB.
_SLACK_BYTES = 6_000_000


async def _round(driver: RingDriver, number: int) -> None:
    """Three conversations at once, one of them cancelled half-way."""
    prompts = [tuple(range(1 + lane, 40 + (number + lane) % 20)) for lane in range(3)]

    async def play(lane: int) -> None:
        request = Request(
            prompts[lane], max_new_tokens=60, session=SessionId(f"{lane}-{number % 50}")
        )
        async with driver.submit(request) as stream:
            async for _ in stream:
                if lane == 2 and driver.status().counts.frames % 7 == 0:
                    return

    await asyncio.gather(*(play(lane) for lane in range(3)))


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_ten_thousand_frames_leave_nothing_behind(tiny_model: Path) -> None:
    ring = LocalRing(
        RingConfig(tiny_model, "tiny", ((0, 2), (2, 4)), lanes=3, max_rows=256, kv_host_bytes=2**21)
    )
    driver = RingDriver("ring-0", ring, SchedulerSettings(), SystemClock())
    await driver.start(lambda progress: None)
    try:
        number = 0
        while driver.status().counts.frames < _WARM_UP:
            await _round(driver, number)
            number += 1
        process = psutil.Process(os.getpid())
        memory, tasks, threads = (
            process.memory_info().rss,
            len(asyncio.all_tasks()),
            threading.active_count(),
        )
        while driver.status().counts.frames < _WARM_UP + _FRAMES:
            await _round(driver, number)
            number += 1
        status = driver.status()
        assert process.memory_info().rss - memory < _SLACK_BYTES
        assert len(asyncio.all_tasks()) == tasks
        assert threading.active_count() <= threads
        assert (status.busy_lanes, status.running_jobs, status.waiting_jobs) == (0, 0, 0)
    finally:
        await driver.stop()
