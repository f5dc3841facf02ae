"""Slow readers: their jobs rest and go on, or end, and nobody else is held up by them. In virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.errors import InvalidSetting, SlowReader
from coordinator.events import Event, ReaderCaughtUp, ReaderLags
from coordinator.frames import JobId
from coordinator.lanes import LaneState
from coordinator.readers import Reader
from coordinator.requests import Finished, Request, SamplingSpec, Started, TokenDelta
from coordinator.streams import JobStream
from fakering.clock import VirtualClock
from fakering.faults import Fault, Lose
from fakering.ring import FakeRing

PROMPT = tuple(range(1, 40))
SETTINGS = SchedulerSettings(unread_tokens=16, unread_s=60.0, reply_timeout_s=5.0)
STEP_S = 0.1
# What frames in flight still bring when a job begins to rest: one a stage and a spare one, of drafts as well.
LATE = 3 * (SETTINGS.max_drafts + 1)


@asynccontextmanager
async def ringing(
    clock: VirtualClock, *faults: Fault, lanes: int = 2, settings: SchedulerSettings = SETTINGS
) -> AsyncIterator[RingDriver]:
    ring = FakeRing(2, lanes, 512, vocab_size=90, faults=faults, clock=clock, step_s=STEP_S)
    driver = RingDriver("ring-0", ring, settings, clock)
    await driver.start(lambda progress: None)
    try:
        yield driver
    finally:
        await driver.stop()


def asked(number: int = 0, tokens: int = 200) -> Request:
    sampling = SamplingSpec(temperature=0.7, seed=number)
    return Request((*PROMPT, number), sampling, max_new_tokens=tokens)


def oracle(request: Request) -> tuple[int, ...]:
    model = FakeRing(1, 1, 8, vocab_size=90).language
    return model.oracle(request.prompt, request.max_new_tokens, request.sampling)


async def rest_of(stream: JobStream) -> tuple[int, ...]:
    tokens: list[int] = []
    async for event in stream:
        tokens.extend(event.tokens if isinstance(event, TokenDelta) else ())
    return tuple(tokens)


async def pass_by(clock: VirtualClock, seconds: float) -> None:
    """In small steps, so that every task has its say in between."""
    for _ in range(round(seconds / STEP_S)):
        clock.advance(STEP_S)
        await clock.settle()


def frames(driver: RingDriver) -> int:
    return driver.status().counts.frames


class Told:
    """A reader by itself, and what it tells."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.events: list[Event] = []
        self.ended: list[SlowReader] = []
        self.reader = Reader(JobId(7), SETTINGS, self.clock, self.events.append, self._end)

    def _end(self, job: JobId, error: Exception) -> None:
        assert job == 7
        assert isinstance(error, SlowReader)
        self.ended.append(error)


def test_a_reader_lags_above_the_limit_and_has_caught_up_at_half_of_it() -> None:
    told = Told()
    told.reader.came(16)
    assert told.events == []
    told.reader.came(1)
    told.reader.came(30)
    assert told.events == [ReaderLags(JobId(7), 0.0)]
    told.clock.advance(2.0)
    told.reader.took(38)
    assert len(told.events) == 1
    told.reader.took(1)
    assert told.events[1:] == [ReaderCaughtUp(JobId(7), 2.0)]
    told.clock.advance(1000.0)
    assert told.ended == []
    assert told.clock.next_due() is None


def test_who_reads_nothing_is_given_up_and_each_token_read_gives_the_time_anew() -> None:
    told = Told()
    told.reader.came(40)
    for _ in range(3):
        told.clock.advance(59.0)
        told.reader.took(1)
    told.clock.advance(59.9)
    assert told.ended == []
    told.clock.advance(0.1)
    assert [(error.seconds, error.code) for error in told.ended] == [(60.0, "slow_reader")]


def test_time_in_which_there_was_nothing_to_read_is_not_held_against_a_reader() -> None:
    told = Told()
    told.clock.advance(500.0)
    told.reader.came(17)
    told.clock.advance(59.0)
    assert told.ended == []


def test_a_job_that_has_ended_is_not_watched_any_more() -> None:
    told = Told()
    told.reader.came(40)
    told.reader.release()
    told.reader.came(40)
    told.clock.advance(500.0)
    assert [type(event) for event in told.events] == [ReaderLags, ReaderCaughtUp]
    assert told.ended == []


async def test_a_job_rests_while_its_reader_lags_and_goes_on_behind_the_same_token() -> None:
    clock = VirtualClock()
    async with ringing(clock) as driver:
        stream = driver.submit(asked())
        await pass_by(clock, 30.0)
        sent = frames(driver)
        status = driver.status()
        assert (status.running_jobs, status.busy_lanes, status.resting_jobs) == (1, 1, 1)
        await pass_by(clock, 20.0)
        assert frames(driver) == sent, "nothing is computed for it"
        tokens = await clock.drive(rest_of(stream))
        assert driver.status().counts.pauses == 1
        assert driver.status().resting_jobs == 0
    assert tokens == oracle(asked())


async def test_what_lies_unread_is_bounded() -> None:
    clock = VirtualClock()
    async with ringing(clock) as driver:
        stream = driver.submit(asked(tokens=400))
        await pass_by(clock, 50.0)
        unread = 0
        while (event := stream._take()) is not None:
            unread += len(event.tokens) if isinstance(event, TokenDelta) else 0
        assert SETTINGS.unread_tokens < unread <= SETTINGS.unread_tokens + LATE


async def test_others_get_the_time_of_a_job_that_rests() -> None:
    """Two lanes of which one rests are as fast as one: its frames are not sent, nor is room left for them."""
    taken: list[float] = []
    for beside in (False, True):
        clock = VirtualClock()
        async with ringing(clock) as driver:
            slow = driver.submit(asked(1)) if beside else None
            await pass_by(clock, 30.0)
            begun = clock.now()
            other = asked(2, tokens=80)
            assert await clock.drive(rest_of(driver.submit(other))) == oracle(other)
            taken.append(clock.now() - begun)
            assert driver.status().resting_jobs == (1 if slow else 0)
    assert taken[1] <= taken[0] * 1.05


async def test_a_reader_that_reads_nothing_loses_its_turn_and_its_lane_is_free() -> None:
    clock = VirtualClock()
    async with ringing(clock, lanes=1) as driver:
        slow, waiting = driver.submit(asked(1)), driver.submit(asked(2, tokens=9))
        await pass_by(clock, 30.0)
        assert driver.status().waiting_jobs == 1
        assert await clock.drive(rest_of(waiting)) == oracle(asked(2, tokens=9))
        assert 60.0 <= clock.now() <= 80.0
        with pytest.raises(SlowReader, match="nothing was read of the answer for 60 s"):
            await rest_of(slow)
        counts = driver.status().counts
        assert (counts.pauses, counts.slow_readers) == (1, 1)
        assert driver.status().busy_lanes == 0
        assert clock.next_due() is None


async def test_a_turn_that_is_cancelled_while_it_rests_leaves_nothing_behind() -> None:
    clock = VirtualClock()
    async with ringing(clock) as driver:
        async with driver.submit(asked()):
            await pass_by(clock, 30.0)
            assert driver.status().resting_jobs == 1
        await clock.settle()
        status = driver.status()
        assert (status.resting_jobs, status.busy_lanes, status.counts.slow_readers) == (0, 0, 0)
        assert clock.next_due() is None, "a timer is left"


async def test_a_prompt_beside_a_job_that_rests_keeps_all_stages_busy() -> None:
    """Beside one that decodes there would be no spare frame: it would have to wait for it."""
    clock = VirtualClock()
    async with ringing(clock) as driver:
        driver.submit(asked(1))
        await pass_by(clock, 30.0)
        driver.submit(Request(tuple(range(1, 80)) * 6))
        assert driver.status().frames_in_flight == 3


async def test_what_was_decided_is_read_before_the_error() -> None:
    clock = VirtualClock()
    async with ringing(clock) as driver:
        stream = driver.submit(asked())
        await pass_by(clock, 90.0)
        started, delta = await anext(stream), await anext(stream)
        assert isinstance(started, Started)
        assert isinstance(delta, TokenDelta)
        assert delta.tokens == oracle(asked())[: len(delta.tokens)]
        assert len(delta.tokens) > SETTINGS.unread_tokens
        with pytest.raises(SlowReader):
            await anext(stream)


async def test_a_job_that_rests_comes_back_with_its_healed_ring_and_loses_no_token() -> None:
    """It is requeued like others, gets its lane and its rows again, and rests on."""
    clock = VirtualClock()
    async with ringing(clock, Lose(stage=1, nth=40)) as driver:
        stream = driver.submit(asked(1))
        await pass_by(clock, 30.0)
        assert driver.status().epoch == 0
        assert driver.status().resting_jobs == 1
        other = asked(2, tokens=80)
        assert await clock.drive(rest_of(driver.submit(other))) == oracle(other)
        status = driver.status()
        assert (status.epoch, status.resting_jobs, status.running_jobs) == (1, 1, 1)
        (lane,) = [lane for lane in driver.lanes(2) if lane.state is LaneState.DECODE]
        assert lane.valid_rows > len(PROMPT) + SETTINGS.unread_tokens, "prefilling does not rest"
        assert await clock.drive(rest_of(stream)) == oracle(asked(1))


async def test_a_draining_ring_lets_its_jobs_run_to_their_ends_whoever_reads_them() -> None:
    clock = VirtualClock()
    async with ringing(clock) as driver:
        stream = driver.submit(asked())
        await pass_by(clock, 30.0)
        assert driver.status().resting_jobs == 1
        driver.drain()
        await pass_by(clock, 30.0)
        assert driver.idle
        assert await rest_of(stream) == oracle(asked())
        assert clock.next_due() is None


async def test_a_prompt_is_prefilled_whoever_reads() -> None:
    """Started alone lies unread: nothing rests before there are tokens."""
    clock = VirtualClock()
    async with ringing(clock) as driver:
        stream = driver.submit(Request(tuple(range(1, 80)) * 5, max_new_tokens=3))
        await pass_by(clock, 100.0)
        assert driver.status().counts.pauses == 0
        events = [event async for event in stream]
        assert isinstance(events[0], Started)
        assert isinstance(events[-1], Finished)


@pytest.mark.parametrize("wrong", [{"unread_tokens": 0}, {"unread_s": 0.0}, {"queue_tokens": 0}])
def test_limits_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(wrong))):
        SchedulerSettings(**wrong)  # type: ignore[arg-type]
