"""What each kind of loss costs the clients of a fake ring: a pause, and at most the rows that are really gone.

Each fault on every stage and leg, at every frame of a turn; every run is held against the oracle, the stages' buffers
and a second opinion on each opening by the simulation itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import pytest

from coordinator.config import SchedulerSettings
from coordinator.errors import RingUnavailable, StageLost
from coordinator.frames import DropNodes, Epoch, Frame, JobId, NodeId, OpenLane
from coordinator.held import Holding
from coordinator.requests import MissKind
from fakering.faults import (
    Deed,
    Drop,
    FailHeal,
    FaultScript,
    GatewayRestart,
    Lose,
    LoseAt,
    Stall,
    TakeAt,
)
from fakering.model import FakeModel
from fakering.plan import PlannedJob
from fakering.simulation import Simulation

STAGES = 3
MODEL = FakeModel(vocab_size=60, seed=3, quoting=0.0)
SETTINGS = SchedulerSettings(
    frame_rows=24,
    chunk_rows=10,
    min_chunk_rows=3,
    min_copy_rows=1,
    node_rows=8,
    reply_timeout_s=2.0,
    heal_attempts=3,
)
PROMPT = tuple(range(30))
ANSWER = 8
# All rows of the first turn but its last token's, which was never written.
ROWS = len(PROMPT) + ANSWER - 1


def two_turns(*faults: object, rest_s: float = 1.0, **shape: int) -> Simulation:
    """The second one long after the first has ended, whatever went wrong."""
    plan = (
        PlannedJob(0.0, PROMPT, "a", max_new_tokens=ANSWER),
        PlannedJob(60.0, (7, 8, 9), "a", follows=0, max_new_tokens=ANSWER),
    )
    return Simulation(
        plan, MODEL, stages=STAGES, settings=SETTINGS, faults=faults, rest_s=rest_s, **shape
    )


def played(simulation: Simulation) -> Simulation:
    simulation.run()
    return simulation


def cached(simulation: Simulation, job: int) -> int:
    started = simulation.jobs[JobId(job)].started
    assert started is not None
    return started.cached_prefix


def frames_of_a_turn() -> int:
    simulation = two_turns()
    while simulation.now < 30.0:
        assert simulation._step()
    return simulation.network._reached[0]


FRAMES = 12


def test_a_turn_has_as_many_frames_as_these_tests_visit() -> None:
    assert frames_of_a_turn() >= FRAMES - 2


def held_and_reopened(simulation: Simulation) -> list[tuple[int, int]]:
    """Filled as it is played: of each epoch that opens, how many rows all stages have of its first frame's lane, and
    how many of them are reused.
    """
    seen: list[tuple[int, int]] = []
    network, begins = simulation.network, []
    open_epoch, send = network.open_epoch, network.send

    def opened(epoch: Epoch, now: float) -> Holding:
        held = open_epoch(epoch, now)
        begins[:] = [[len(lane.tokens) for lane in held.lanes]]
        return held

    def sent(frame: Frame, now: float) -> None:
        opening = next((op for op in frame.ops if isinstance(op, OpenLane)), None)
        if begins and opening is not None:
            seen.append((begins.pop()[opening.lane], opening.cached_prefix))
        send(frame, now)

    network.open_epoch, network.send = opened, sent  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("leg", range(STAGES + 1))
def test_a_lost_message_costs_no_row_that_all_stages_had(leg: int) -> None:
    for nth in range(FRAMES - 2):
        simulation = two_turns(Drop(leg, nth))
        seen = held_and_reopened(simulation)
        simulation.run()
        ((held, reused),) = seen
        # One row at least is computed, for its logits.
        assert held - 1 <= reused <= held
        assert nth == 0 or held > 0
        assert simulation.epochs == 1, nth
        assert simulation.network.replaced == 0
        assert cached(simulation, 1) == ROWS


@pytest.mark.parametrize("stage", range(STAGES))
@pytest.mark.parametrize("passes_on", [False, True])
def test_a_stage_that_dies_of_any_frame_costs_a_pause(stage: int, passes_on: bool) -> None:
    for nth, noticed_s in itertools.product(range(FRAMES - 2), (0.0, 0.5)):
        lose = Lose(stage, nth, passes_on=passes_on, noticed_s=noticed_s)
        simulation = played(two_turns(lose))
        assert simulation.network.struck == [lose]
        assert (simulation.epochs, simulation.network.replaced) == (1, 1)
        turns = simulation.jobs.values()
        assert [job.finished is not None for job in turns] == [True, True]
        assert [job.recoveries for job in turns] in ([1, 0], [0, 0])
        # A stage that dies of the turn's last frame, which it has passed on, takes all of its rows along.
        is_over = passes_on and noticed_s > 0 and nth == FRAMES - 3
        assert cached(simulation, 1) == (0 if is_over else ROWS)


def four_sessions(*faults: object, host_rows: int = 1000) -> Simulation:
    """Two turns each on one lane: rows are stored and loaded all the time, and copied where a second lane is."""
    heads = [tuple((7 * n + 3 * i) % 50 for i in range(20)) for n in range(4)]
    plan = [PlannedJob(3.0 * n, head, f"s{n}", max_new_tokens=5) for n, head in enumerate(heads)]
    plan += [
        PlannedJob(60.0 + 3.0 * n, (7, 8), f"s{n}", follows=n, max_new_tokens=5) for n in range(4)
    ]
    plan += [PlannedJob(90.0, (9, 9), "t", follows=3, max_new_tokens=5)]
    plan += [PlannedJob(90.0, (11, 9), "u", follows=3, max_new_tokens=5)]
    return Simulation(
        tuple(plan),
        MODEL,
        stages=STAGES,
        lanes=2,
        settings=SETTINGS,
        faults=faults,
        host_rows=host_rows,
    )


def losses(deed: Deed) -> Iterator[Lose]:
    for stage, passes_on, keeps in itertools.product(range(STAGES), (False, True), (0.0, 0.5, 1.0)):
        yield Lose(stage, 0, deed, passes_on, keeps=keeps)


@pytest.mark.parametrize("deed", [Deed.LOAD, Deed.STORE, Deed.COPY])
def test_a_stage_that_dies_of_a_load_a_store_or_a_copy_costs_a_pause(deed: Deed) -> None:
    for lose in losses(deed):
        simulation = played(four_sessions(lose))
        assert simulation.network.struck == [lose]
        assert simulation.epochs == 1
        assert all(job.finished for job in simulation.jobs.values())


@pytest.mark.parametrize("host_rows", [30, 60])
def test_what_was_given_up_for_want_of_room_does_not_come_back(host_rows: int) -> None:
    """The head dies before it takes the frame that says so, and its successor finds all that it kept."""
    lose = Lose(0, 0, Deed.DROP, keeps=1.0)
    simulation = four_sessions(lose, host_rows=host_rows)
    held: list[set[NodeId]] = []
    open_epoch = simulation.network.open_epoch

    def opened(epoch: Epoch, now: float) -> Holding:
        holding = open_epoch(epoch, now)
        held.append({node.id for node in holding.nodes})
        return holding

    simulation.network.open_epoch = opened  # type: ignore[method-assign]
    dropped: list[set[NodeId]] = []
    voided = simulation.scheduler.retention.voided

    def void(frames: Iterable[Frame]) -> None:
        ops = [op for frame in frames for op in frame.ops if isinstance(op, DropNodes)]
        dropped.append({node for op in ops for node in op.nodes})
        voided(frames)

    simulation.scheduler.retention.voided = void  # type: ignore[method-assign]
    simulation.run()
    assert simulation.network.struck == [lose]
    assert simulation.epochs == 1
    assert dropped[0] & held[0], "nobody heard of it"
    assert all(job.finished for job in simulation.jobs.values())


def test_nodes_that_a_disk_kept_bring_back_what_lanes_lost() -> None:
    """A ring at rest loses a stage; its successor finds the nodes, and nobody is told anything."""
    for stage, keeps in itertools.product(range(STAGES), (0.0, 1.0)):
        loss = LoseAt(30.0, (stage,), noticed_s=0.5, keeps=keeps)
        simulation = played(two_turns(loss, host_rows=1000))
        assert (simulation.epochs, simulation.network.replaced) == (1, 1)
        assert [job.recoveries for job in simulation.jobs.values()] == [0, 0]
        assert cached(simulation, 1) == (ROWS if keeps else 0)
        again = simulation.jobs[JobId(1)].started
        assert again is not None
        assert (again.miss is None) == bool(keeps)
        assert keeps or (again.miss and again.miss.kind is MissKind.RING_LOST)


def test_two_stages_may_be_lost_at_once() -> None:
    for pair in itertools.combinations(range(STAGES), 2):
        for at_s in (0.05, 0.1, 0.3, 30.0):
            simulation = played(two_turns(LoseAt(at_s, pair)))
            assert (simulation.epochs, simulation.network.replaced) == (1, 2)
            assert all(job.finished for job in simulation.jobs.values())


@pytest.mark.parametrize("opened", [None, 0, 1, STAGES])
@pytest.mark.parametrize("dies", [None, 0, 2])
def test_a_ring_that_heals_at_the_third_attempt_costs_a_longer_pause(
    opened: int | None, dies: int | None
) -> None:
    failures = tuple(FailHeal(nth, opened, dies) for nth in range(2))
    simulation = played(two_turns(Lose(1, nth=5), *failures))
    assert simulation.epochs == 3
    first, second = simulation.jobs.values()
    assert first.finished is not None
    assert second.finished is not None
    assert first.recoveries == 1


def test_a_ring_that_never_heals_ends_its_jobs_and_takes_no_more() -> None:
    failures = tuple(FailHeal(nth) for nth in range(3))
    simulation = played(two_turns(Lose(1, nth=5), *failures))
    assert simulation.epochs == 3
    assert simulation.scheduler.down is not None
    first, second = simulation.jobs.values()
    assert isinstance(first.error, StageLost)
    assert isinstance(second.error, RingUnavailable)
    assert tuple(first.tokens) == first.expected[: len(first.tokens)]


@pytest.mark.parametrize("at_s", [0.0, 0.05, 0.1, 0.15, 0.3, 30.0])
@pytest.mark.parametrize("before", [(), (Lose(1, nth=5),), (Stall(1, 5, math.inf),)])
def test_a_ring_that_was_taken_away_is_not_healed(at_s: float, before: FaultScript) -> None:
    """Its jobs end at once, and at the latest when the epoch should have opened that a loss before it ended."""
    simulation = played(two_turns(*before, TakeAt(at_s)))
    assert simulation.epochs <= len(before)
    assert simulation.scheduler.down == "another gateway has it (scripted)"
    first, second = simulation.jobs.values()
    assert first.finished or isinstance(first.error, StageLost | RingUnavailable)
    assert isinstance(second.error, RingUnavailable)
    assert tuple(first.tokens) == first.expected[: len(first.tokens)]


@pytest.mark.parametrize("stage", range(STAGES))
@pytest.mark.parametrize("seconds", [8.0, math.inf])
def test_a_stalled_stage_is_replaced_and_what_it_says_later_is_void(
    stage: int, seconds: float
) -> None:
    """It speaks when the next epoch is long open; the first reply of all is never waited for so short."""
    for nth in range(3, FRAMES - 2):
        simulation = played(two_turns(Stall(stage, nth, seconds)))
        assert (simulation.epochs, simulation.network.replaced) == (1, 1)
        assert all(job.finished for job in simulation.jobs.values())
        is_heard = seconds < math.inf
        assert simulation.void_replies == (1 if is_heard else 0), nth


def test_a_stage_that_rests_in_time_keeps_its_rows() -> None:
    simulation = played(two_turns(Stall(1, 5, 8.0), rest_s=20.0))
    assert (simulation.epochs, simulation.network.replaced) == (1, 0)
    assert cached(simulation, 1) == ROWS


def test_a_new_gateway_finds_what_the_stages_hold() -> None:
    for at_s in (30.0, 59.99):
        simulation = played(two_turns(GatewayRestart(at_s)))
        assert simulation.restarts == 1
        assert cached(simulation, 1) == ROWS
    for at_s in (0.01, 0.1, 0.2, 0.3):
        simulation = played(two_turns(GatewayRestart(at_s)))
        first, second = simulation.jobs.values()
        assert isinstance(first.error, RingUnavailable)
        assert second.finished is not None
        # All that was told has its rows, but for the last of it.
        assert cached(simulation, 1) >= len(PROMPT) + len(first.tokens) - 1 - (not first.tokens)


def test_rows_that_led_nowhere_are_not_trusted_again() -> None:
    """The first frame of the epoch that should have gone on is lost too: the next one begins with none of the rows."""
    simulation = two_turns(Drop(1, 4), Drop(1, 5))
    seen = held_and_reopened(simulation)
    simulation.run()
    assert simulation.epochs == 2
    assert [reused > 0 for _, reused in seen] == [True, False]
    assert all(held > 0 for held, _ in seen)
    assert all(job.finished for job in simulation.jobs.values())


def test_rows_that_rest_when_an_epoch_ends_are_stored_before_they_are_overwritten() -> None:
    """One turn has ended, a message of another one is lost, and then a third one takes the first one's lane."""
    plan = (
        PlannedJob(0.0, PROMPT, "a", max_new_tokens=2),
        PlannedJob(0.0, tuple(range(30, 50)), "b", max_new_tokens=40),
        PlannedJob(2.9, tuple(range(50, 59)) * 4, "c", max_new_tokens=2),
        PlannedJob(30.0, (7, 8), "a", follows=0, max_new_tokens=2),
    )
    for leg, nth in itertools.product(range(STAGES + 1), range(12, 20)):
        faults = (Drop(leg, nth),)
        sizes = {"stages": STAGES, "lanes": 2, "host_rows": 1000}
        simulation = Simulation(plan, MODEL, settings=SETTINGS, faults=faults, **sizes)
        simulation.run()
        assert simulation.epochs == 1
        assert cached(simulation, 3) == len(PROMPT) + 1


def test_a_story_is_told_of_what_broke() -> None:
    faults: FaultScript = (Drop(1, 4),)
    simulation = two_turns(*faults)
    told = str(simulation._failed("this"))
    assert "this" in told
    assert "faults that struck" in told
