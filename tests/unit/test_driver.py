"""The driver and the router over fake rings in virtual time: deadlines, cancellation, loss, pins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

import pytest

from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.errors import (
    BrokenInvariant,
    Cancelled,
    DeadlineExceeded,
    RingLost,
    RingserveError,
    RingUnavailable,
    StageLost,
)
from coordinator.frames import Epoch
from coordinator.held import Holding
from coordinator.requests import (
    Finished,
    FinishReason,
    JobEvent,
    Miss,
    MissKind,
    Recovering,
    Request,
    SessionId,
    Started,
    TokenDelta,
)
from coordinator.router import Router
from coordinator.streams import JobStream
from fakering.clock import VirtualClock
from fakering.faults import Fault, Lose, Restart, Stall
from fakering.ring import FakeRing

_PROMPT = tuple(range(1, 40))


class _Unhealable(FakeRing):
    """Whose lost stages nobody replaces."""

    tried = 0

    async def open_epoch(self, epoch: Epoch) -> Holding:
        self.tried += 1
        raise RingLost(1, "no room for it")


@asynccontextmanager
async def _driver(
    clock: VirtualClock,
    *faults: Fault,
    name: str = "ring-0",
    lanes: int = 2,
    kind: type[FakeRing] = FakeRing,
) -> AsyncIterator[RingDriver]:
    ring = kind(2, lanes, 256, vocab_size=90, faults=faults, clock=clock, step_s=0.1)
    driver = RingDriver(name, ring, SchedulerSettings(reply_timeout_s=5.0), clock)
    await driver.start(lambda progress: None)
    try:
        yield driver
    finally:
        await driver.stop()


def _oracle(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    return FakeRing(1, 1, 8, vocab_size=90).language.oracle(prompt, count)


async def _read(stream: JobStream) -> tuple[list[int], Finished | None]:
    tokens: list[int] = []
    async for event in stream:
        if isinstance(event, TokenDelta):
            tokens.extend(event.tokens)
        elif isinstance(event, Finished):
            return tokens, event
    return tokens, None


async def test_a_job_streams_what_the_oracle_says() -> None:
    clock = VirtualClock()
    async with _driver(clock) as driver:
        tokens, finished = await clock.drive(
            _read(driver.submit(Request(_PROMPT, max_new_tokens=10)))
        )
    assert tuple(tokens) == _oracle(_PROMPT, 10)
    assert finished is not None
    assert finished.timings.prefill_s > 0
    assert finished.timings.decode_s > 0


async def test_a_slow_reader_gets_merged_deltas_and_every_token() -> None:
    clock = VirtualClock()
    async with _driver(clock) as driver:
        stream = driver.submit(Request(_PROMPT, max_new_tokens=30))
        await clock.run_until_idle()
        events = [event async for event in stream]
    assert [type(event) for event in events] == [Started, TokenDelta, Finished]
    assert isinstance(events[1], TokenDelta)
    assert events[1].tokens == _oracle(_PROMPT, 30)


async def test_a_caller_that_has_enough_ends_the_job_and_gets_its_usage() -> None:
    clock = VirtualClock()
    async with _driver(clock) as driver:
        stream = driver.submit(Request(_PROMPT, max_new_tokens=99, session=SessionId("x")))
        tokens = 0
        while tokens < 5:
            event = await clock.drive(anext(stream))
            tokens += len(event.tokens) if isinstance(event, TokenDelta) else 0
        finished = stream.finish_now()
        assert finished == stream.finish_now()
        assert [event async for event in stream] == []
        assert finished.reason is FinishReason.STOP
        assert finished.usage.generated_tokens == tokens
        assert finished.timings.prefill_s > 0
        assert driver.status().busy_lanes == 0


async def test_rows_lost_behind_our_back_are_a_miss_with_a_reason() -> None:
    clock = VirtualClock()
    async with _driver(clock, Restart(stage=1, nth=3)) as driver:
        turn = Request(_PROMPT, max_new_tokens=3, session=SessionId("x"), draft=False)
        await clock.drive(_read(driver.submit(turn)))
        longer = Request((*_PROMPT, 1, 2, 3), max_new_tokens=3, session=SessionId("x"))
        started = await clock.drive(anext(driver.submit(longer)))
        assert isinstance(started, Started)
        assert (started.cached_prefix, started.miss) == (0, Miss(MissKind.RING_LOST))


@pytest.mark.parametrize("deadline_s", [0.0, 0.15, 1.0])
async def test_a_deadline_ends_the_job_wherever_it_is(deadline_s: float) -> None:
    clock = VirtualClock()
    async with _driver(clock, lanes=1) as driver:
        stream = driver.submit(Request(_PROMPT, max_new_tokens=200, deadline_s=deadline_s))
        with pytest.raises(DeadlineExceeded):
            await clock.drive(_read(stream))
        await clock.run_until_idle()
        status = driver.status()
        assert (status.busy_lanes, status.running_jobs, status.waiting_jobs) == (0, 0, 0)
        tokens, _ = await clock.drive(_read(driver.submit(Request(_PROMPT, max_new_tokens=3))))
    assert tuple(tokens) == _oracle(_PROMPT, 3)


async def test_leaving_a_stream_cancels_its_job_and_keeps_its_rows() -> None:
    clock = VirtualClock()
    async with _driver(clock) as driver:
        async with driver.submit(Request(_PROMPT, max_new_tokens=200)) as stream:
            await clock.drive(anext(stream))
        assert driver.status().running_jobs == 0
        await clock.run_until_idle()
        started = await clock.drive(anext(driver.submit(Request((*_PROMPT, 5)))))
        assert isinstance(started, Started)
        assert started.cached_prefix == len(_PROMPT)


async def test_200_cancelled_streams_leave_nothing_behind() -> None:
    clock = VirtualClock()
    async with _driver(clock) as driver:
        tasks = asyncio.all_tasks()
        for number in range(200):
            async with driver.submit(Request((number % 80, *_PROMPT), max_new_tokens=50)):
                clock.advance(0.05 * (number % 7))
                await clock.settle()
        await clock.run_until_idle()
        status = driver.status()
        assert (status.busy_lanes, status.running_jobs, status.waiting_jobs) == (0, 0, 0)
        assert asyncio.all_tasks() == tasks


@pytest.mark.parametrize("nth", range(8))
@pytest.mark.parametrize("stage", [0, 1])
async def test_a_lost_stage_costs_a_pause_and_no_token(stage: int, nth: int) -> None:
    clock = VirtualClock()
    async with _driver(clock, Lose(stage, nth)) as driver:
        stream = driver.submit(Request(_PROMPT, max_new_tokens=12))
        events = await clock.drive(_listed(stream))
        assert (driver.status().epoch, driver.status().ready) == (1, True)
    tokens = [t for event in events if isinstance(event, TokenDelta) for t in event.tokens]
    assert tuple(tokens) == _oracle(_PROMPT, 12)
    told = [event for event in events if isinstance(event, Recovering)]
    assert told == [Recovering(f"stage {stage}: died (scripted)")]
    assert sum(isinstance(event, Started) for event in events) == 1


async def _listed(stream: JobStream) -> list[JobEvent]:
    return [event async for event in stream]


async def test_a_ring_that_does_not_heal_is_given_up_after_a_while() -> None:
    clock = VirtualClock()
    async with _driver(clock, Lose(stage=1, nth=3), kind=_Unhealable) as driver:
        stream = driver.submit(Request(_PROMPT, max_new_tokens=50))
        waiting = driver.submit(Request(_PROMPT, max_new_tokens=50))
        reading = asyncio.ensure_future(_read(waiting))
        with pytest.raises(StageLost, match="stage 1: no room for it"):
            await clock.drive(_read(stream))
        with pytest.raises(StageLost, match="stage 1: no room for it"):
            await reading
        assert clock.now() >= 0.5 + 1 + 2 + 4
        assert driver._ring.tried == 5  # type: ignore[attr-defined]
        assert not driver.status().ready
        assert "no room for it" in driver.status().reason
        with pytest.raises(RingUnavailable):
            driver.submit(Request(_PROMPT))


async def test_a_fault_of_ours_in_healing_costs_the_ring_and_nobody_waits_for_ever() -> None:
    class Faulty(FakeRing):
        async def open_epoch(self, epoch: Epoch) -> Holding:
            raise ZeroDivisionError("planted")

    clock = VirtualClock()
    async with _driver(clock, Lose(stage=1, nth=3), kind=Faulty) as driver:
        with pytest.raises(StageLost, match="ZeroDivisionError: planted"):
            await clock.drive(_read(driver.submit(Request(_PROMPT, max_new_tokens=50))))


async def test_a_turn_that_comes_while_the_ring_heals_waits_for_it() -> None:
    clock, healed = VirtualClock(), asyncio.Event()

    class Slow(FakeRing):
        async def open_epoch(self, epoch: Epoch) -> Holding:
            await healed.wait()
            return await super().open_epoch(epoch)

    async with _driver(clock, Lose(stage=1, nth=3), kind=Slow) as driver:
        first = driver.submit(Request(_PROMPT, max_new_tokens=20))
        while not driver.status().recovering:
            await clock.drive(anext(first))
        assert not driver.status().ready
        second = driver.submit(Request(_PROMPT, max_new_tokens=7))
        healed.set()
        tokens, _ = await clock.drive(_read(second))
    assert tuple(tokens) == _oracle(_PROMPT, 7)


async def test_a_stage_that_hangs_costs_an_epoch_and_no_token() -> None:
    clock = VirtualClock()
    async with _driver(clock, Stall(stage=1, nth=3, seconds=inf)) as driver:
        stream = driver.submit(Request(_PROMPT, max_new_tokens=12))
        tokens, _ = await clock.drive(_read(stream))
        assert driver.status().epoch == 1
    assert tuple(tokens) == _oracle(_PROMPT, 12)


async def test_a_ring_that_was_taken_away_is_down_at_once_and_says_who_has_it() -> None:
    """No attempt is made to heal it: its stages are somebody else's."""

    class Counted(_Unhealable):
        """Whose openings are counted."""

    clock = VirtualClock()
    async with _driver(clock, kind=Counted) as driver:
        stream = driver.submit(Request(_PROMPT, max_new_tokens=50))
        await clock.drive(anext(stream))
        ring = driver._ring
        assert isinstance(ring, Counted)
        ring.take_away()
        with pytest.raises(StageLost, match="the ring was lost: another gateway has it"):
            await clock.drive(_read(stream))
        status = driver.status()
        assert (ring.tried, clock.now() < 5.0) == (0, True)
        assert (status.recovering, status.reason) == (False, "another gateway has it (scripted)")
        with pytest.raises(RingUnavailable, match="another gateway has it"):
            driver.submit(Request(_PROMPT))


async def test_a_ring_that_was_taken_away_while_it_healed_is_down_at_the_next_attempt() -> None:
    clock = VirtualClock()

    class Taken(FakeRing):
        async def open_epoch(self, epoch: Epoch) -> Holding:
            self.network.give_away()
            return await super().open_epoch(epoch)

    async with _driver(clock, Lose(stage=1, nth=3), kind=Taken) as driver:
        stream = driver.submit(Request(_PROMPT, max_new_tokens=50))
        with pytest.raises(StageLost, match="another gateway has it"):
            await clock.drive(_read(stream))
        assert driver.status().epoch == 1


async def test_stopping_ends_every_stream_with_an_error() -> None:
    clock = VirtualClock()
    async with _driver(clock) as driver:
        stream = driver.submit(Request(_PROMPT, max_new_tokens=50))
    with pytest.raises(StageLost, match="stopped"):
        await _read(stream)


async def test_before_the_start_nothing_is_taken() -> None:
    clock = VirtualClock()
    ring = FakeRing(1, 1, 64, vocab_size=90, clock=clock)
    driver = RingDriver("ring-0", ring, SchedulerSettings(), clock)
    assert not driver.status().ready
    with pytest.raises(RingUnavailable):
        driver.submit(Request((1,)))


async def _started(clock: VirtualClock, stream: JobStream) -> Started:
    event = await clock.drive(anext(stream))
    assert isinstance(event, Started)
    await clock.drive(_read(stream))
    return event


async def test_a_session_stays_on_its_ring_and_others_go_where_their_prefix_lies() -> None:
    clock = VirtualClock()
    async with _driver(clock, name="a") as one, _driver(clock, name="b") as two:
        router = Router([one, two], session_limit=10)

        def turn(*prompt: int, session: str | None = None) -> JobStream:
            owner = None if session is None else SessionId(session)
            return router.submit(Request(prompt, max_new_tokens=3, session=owner))

        first = await _started(clock, turn(*_PROMPT, session="x"))
        busy = turn(9, 9, 9, 9)
        assert (await _started(clock, busy)).ring in ("a", "b")
        again = await _started(clock, turn(*_PROMPT, 70, 71, session="x"))
        assert again.ring == first.ring
        assert again.cached_prefix >= len(_PROMPT)
        near = await _started(clock, turn(*_PROMPT, 80))
        assert near.ring == first.ring
        assert router.close_session(SessionId("x"))
        assert not router.close_session(SessionId("x"))


async def test_closing_a_session_ends_its_stream() -> None:
    clock = VirtualClock()
    async with _driver(clock) as driver:
        router = Router([driver], session_limit=10)
        stream = router.submit(Request(_PROMPT, max_new_tokens=99, session=SessionId("x")))
        await clock.drive(anext(stream))
        router.close_session(SessionId("x"))
        with pytest.raises(Cancelled):
            await clock.drive(_read(stream))
        assert driver.status().busy_lanes == 0


async def test_without_a_ring_the_router_says_why() -> None:
    clock = VirtualClock()
    async with _driver(clock, Lose(stage=0, nth=0), kind=_Unhealable) as driver:
        router = Router([driver], session_limit=10)
        with pytest.raises(RingserveError):
            await clock.drive(_read(router.submit(Request(_PROMPT))))
        with pytest.raises(RingUnavailable, match="stage 1: no room"):
            router.submit(Request(_PROMPT))


async def test_a_job_that_ended_in_the_event_that_broke_the_ring_is_told_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What such an event had to say is lost: without a word of its own, its reader would wait for ever."""
    clock = VirtualClock()
    async with _driver(clock) as driver:
        core = driver._scheduler
        assert core is not None
        right = core._pump

        def broken(now: float) -> None:
            right(now)
            if not core.running and core.counts.frames > 1 and core.down is None:
                raise BrokenInvariant("planted", ())

        monkeypatch.setattr(core, "_pump", broken)
        with pytest.raises(StageLost, match="planted"):
            await clock.drive(_read(driver.submit(Request(_PROMPT, max_new_tokens=3))))
    assert driver.status().busy_lanes == 0
