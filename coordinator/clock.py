"""The clock port: monotonic seconds and timers. The core gets times in its events and never reads a
clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """`now` never goes back. `call_at` runs the callback on the event loop, not before `when`."""

    def now(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer: ...


async def slept(clock: Clock, seconds: float) -> None:
    """By that clock, which may be a virtual one."""
    if seconds:
        over = asyncio.Event()
        timer = clock.call_at(clock.now() + seconds, over.set)
        try:
            await over.wait()
        finally:
            timer.cancel()


class SystemClock:
    """Real time, from time.monotonic()."""

    def now(self) -> float:
        return time.monotonic()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(max(0.0, when - self.now()), callback)
