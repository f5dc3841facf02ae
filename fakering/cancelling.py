"""Cancels a coroutine at a point of one's choice, so that a test can visit every point.

Decides only when the task that runs a coroutine is cancelled; the event loop does it, as it would for any other
reason. A point is a suspension: an await at which the loop really gets the turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from coordinator.errors import BrokenInvariant

# Real seconds: work in virtual time takes none to speak of.
_PATIENCE_S = 10.0


class When(Enum):
    AT_ONCE = "as it begins to wait"
    WITH_THE_NEWS = "when what it waits for has come, and before it goes on"


@dataclass(frozen=True, slots=True)
class Cut:
    """`at`: the how manieth suspension, counted from 1."""

    at: int
    when: When


class Steps:
    """Awaits a coroutine, and counts its suspensions on the way to the cut and behind it."""

    def __init__(self, work: Coroutine[Any, Any, None], cut: Cut) -> None:
        self._work = work
        self._cut = cut
        self.count = 0

    async def run(self) -> None:
        await self

    def __await__(self) -> Generator[Any, None, None]:
        thrown: asyncio.CancelledError | None = None
        while True:
            try:
                waits_for = self._work.throw(thrown) if thrown else self._work.send(None)
            except StopIteration:
                return
            self.count += 1
            if self.count == self._cut.at:
                self._cancel(waits_for)
            thrown = None
            try:
                yield waits_for
            except asyncio.CancelledError as error:
                thrown = error

    def _cancel(self, waits_for: asyncio.Future[Any] | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._cut.when is When.AT_ONCE or waits_for is None:
            task.cancel()
            return
        # The task's own wake-up is called behind this one: the cancellation finds it about to go on.
        waits_for.add_done_callback(lambda _: task.cancel())


async def is_cut(work: Coroutine[Any, Any, None], cut: Cut) -> bool:
    """Runs the work; False when it ended before the cut. Raises what it raises, or BrokenInvariant if it never ends."""
    task = asyncio.create_task(Steps(work, cut).run())
    await asyncio.wait([task], timeout=_PATIENCE_S)
    if not task.done():
        raise BrokenInvariant(f"{work} goes on for ever")
    if task.cancelled():
        return True
    await task
    return False
