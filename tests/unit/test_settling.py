"""What lies in idle lanes when a process is told to end is written back first, but for so long only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.frames import Frame
from coordinator.requests import Finished, Request, SessionId, Started
from coordinator.ring import Ring
from coordinator.router import Router
from fakering import texts
from fakering.clock import VirtualClock
from fakering.faults import Lose
from fakering.ring import FakeRing
from gateway import launch as launching
from gateway.progress import SilentBoard
from gateway.rings import RingSet
from gateway.settings import RingKind, ServeSettings
from tests.compat.http_client import until

LONG = tuple(1 + n * n % 80 for n in range(1500))  # three times what is written back at once


class Hung(FakeRing):
    """Serves turns, and never answers a frame that stores something."""

    def submit(self, frame: Frame) -> None:
        if not frame.after:
            super().submit(frame)


def fake_driver(
    clock: VirtualClock, *faults: Lose, kind: type[FakeRing] = FakeRing
) -> tuple[RingDriver, FakeRing]:
    ring = kind(2, 2, 2048, vocab_size=90, faults=faults, clock=clock, step_s=0.1, host_rows=8192)
    return RingDriver("ring-0", ring, SchedulerSettings(), clock), ring


async def played(driver: RingDriver, prompt: tuple[int, ...], tokens: int = 4) -> Started:
    """A whole turn."""
    started = None
    request = Request(prompt, max_new_tokens=tokens, session=SessionId("s"))
    async with driver.submit(request) as stream:
        async for event in stream:
            if isinstance(event, Started):
                started = event
            elif isinstance(event, Finished):
                break
    assert started is not None
    return started


async def test_it_returns_when_the_last_node_has_arrived_and_not_before() -> None:
    clock = VirtualClock()
    driver, _ = fake_driver(clock)
    await driver.start(lambda _: None)
    await clock.drive(played(driver, LONG))
    before, asked = driver.status().stored_rows, clock.now()
    assert before < len(LONG), "nothing is left to settle"
    await clock.drive(driver.settle(within_s=100.0))
    assert driver.status().stored_rows >= len(LONG)
    assert driver.status().frames_in_flight == 0
    assert 0 < clock.now() - asked < 10
    asked = clock.now()
    await clock.drive(driver.settle(within_s=100.0))
    assert clock.now() == asked, "there was nothing to wait for"
    await driver.stop()


async def test_a_ring_that_hangs_is_not_waited_for_beyond_the_time() -> None:
    clock = VirtualClock()
    driver, ring = fake_driver(clock, kind=Hung)
    await driver.start(lambda _: None)
    await clock.drive(played(driver, LONG))
    asked = clock.now()
    await clock.drive(driver.settle(within_s=3.0))
    assert clock.now() - asked == pytest.approx(3.0)
    assert driver.status().stored_rows < len(LONG)
    await driver.stop()
    assert not ring.health().ready


async def test_a_loss_meanwhile_is_healed_and_a_ring_that_is_down_is_left() -> None:
    clock = VirtualClock()
    driver, _ = fake_driver(clock, Lose(stage=0, nth=14))
    await driver.start(lambda _: None)
    await clock.drive(played(driver, LONG))
    await clock.drive(driver.settle(within_s=100.0))
    assert (driver.status().epoch, clock.now() < 60) == (1, True)
    await driver.stop()
    asked = clock.now()
    await clock.drive(driver.settle(within_s=100.0))
    assert clock.now() == asked


def ring_set(make: Callable[[str], Ring], settle_s: float) -> tuple[RingSet, Router]:
    router, clock = Router((), session_limit=8), SystemClock()

    def driver(name: str) -> RingDriver:
        return RingDriver(name, make(name), SchedulerSettings(), clock)

    return RingSet(router, driver, lambda _: lambda _: None, lambda: None, settle_s), router


async def test_a_second_signal_stops_the_rings_at_once() -> None:
    ring = Hung(2, 2, 2048, vocab_size=90, host_rows=8192)
    rings, router = ring_set(lambda _: ring, settle_s=1000.0)
    rings.announce(1)
    await rings.start()
    await played(next(iter(router._drivers.values())), LONG)
    stopping = asyncio.create_task(rings.stop())
    await asyncio.wait([stopping], timeout=0.2)
    assert not stopping.done(), "it settles"
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(5):
            await stopping
    assert ring.health().reason == "stopped"


async def test_a_second_signal_while_turns_still_run_leaves_no_time_for_rows_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launching, "_settle_s", lambda _: 1000.0)
    ring = Hung(2, 2, 2048, vocab_size=90, host_rows=8192)
    settings = ServeSettings("fake", RingKind.FAKE)

    async def interrupted() -> None:
        async with launching.launch(settings, SilentBoard(), lambda *_: ring) as running:
            await played(next(iter(running.router._drivers.values())), LONG)
            raise asyncio.CancelledError

    ending = asyncio.create_task(interrupted())
    await asyncio.wait([ending], timeout=10)
    assert ending.cancelled()
    assert ring.health().reason == "stopped"


class SlowToStop(FakeRing):
    """Goes on stopping whoever is cancelled, as rings of processes do."""

    async def stop(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await super().stop()


async def test_a_second_signal_while_one_ring_stops_ends_the_others_too() -> None:
    made: list[FakeRing] = []

    def make(_: str) -> Ring:
        made.append(SlowToStop(2, 2, 2048, vocab_size=90))
        return made[-1]

    rings, _ = ring_set(make, settle_s=0.0)
    rings.announce(3)
    await rings.start()
    stopping = asyncio.create_task(rings.stop())
    await asyncio.wait([stopping], timeout=0.1)
    stopping.cancel()
    await asyncio.wait([stopping], timeout=5)
    assert [ring.health().reason for ring in made] == ["stopped"] * 3


async def test_a_drained_ring_settles_too_and_a_stop_meanwhile_waits_for_it() -> None:
    ring = Hung(2, 2, 2048, vocab_size=90, host_rows=8192)
    rings, router = ring_set(lambda _: ring, settle_s=0.5)
    rings.announce(1)
    await rings.start()
    await played(next(iter(router._drivers.values())), LONG)
    rings.drain("ring-0")
    await until(lambda: next(iter(router.rings())).draining)
    await rings.stop()
    assert (router.rings(), ring.health().reason) == ((), "stopped")


@pytest.fixture
def local_rings(tiny_model: Path, tmp_path: Path) -> Callable[[], tuple[RingSet, Router]]:
    """One process's rings of threads, with a folder that outlives them."""
    from stage.config import RingConfig
    from stage.local_ring import LocalRing

    config = RingConfig(tiny_model, "tiny", ((0, 2), (2, 4)), 2, 512, kv_disk=tmp_path)
    return lambda: ring_set(lambda _: LocalRing(config), settle_s=20.0)


@asynccontextmanager
async def process(rings: RingSet, router: Router) -> AsyncIterator[RingDriver]:
    rings.announce(1)
    try:
        await rings.start()
        yield next(iter(router._drivers.values()))
    finally:
        await rings.stop()


async def test_what_was_in_a_lane_when_the_process_ended_is_there_in_the_next_one(
    local_rings: Callable[[], tuple[RingSet, Router]],
) -> None:
    prompt = texts.novel(300, 1, 199)
    async with process(*local_rings()) as driver:
        assert (await played(driver, prompt)).cached_prefix == 0
    async with process(*local_rings()) as driver:
        again = await played(driver, (*prompt, 5, 6, 7))
    assert again.cached_prefix >= len(prompt)
