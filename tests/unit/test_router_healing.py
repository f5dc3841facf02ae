"""Where a job goes while a ring heals: to one that is ready, or to wait for the ring, and never away unserved."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.errors import QueueFull, RingLost, RingUnavailable
from coordinator.requests import Finished, Request, SessionId, Started, TokenDelta
from coordinator.router import Router
from coordinator.streams import JobStream
from fakering.clock import VirtualClock
from fakering.faults import Lose
from tests.compat.healing import HeldUp

PROMPT = tuple(range(1, 30))
OURS, THEIRS = SessionId("ours"), SessionId("theirs")
LOSS = Lose(stage=0, nth=6)


@asynccontextmanager
async def house(clock: VirtualClock, **kinds: tuple[Lose, ...]) -> AsyncIterator[House]:
    """Rings of one lane each, by name, with what befalls them."""
    rings = {
        name: HeldUp(2, 1, 128, vocab_size=90, faults=faults, clock=clock, step_s=0.1)
        for name, faults in kinds.items()
    }
    settings = SchedulerSettings(queue_limit=2)
    drivers = [RingDriver(name, ring, settings, clock) for name, ring in rings.items()]
    async with AsyncExitStack() as stack:
        for driver in drivers:
            await driver.start(lambda progress: None)
            stack.push_async_callback(driver.stop)
        yield House(clock, Router(drivers, session_limit=10), rings)


class House:
    def __init__(self, clock: VirtualClock, router: Router, rings: dict[str, HeldUp]) -> None:
        self.clock = clock
        self.router = router
        self.rings = rings

    def ask(self, session: SessionId | None = OURS, tokens: int = 2, *more: int) -> JobStream:
        return self.router.submit(
            Request((*PROMPT, *more), max_new_tokens=tokens, session=session, draft=False)
        )

    async def started(self, stream: JobStream) -> str:
        async for event in stream:
            if isinstance(event, Started):
                return event.ring
        raise AssertionError("it never began")

    async def where(self, stream: JobStream) -> str:
        """The ring that serves it. Waits for the turn's beginning."""
        return await self.clock.drive(self.started(stream))

    async def lose_own(self, *busy: SessionId) -> JobStream:
        """Our session's turn, on ring `a`, which loses a stage in the middle of it. `busy`: others begin before."""
        stream = self.ask(OURS, 40)
        assert await self.where(stream) == "a"
        for session in busy:
            self.ask(session, 60, 50)
        await self.clock.drive(self.rings["a"].heals.wait())
        status = self.status("a")
        assert (status.ready, status.recovering) == (False, True)
        return stream

    def status(self, name: str):  # type: ignore[no-untyped-def]
        return next(each for each in self.router.rings() if each.name == name)

    async def end(self, stream: JobStream) -> Finished:
        async def read() -> Finished:
            async for event in stream:
                if isinstance(event, Finished):
                    return event
            raise AssertionError("it never ended")

        return await self.clock.drive(read())


async def test_with_one_ring_a_turn_waits_for_it() -> None:
    clock = VirtualClock()
    async with house(clock, a=(LOSS,)) as it:
        running = await it.lose_own()
        waiting = it.ask(THEIRS)
        assert it.status("a").waiting_jobs == 2
        it.rings["a"].may_heal.set()
        assert await it.where(waiting) == "a"
        assert (await it.end(running)).usage.generated_tokens == 40


async def test_a_session_goes_where_there_is_a_lane_and_says_that_it_moved() -> None:
    clock = VirtualClock()
    async with house(clock, a=(LOSS,), b=()) as it:
        running = await it.lose_own()
        moved = it.ask(OURS, 2, 40)
        assert await it.where(moved) == "b"
        assert it.status("a").waiting_jobs == 1
        it.rings["a"].may_heal.set()
        assert (await it.end(running)).usage.generated_tokens == 40


async def test_a_session_waits_for_its_own_ring_where_the_others_have_no_lane() -> None:
    clock = VirtualClock()
    async with house(clock, a=(LOSS,), b=()) as it:
        running = await it.lose_own(THEIRS)
        assert it.status("b").running_jobs == 1
        waiting = it.ask(OURS, 2, 40)
        assert (it.status("a").waiting_jobs, it.status("b").waiting_jobs) == (2, 0)
        it.rings["a"].may_heal.set()
        assert await it.where(waiting) == "a"
        await it.end(running)


async def test_others_go_to_a_ready_ring_even_if_they_have_to_wait_there() -> None:
    clock = VirtualClock()
    async with house(clock, a=(LOSS,), b=()) as it:
        await it.lose_own()
        for number in range(3):
            it.ask(None, 60, 60 + number)
        assert it.status("b").running_jobs + it.status("b").waiting_jobs == 3
        # Its queue is full: better to wait for the one that heals than to be refused.
        it.ask(None, 60, 70)
        assert it.status("a").waiting_jobs == 2
        with pytest.raises(QueueFull):
            [it.ask(None, 60, 80 + number) for number in range(4)]
        assert it.status("a").waiting_jobs > 2


async def test_a_ring_that_drains_while_it_heals_takes_nothing() -> None:
    clock = VirtualClock()
    async with house(clock, a=(LOSS,)) as it:
        running = await it.lose_own()
        it.router.drain("a")
        with pytest.raises(RingUnavailable, match="recovering"):
            it.ask(THEIRS)
        it.rings["a"].may_heal.set()
        assert (await it.end(running)).usage.generated_tokens == 40


async def test_a_turn_that_comes_before_the_loss_is_noticed_waits_like_the_others() -> None:
    """The ring knows it, its driver hears of it an instant later: in between nobody may be refused."""
    clock = VirtualClock()
    async with house(clock, a=()) as it:
        it.rings["a"]._go_down(RingLost(1, "died"))
        waiting = it.ask(THEIRS)
        assert not it.rings["a"].heals.is_set()
        it.rings["a"].may_heal.set()
        assert await it.where(waiting) == "a"


@pytest.mark.parametrize("nth", [0, 6])
async def test_a_reader_who_comes_late_is_told_of_no_recovery_that_is_over(nth: int) -> None:
    clock = VirtualClock()
    async with house(clock, a=(Lose(stage=1, nth=nth),)) as it:
        it.rings["a"].may_heal.set()
        stream = it.ask(OURS, 20)
        await clock.run_until_idle()
        kinds = [type(event) async for event in stream]
        assert it.status("a").epoch == 1
    assert kinds == [Started, TokenDelta, Finished]
