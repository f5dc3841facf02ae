"""What a full ring turns away, and when it says to come back. In virtual time, over rings whose frames take time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from coordinator.config import SchedulerSettings
from coordinator.costs import Costs
from coordinator.driver import RingDriver
from coordinator.errors import ContextTooLong, QueueFull, RingUnavailable, Shed
from coordinator.frames import Epoch
from coordinator.held import Holding
from coordinator.overload import Gate, Healing, clamped
from coordinator.requests import Request, SessionId
from coordinator.ring import ProgressSink, RingHealth, RingInfo
from coordinator.router import Router
from coordinator.streams import JobStream
from fakering.clock import VirtualClock
from fakering.faults import Fault, Lose
from fakering.model import FakeModel
from fakering.ring import FakeRing, describe
from fakering.texts import novel

STEP_S, ROW_S = 0.01, 0.002
ROWS = 4096


@asynccontextmanager
async def ringing(
    clock: VirtualClock,
    *faults: Fault,
    lanes: int = 2,
    kind: type[FakeRing] = FakeRing,
    **settings: int,
) -> AsyncIterator[RingDriver]:
    pace = {"clock": clock, "step_s": STEP_S, "row_s": ROW_S}
    ring = kind(2, lanes, ROWS, vocab_size=90, faults=faults, host_rows=20_000, **pace)
    driver = RingDriver("ring-0", ring, SchedulerSettings(**settings), clock)
    await driver.start(lambda progress: None)
    try:
        yield driver
    finally:
        await driver.stop()


def asked(number: int, tokens: int = 10, answer: int = 5) -> Request:
    return Request(novel(tokens, number, 90), max_new_tokens=answer)


async def read(stream: JobStream) -> None:
    async for _ in stream:
        pass


def refusal(submit: Callable[[], object]) -> QueueFull:
    with pytest.raises(QueueFull) as refused:
        submit()
    return refused.value


async def test_long_prompts_are_not_taken_to_wait_for_an_hour() -> None:
    """64 may wait, but not 64 of any length: what is to be computed for them is bounded."""
    clock = VirtualClock()
    async with ringing(clock, lanes=1, queue_tokens=7000) as driver:
        for number in range(4):  # one gets the lane
            driver.submit(asked(number, 2000))
        full = refusal(lambda: driver.submit(asked(9, 2000)))
        assert (full.reason, full.waiting) == (Shed.TOKENS, 6000)
        driver.submit(asked(9, 900))


async def test_one_job_may_wait_however_long_it_is() -> None:
    clock = VirtualClock()
    async with ringing(clock, lanes=1, queue_tokens=10) as driver:
        driver.submit(asked(1, 3000))
        driver.submit(asked(2, 3000))
        assert driver.status().waiting_jobs == 1
        assert refusal(lambda: driver.submit(asked(3, 2))).reason is Shed.TOKENS


async def test_tokens_that_are_held_need_no_room_in_the_queue() -> None:
    """A conversation's next turn is as short as what is new in it."""
    clock = VirtualClock()
    async with ringing(clock, lanes=2, queue_tokens=1000) as driver:
        first = Request(novel(3000, 1, 90), max_new_tokens=2, session=SessionId("a"))
        await clock.drive(read(driver.submit(first)))
        for number in range(2, 5):
            driver.submit(asked(number, 400, answer=100))
        refusal(lambda: driver.submit(asked(9, 3000)))
        longer = Request((*first.prompt, 1, 2, 3), max_new_tokens=2, session=SessionId("a"))
        assert await clock.drive(started(driver.submit(longer))) >= 3000


async def started(stream: JobStream) -> int:
    event = await anext(stream)
    return int(event.cached_prefix)  # type: ignore[union-attr]


async def test_what_can_never_fit_is_refused_as_that_however_full_the_queue_is() -> None:
    clock = VirtualClock()
    async with ringing(clock, lanes=1, queue_limit=1) as driver:
        driver.submit(asked(1))
        driver.submit(asked(2))
        refusal(lambda: driver.submit(asked(3)))
        with pytest.raises(ContextTooLong):
            driver.submit(asked(4, ROWS))


def unheld(request: Request, context: Sequence[int]) -> int:
    return len(context)


def test_as_much_may_wait_as_is_prefilled_in_two_minutes() -> None:
    info = describe("fake", FakeModel(90), 2, 4, ROWS)
    costs, settings = Costs(2), SchedulerSettings()
    gate = Gate(info, settings, costs, unheld)
    assert gate.most_tokens == 4 * 4 * ROWS, "before anything was measured"
    for _ in range(50):
        for rows in (1, 16, 256):
            costs.frames.observe(rows, 0.02 + rows * 0.001)
    rate = 256 / (0.02 + 256 * 0.001)
    assert gate.most_tokens == pytest.approx(120 * rate, rel=0.05)
    slow = Costs(2)
    slow.frames.observe(256, 1000.0)
    assert Gate(info, settings, slow, unheld).most_tokens == ROWS, "one prompt at least"
    assert Gate(info, SchedulerSettings(queue_tokens=5), slow, unheld).most_tokens == 5


async def warmed(clock: VirtualClock, driver: RingDriver) -> None:
    """Some turns by themselves: what frames cost is known."""
    for number in range(4):
        await clock.drive(read(driver.submit(asked(1000 + number, 300, answer=30))))
    await clock.run_until_idle()


async def test_those_who_are_turned_away_at_once_are_not_told_to_come_back_at_once() -> None:
    clock = VirtualClock()
    async with ringing(clock, queue_limit=2) as driver:
        await warmed(clock, driver)
        for number in range(4):
            driver.submit(asked(number, 400, answer=40))
        told = [
            refusal(lambda n=n: driver.submit(asked(n, 400, answer=40))).retry_after_s  # type: ignore[misc]
            for n in range(9, 29)
        ]
        assert told == sorted(told)
        assert told[-1] > 3 * told[0]
        # Who did not come is forgotten.
        late = clock.now() + told[-1] + 2
        await clock.run_until_idle()
        clock.advance_to(late)
        for number in range(40, 44):
            driver.submit(asked(number, 400, answer=40))
        again = refusal(lambda: driver.submit(asked(50, 400, answer=40)))
        assert again.retry_after_s <= told[2]


async def test_a_lane_whose_reader_lags_is_not_expected_to_come_free_soon() -> None:
    clock = VirtualClock()
    async with ringing(clock, lanes=1, queue_limit=1, unread_tokens=8) as driver:
        await warmed(clock, driver)
        driver.submit(asked(1, 20, answer=60))
        for _ in range(100):
            clock.advance(0.02)
            await clock.settle()
        assert driver.status().resting_jobs == 1
        driver.submit(asked(2))
        assert refusal(lambda: driver.submit(asked(3))).retry_after_s == 60.0


async def test_of_several_full_rings_the_one_that_has_room_first_is_told_of() -> None:
    clock = VirtualClock()
    async with ringing(clock, lanes=1, queue_limit=1) as one:
        async with ringing(clock, lanes=1, queue_limit=1) as two:
            two.name = "ring-1"
            for driver in (one, two):
                await warmed(clock, driver)
            one.submit(asked(1, 3000, answer=500))
            two.submit(asked(2, 30, answer=5))
            for driver in (one, two):
                driver.submit(asked(3, 30, answer=5))
            alone = refusal(lambda: one.submit(asked(4, 30)))
            both = refusal(lambda: Router((one, two), 10).submit(asked(4, 30)))
            assert both.retry_after_s < alone.retry_after_s


def test_a_healing_takes_as_long_as_the_last_one_or_half_as_long_again() -> None:
    healing = Healing()
    assert healing.left_s(3.0) == 0.0
    healing.look(10.0, heals=True)
    healing.look(11.0, heals=True)
    assert healing.left_s(11.0) == 4.0
    healing.look(30.0, heals=False)
    assert healing.left_s(31.0) == 0.0
    healing.look(100.0, heals=True)
    assert healing.left_s(105.0) == 15.0
    assert healing.left_s(130.0) == 15.0
    assert (clamped(0.2), clamped(20.0), clamped(900.0)) == (1.0, 20.0, 60.0)


@pytest.mark.parametrize(("spares", "back_s"), [(0, 40.0), (1, 5.0)])
async def test_a_first_healing_is_expected_to_take_as_long_as_the_loading_did(
    spares: int, back_s: float
) -> None:
    """But where a loaded process waits."""
    clock, gate = VirtualClock(), asyncio.Event()

    class Loads(FakeRing):
        async def start(self, progress: ProgressSink) -> RingInfo:
            await gate.wait()
            return await super().start(progress)

        def health(self) -> RingHealth:
            return replace(super().health(), spares=spares)

        async def open_epoch(self, epoch: Epoch) -> Holding:
            await asyncio.Event().wait()
            raise AssertionError

    kinds: Any = {"vocab_size": 90, "clock": clock, "faults": (Lose(stage=0, nth=2),)}
    driver = RingDriver("ring-0", Loads(1, 1, 64, **kinds), SchedulerSettings(), clock)
    router = Router((driver,), session_limit=1)
    assert router.back_s == 5.0
    starting = asyncio.create_task(driver.start(lambda progress: None))
    await asyncio.sleep(0)
    assert router.back_s == 5.0
    clock.advance(40.0)
    assert router.back_s == 20.0, "it takes longer, and nobody knows how long"
    gate.set()
    await starting
    driver.submit(asked(1, 8, answer=9))
    for _ in range(200):
        clock.advance(0.001)
        await clock.settle()
    assert driver.status().recovering
    assert back_s - 0.3 < router.back_s <= back_s
    await driver.stop()


async def test_while_a_ring_heals_turns_are_told_when_it_will_be_back() -> None:
    clock = VirtualClock()

    class Slow(FakeRing):
        async def open_epoch(self, epoch: Epoch) -> Holding:
            over = asyncio.Event()
            clock.call_at(clock.now() + 20.0, over.set)
            await over.wait()
            return await super().open_epoch(epoch)

    faults = Lose(stage=1, nth=3), Lose(stage=1, nth=90)
    async with ringing(clock, *faults, lanes=1, kind=Slow, queue_limit=1) as driver:
        told = []
        for number in range(2):
            running = driver.submit(asked(number, 20, answer=60))
            while not driver.status().recovering:
                clock.advance(0.01)
                await clock.settle()
            waiting = driver.submit(asked(9, answer=1))
            told.append(refusal(lambda: driver.submit(asked(10))).retry_after_s)
            await clock.drive(read(running))
            await clock.drive(read(waiting))
        assert 5.0 <= told[0] < 16.0, "nobody knows"
        assert 20.0 <= told[1] < 24.0, "as the last time"


async def test_a_ring_that_loads_or_that_was_given_up_says_so_in_its_time() -> None:
    clock = VirtualClock()
    ring = FakeRing(1, 1, 64, vocab_size=90, clock=clock)
    driver = RingDriver("ring-0", ring, SchedulerSettings(), clock)
    router = Router((driver,), session_limit=1)
    with pytest.raises(RingUnavailable) as loading:
        router.submit(asked(1))
    assert loading.value.retry_after_s == 5.0
    await driver.start(lambda progress: None)
    await driver.stop()
    with pytest.raises(RingUnavailable) as down:
        router.submit(asked(1))
    assert down.value.retry_after_s == 60.0
