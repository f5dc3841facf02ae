"""Whose a request is reaches all that chooses by what is there: the router's ring and the draft model's rows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest_asyncio

from coordinator.config import SchedulerSettings
from coordinator.drafters import Drafter
from coordinator.drafters.none import NoDrafter
from coordinator.driver import RingDriver
from coordinator.frames import JobId
from coordinator.requests import Request, Started
from coordinator.router import Router
from coordinator.streams import JobStream
from fakering.clock import VirtualClock
from fakering.ring import FakeRing

_PROMPT = tuple(range(1, 60))


class _Rings:
    """Two rings behind a router, and for whom drafters were made."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.drafted_for: list[str] = []
        settings = SchedulerSettings()
        self.drivers = [
            RingDriver(
                f"ring-{n}",
                FakeRing(2, 3, 256, vocab_size=90, clock=self.clock),
                settings,
                self.clock,
                self._drafter,
            )
            for n in range(2)
        ]
        self.router = Router(self.drivers, session_limit=10)

    def _drafter(self, job: JobId, wake: Callable[[], object], tenant: str) -> Drafter:
        self.drafted_for.append(tenant)
        return NoDrafter()

    async def asked(self, submit: Callable[[Request], JobStream], tenant: str) -> Started:
        return await self.clock.drive(
            self._asked(submit(Request(_PROMPT, max_new_tokens=2, tenant=tenant)))
        )

    async def _asked(self, stream: JobStream) -> Started:
        async with stream:
            started = [event async for event in stream if isinstance(event, Started)]
        return started[0]


@pytest_asyncio.fixture
async def rings() -> AsyncIterator[_Rings]:
    rings = _Rings()
    for driver in rings.drivers:
        await driver.start(lambda progress: None)
    yield rings
    for driver in rings.drivers:
        await driver.stop()


async def test_a_ring_is_chosen_for_what_it_holds_of_the_callers_own(rings: _Rings) -> None:
    await rings.asked(rings.drivers[1].submit, "a")
    others = await rings.asked(rings.router.submit, "b")
    assert (others.ring, others.cached_prefix) == ("ring-0", 0), "where a stranger's would go"
    own = await rings.asked(rings.router.submit, "a")
    assert own.ring == "ring-1"
    assert own.cached_prefix >= len(_PROMPT) - 1


async def test_a_drafter_is_told_whose_job_it_drafts_for(rings: _Rings) -> None:
    for tenant in ("a", "", "b"):
        await rings.asked(rings.router.submit, tenant)
    assert rings.drafted_for == ["a", "", "b"]
