"""What others saw when turns of one session raced, failed or were evicted half-way, on fake rings in virtual time.

The fake model's next token is a hash of the rows that were really read, so a row of another turn changes the text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.errors import BrokenInvariant, Cancelled
from coordinator.frames import JobId, LaneId, RefusalCode
from coordinator.requests import Finished, Request, SessionId, Started, TokenDelta
from coordinator.streams import JobStream
from fakering.clock import VirtualClock
from fakering.faults import Fault, FaultScript, Refuse
from fakering.model import FakeModel
from fakering.plan import PlannedJob
from fakering.ring import FakeRing
from fakering.simulation import Simulation
from fakering.texts import novel

MODEL = FakeModel(vocab_size=90, seed=5)
SETTINGS = SchedulerSettings(
    frame_rows=32, chunk_rows=10, min_chunk_rows=4, min_copy_rows=4, reply_timeout_s=5.0
)
FIRST = novel(50, 1, 90)
SESSION = SessionId("s")


@asynccontextmanager
async def ring_in_virtual_time(
    clock: VirtualClock, *, lanes: int = 3, faults: FaultScript = ()
) -> AsyncIterator[RingDriver]:
    ring = FakeRing(
        2, lanes, 512, vocab_size=90, faults=faults, clock=clock, step_s=0.1, language=MODEL
    )
    driver = RingDriver("ring", ring, SETTINGS, clock)
    await driver.start(lambda progress: None)
    try:
        yield driver
    finally:
        await driver.stop()


def turn(prompt: Sequence[int], count: int = 8, session: SessionId | None = SESSION) -> Request:
    return Request(tuple(prompt), max_new_tokens=count, session=session)


async def read(stream: JobStream) -> tuple[Started, tuple[int, ...]]:
    started, tokens = None, []
    async for event in stream:
        match event:
            case Started():
                started = event
            case TokenDelta():
                tokens.extend(event.tokens)
            case Finished():
                assert started is not None
                return started, tuple(tokens)
    raise AssertionError("the stream ended without a word")


def checked(request: Request, got: tuple[Started, tuple[int, ...]]) -> Started:
    """Against the oracle, which is what a cold ring gives."""
    started, tokens = got
    assert tokens == MODEL.oracle(request.prompt, request.max_new_tokens)
    assert started.prompt_tokens == len(request.prompt)
    return started


async def test_a_turn_behind_one_that_was_dropped_sees_the_whole_history() -> None:
    """sgl-project/sglang#36475: the client drops a turn mid-stream, and its next one sees an empty context."""
    clock = VirtualClock()
    async with ring_in_virtual_time(clock) as driver:
        _, answer = await clock.drive(read(driver.submit(turn(FIRST))))
        history = (*FIRST, *answer)
        for number in range(50):
            dropped = (*history, *novel(1 + number, 100 + number, 90))
            async with driver.submit(turn(dropped, 300)) as stream:
                for _ in range(1 + number % 3):
                    await clock.drive(anext(stream))
                clock.advance(0.03 * (number % 5))
            request = turn((*history, *novel(7, 200 + number, 90)))
            started = checked(request, await clock.drive(read(driver.submit(request))))
            assert started.cached_prefix >= len(history) - 1
        assert driver.status().running_jobs == 0


@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("count", [2, 5])
async def test_turns_of_one_session_at_once_never_mix(lanes: int, count: int) -> None:
    """The second branches into another lane while one is free, else it waits; each answer is its own prompt's."""
    clock = VirtualClock()
    async with ring_in_virtual_time(clock, lanes=lanes) as driver:
        _, answer = await clock.drive(read(driver.submit(turn(FIRST))))
        history = (*FIRST, *answer)
        turns = [turn((*history, *novel(3 + 9 * n, n, 90)), 20) for n in range(count)]
        streams = [driver.submit(request) for request in turns]
        got = await clock.drive(asyncio.gather(*(read(stream) for stream in streams)))
        started = [checked(request, part) for request, part in zip(turns, got, strict=True)]
        assert min(lanes, 2) <= len({one.lane for one in started}) <= lanes
        assert all(one.cached_prefix >= len(history) - 1 for one in started)
        # And the turn after goes on from whichever it extends.
        last = turn((*turns[-1].prompt, *got[-1][1], 4))
        after = checked(last, await clock.drive(read(driver.submit(last))))
        assert after.cached_prefix == len(last.prompt) - 2


async def test_the_same_turn_twice_at_once_is_answered_twice_alike() -> None:
    """A client that retries before its first call has ended."""
    clock = VirtualClock()
    async with ring_in_virtual_time(clock) as driver:
        request = turn(FIRST, 20)
        first, second = driver.submit(request), driver.submit(request)
        got = await clock.drive(asyncio.gather(read(first), read(second)))
        lanes = {checked(request, part).lane for part in got}
    assert len(lanes) == 2


def _three_turns(
    faults: FaultScript, cancel_after_s: float | None, session: str | None = "s"
) -> Simulation:
    """The third turn goes on from the first, beside or behind a second one that something happens to."""
    plan = (
        PlannedJob(0.0, FIRST[:24], session=session, max_new_tokens=6),
        PlannedJob(
            2.0,
            FIRST[24:],
            session=session,
            follows=0,
            max_new_tokens=6,
            cancel_after_s=cancel_after_s,
        ),
        PlannedJob(2.3, novel(20, 9, 90), session=session, follows=0, max_new_tokens=6),
    )
    return Simulation(plan, MODEL, settings=SETTINGS, faults=faults)


def _frames_of_first_turn() -> tuple[int, int]:
    """How many frames reach a stage in the first turn, and in all three."""
    counts = []
    for length in (1, 3):
        simulation = _three_turns((), None)
        if length == 1:
            simulation._due = [due for due in simulation._due if due.when == 0.0]
        simulation.run()
        counts.append(int(simulation.network.stages[1].ledger.next_seq))
    return counts[0], counts[1]


@pytest.mark.parametrize("cancel_after_s", [None, 0.0, 0.02, 0.05, 0.09])
@pytest.mark.parametrize("code", [RefusalCode.NO_STATE, RefusalCode.KV_GAP])
def test_a_turn_that_was_rejected_half_way_is_never_what_the_next_one_starts_from(
    cancel_after_s: float | None, code: RefusalCode
) -> None:
    """sgl-project/sglang#40252: a rejected turn is committed as the session's checkpoint."""
    first, last = _frames_of_first_turn()
    refused = reused = 0
    for nth in range(first, last):
        simulation = _three_turns((Refuse(stage=1, nth=nth, code=code),), cancel_after_s)
        simulation.run()  # every stream is held against the oracle
        third = simulation.jobs[JobId(2)]
        assert third.finished is not None, nth
        assert third.started is not None
        refused += simulation.refusals
        reused += third.started.cached_prefix >= 24
    assert refused > 0
    assert reused > 0


async def test_a_turn_that_fails_for_good_leaves_the_session_usable() -> None:
    """sgl-project/sglang#40252, where the turn is not mended but fails."""
    faults: tuple[Fault, ...] = tuple(Refuse(stage=1, nth=nth) for nth in range(20, 60))
    clock = VirtualClock()
    async with ring_in_virtual_time(clock, faults=faults) as driver:
        _, answer = await clock.drive(read(driver.submit(turn(FIRST))))
        frames = driver.status().counts.frames
        assert frames < 20
        history = (*FIRST, *answer)
        with pytest.raises(BrokenInvariant, match="refused"):
            await clock.drive(read(driver.submit(turn((*history, *novel(200, 3, 90)), 99))))
        await clock.run_until_idle()
        assert driver.status().busy_lanes == 0
        for seed in range(4):
            request = turn((*history, *novel(9, 50 + seed, 90)))
            started = checked(request, await clock.drive(read(driver.submit(request))))
        assert started.cached_prefix >= len(history) - 1


async def test_closing_a_session_while_it_decodes_ends_its_stream_and_nobody_elses() -> None:
    """sgl-project/sglang#21875: closing a session during its decode corrupts memory."""
    clock = VirtualClock()
    async with ring_in_virtual_time(clock) as driver:
        for number in range(8):
            other = turn(novel(30, number, 90), 20, SessionId("other"))
            beside = driver.submit(other)
            streams = [driver.submit(turn((*FIRST, n, number), 300)) for n in range(2)]
            for _ in range(number % 4):
                await clock.drive(anext(streams[0]))
            clock.advance(0.15 * number)
            driver.close_session(SESSION)
            for stream in streams:
                with pytest.raises(Cancelled):
                    await clock.drive(read(stream))
            checked(other, await clock.drive(read(beside)))
            await clock.run_until_idle()
            status = driver.status()
            assert (status.busy_lanes, status.running_jobs, status.waiting_jobs) == (0, 0, 0)
            assert status.sessions == 1
        request = turn((*FIRST, 7))
        checked(request, await clock.drive(read(driver.submit(request))))


@pytest.mark.parametrize("poor", [0, 1, 2])
@pytest.mark.parametrize("kept", [0, 1, 9, 10, 23, 28])
def test_the_stage_that_holds_least_decides_what_is_reused(poor: int, kept: int) -> None:
    """exo-explore/exo#1341: with uneven memory one node evicts the rows that another one still has."""
    plan = (
        PlannedJob(0.0, FIRST[:24], session="s", max_new_tokens=6),
        PlannedJob(2.0, FIRST[24:], session="s", follows=0, max_new_tokens=6),
    )
    simulation = Simulation(plan, MODEL, stages=3, settings=SETTINGS, faults=(Refuse(0, 9999),))
    while JobId(1) not in simulation.jobs:
        assert simulation._step()
        first = simulation.jobs.get(JobId(0))
        if first is not None and first.ended and simulation.now < 2.0:
            # One stage gives rows away between the turns, and tells nobody.
            simulation.network.stages[poor].ledger.truncate(LaneId(0), kept)
    simulation.run()
    second = simulation.jobs[JobId(1)]
    assert second.started is not None
    assert second.started.cached_prefix == kept
    assert simulation.refusals >= 1
    lengths = {stage.ledger.valid_rows(LaneId(0)) for stage in simulation.network.stages}
    assert lengths == {simulation.scheduler.ledger.valid_rows(LaneId(0))}
