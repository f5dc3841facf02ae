"""A clock that stands still until a test moves it.

It decides when callbacks run: never by themselves, always in the order of their times. `drive` and
`run_until_idle` jump to the next timer whenever every task waits, so that no test sleeps.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from coordinator.errors import BrokenInvariant

T = TypeVar("T")

# Turns of the event loop after which every task is taken to be waiting for time to pass. A hand-over between
# two tasks takes one or two turns; the longest chain here has about ten.
SETTLE_TURNS = 50


@dataclass(slots=True, order=True)
class VirtualTimer:
    when: float
    order: int
    callback: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """coordinator.clock.Clock in virtual seconds."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._timers: list[VirtualTimer] = []
        self._order = 0

    def now(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], None]) -> VirtualTimer:
        self._order += 1
        timer = VirtualTimer(when, self._order, callback)
        heapq.heappush(self._timers, timer)
        return timer

    def next_due(self) -> float | None:
        """When the next timer runs; None: there is none."""
        while self._timers and self._timers[0].callback is None:
            heapq.heappop(self._timers)
        return self._timers[0].when if self._timers else None

    def advance_to(self, when: float) -> None:
        """Runs the timers that are due by then, each at its own time."""
        due = self.next_due()
        while due is not None and due <= when:
            timer = heapq.heappop(self._timers)
            self._now = max(self._now, timer.when)
            if timer.callback is not None:
                timer.callback()
            due = self.next_due()
        self._now = max(self._now, when)

    def advance(self, seconds: float) -> None:
        self.advance_to(self._now + seconds)

    async def settle(self) -> None:
        """Lets all tasks run until they wait."""
        for _ in range(SETTLE_TURNS):
            await asyncio.sleep(0)

    async def run_until_idle(self) -> None:
        """Jumps from timer to timer until none is left."""
        await self.settle()
        while (due := self.next_due()) is not None:
            self.advance_to(due)
            await self.settle()

    async def drive(self, work: Awaitable[T]) -> T:
        """Awaits `work`, jumping to the next timer whenever everything waits.

        Raises BrokenInvariant when everything waits and no timer is set; `work` is then cancelled.
        """
        task = asyncio.ensure_future(work)
        try:
            await self.settle()
            while not task.done():
                due = self.next_due()
                if due is None:
                    raise BrokenInvariant("every task waits, and no timer will ever run")
                self.advance_to(due)
                await self.settle()
            return await task
        finally:
            task.cancel()
