"""The driver's own coroutines, cancelled at their every await: a start leaves nothing, a stop is finished by the next.

In virtual time, on a ring that awaits wherever the port lets it, whatever the ring is at: prefilling, decoding,
storing, loading, opening an epoch, or dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.errors import RingUnavailable, StageLost
from coordinator.requests import Request, TokenDelta
from fakering.cancelling import Cut, When, is_cut
from fakering.clock import VirtualClock
from fakering.faults import Drop, FaultScript, Lose
from fakering.model import FakeModel
from fakering.texts import novel
from fakering.watched import WatchedRing

LANES = 2
MODEL = FakeModel(vocab_size=50, seed=4)
SETTINGS = SchedulerSettings(
    frame_rows=16, chunk_rows=8, min_copy_rows=3, node_rows=4, reply_timeout_s=2.0
)
# Turns of the loop in which all that a frame's arrival sets off has happened.
TURNS = 10


class Site:
    """A ring, its clock, and turns over it."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        shape = {"language": MODEL, "host_rows": 40, "step_s": 0.01, "row_s": 0.001}
        self.ring = WatchedRing(3, LANES, 64, clock=self.clock, **shape)
        self.driver = RingDriver("ring", self.ring, SETTINGS, self.clock)
        self.before = asyncio.all_tasks()

    async def start(self) -> None:
        await self.driver.start(lambda progress: None)

    async def turn(self, number: int) -> tuple[int, ...]:
        """Whatever came until it ended, or its ring."""
        prompt = (*novel(12, 1, 50), *novel(9, 2 + number, 50))
        tokens: list[int] = []
        try:
            async for event in self.driver.submit(Request(prompt, max_new_tokens=5)):
                tokens += event.tokens if isinstance(event, TokenDelta) else ()
        except StageLost:
            assert not self.driver.status().ready
        assert tuple(tokens) == MODEL.oracle(prompt, 5)[: len(tokens)]
        return tuple(tokens)

    async def step(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        due = self.clock.next_due()
        if due is not None:
            self.clock.advance_to(due)

    def check_nothing_is_left(self) -> None:
        assert asyncio.all_tasks() == self.before
        assert self.driver.idle
        assert self.clock.next_due() is None, "a timer is left"
        with pytest.raises(RingUnavailable):
            self.driver.submit(Request((1, 2)))


def points_of(play: Callable[[Cut], Awaitable[bool]]) -> int:
    """Cuts at one point after the other until there is none; returns how many there were."""

    async def all_of(when: When) -> int:
        at = 1
        while await play(Cut(at, when)):
            at += 1
        return at - 1

    return sum(asyncio.run(all_of(when)) for when in When)


async def cut_start(cut: Cut) -> bool:
    site = Site()
    was_cut = await is_cut(site.start(), cut)
    if was_cut:
        site.check_nothing_is_left()
    else:
        await site.driver.stop()
    site.driver = RingDriver("ring", site.ring, SETTINGS, site.clock)
    await site.start()
    assert len(await site.clock.drive(site.turn(0))) == 5
    await site.driver.stop()
    site.check_nothing_is_left()
    return was_cut


def test_a_start_cut_at_any_point_leaves_nothing_and_the_next_one_serves() -> None:
    assert points_of(cut_start) >= 4


async def cut_stop(cut: Cut, after: int, faults: FaultScript) -> bool:
    """Stops when so much has happened to more turns than there are lanes."""
    site = Site()
    await site.start()
    await site.clock.drive(site.turn(0))
    site.ring.suffer(faults)
    turns = [asyncio.create_task(site.turn(number)) for number in range(LANES + 1)]
    for _ in range(after):
        await site.step()
    was_cut = await is_cut(site.driver.stop(), cut)
    await site.driver.stop()
    await asyncio.wait_for(asyncio.gather(*turns), timeout=10)
    site.check_nothing_is_left()
    return was_cut


@pytest.mark.parametrize(
    "faults", [(), (Drop(1, 4),), (Lose(1, 4),)], ids=["well", "mended", "dead"]
)
def test_a_stop_cut_at_any_point_is_finished_by_the_next(faults: FaultScript) -> None:
    for after in range(0, 60, 4):
        assert points_of(lambda cut, after=after: cut_stop(cut, after, faults)) >= 4
