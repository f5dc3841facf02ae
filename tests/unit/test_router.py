"""Where a job goes when rings come, go, fill up or fail."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.errors import InvalidSetting, QueueFull, RingLost, RingUnavailable, StageLost
from coordinator.frames import Epoch
from coordinator.held import Holding
from coordinator.requests import Miss, MissKind, Request, SessionId, Started
from coordinator.router import Router
from coordinator.streams import JobStream
from fakering.clock import VirtualClock
from fakering.faults import Fault, Lose
from fakering.ring import FakeRing

_PROMPT = tuple(range(1, 30))
_SESSION = SessionId("s")


async def _start(
    clock: VirtualClock,
    name: str,
    *faults: Fault,
    queue_limit: int = 1,
    kind: type[FakeRing] = FakeRing,
) -> RingDriver:
    ring = kind(2, 1, 128, vocab_size=90, faults=faults, clock=clock, step_s=0.1)
    driver = RingDriver(name, ring, SchedulerSettings(queue_limit=queue_limit), clock)
    await driver.start(lambda progress: None)
    return driver


@asynccontextmanager
async def _router(clock: VirtualClock, *drivers: RingDriver) -> AsyncIterator[Router]:
    async with AsyncExitStack() as stack:
        for driver in drivers:
            stack.push_async_callback(driver.stop)
        yield Router(drivers, session_limit=10)


async def _where(clock: VirtualClock, stream: JobStream) -> str:
    return (await _started(clock, stream)).ring


async def _started(clock: VirtualClock, stream: JobStream) -> Started:
    started = await clock.drive(anext(stream))
    assert isinstance(started, Started)
    return started


async def _turn(clock: VirtualClock, router: Router, *more: int) -> str:
    request = Request((*_PROMPT, *more), max_new_tokens=2, session=_SESSION)
    stream = router.submit(request)
    ring = await _where(clock, stream)
    await clock.run_until_idle()
    return ring


async def test_a_session_leaves_a_draining_ring_and_its_running_job_does_not() -> None:
    clock = VirtualClock()
    async with _router(clock, await _start(clock, "a"), await _start(clock, "b")) as router:
        first = await _turn(clock, router)
        running = router.submit(Request(_PROMPT, max_new_tokens=20, session=_SESSION))
        assert await _where(clock, running) == first
        assert router.drain(first)
        assert not router.drain("nobody")
        assert await _turn(clock, router, 40) != first
        assert [event async for event in running]
        removed = router.remove(first)
        assert removed is not None
        assert removed.idle
        await removed.stop()
        assert len(router.rings()) == 1


async def test_a_session_leaves_a_lost_ring() -> None:
    clock = VirtualClock()

    class Unhealable(FakeRing):
        async def open_epoch(self, epoch: Epoch) -> Holding:
            raise RingLost(0, "no room for it")

    lost = await _start(clock, "a", Lose(stage=0, nth=6), kind=Unhealable)
    drivers = lost, await _start(clock, "b")
    async with _router(clock, *drivers) as router:
        assert await _turn(clock, router) == "a"
        with pytest.raises(StageLost):
            await clock.drive(_drain(router.submit(Request(_PROMPT, session=_SESSION))))
        moved = router.submit(Request((*_PROMPT, 40), max_new_tokens=2, session=_SESSION))
        started = await _started(clock, moved)
        assert started.ring == "b"
        assert started.miss == Miss(MissKind.RING_LOST)


async def _drain(stream: JobStream) -> None:
    async for _ in stream:
        pass


async def test_a_full_ring_is_passed_over_and_only_when_all_are_full_a_job_is_refused() -> None:
    clock = VirtualClock()
    async with _router(clock, await _start(clock, "a"), await _start(clock, "b")) as router:
        streams = [
            router.submit(Request((*_PROMPT, n), max_new_tokens=9, session=_SESSION))
            for n in range(40, 44)
        ]
        statuses = {status.name: status for status in router.rings()}
        assert [statuses[name].running_jobs for name in "ab"] == [1, 1]
        assert [statuses[name].waiting_jobs for name in "ab"] == [1, 1]
        with pytest.raises(QueueFull):
            router.submit(Request(_PROMPT, session=_SESSION))
        for stream in streams:
            await clock.drive(_drain(stream))


async def test_a_ring_may_join_while_others_serve() -> None:
    clock = VirtualClock()
    async with _router(clock, await _start(clock, "a")) as router:
        busy = router.submit(Request(_PROMPT, max_new_tokens=50))
        await clock.drive(anext(busy))
        late = await _start(clock, "b")
        router.add(late)
        with pytest.raises(InvalidSetting):
            router.add(late)
        assert await _where(clock, router.submit(Request((80, 81), max_new_tokens=2))) == "b"
        await late.stop()


async def test_a_router_without_rings_says_so() -> None:
    with pytest.raises(RingUnavailable, match="none"):
        Router([], session_limit=1).submit(Request(_PROMPT))
