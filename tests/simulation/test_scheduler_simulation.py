"""The real scheduler over the fake network: random turns, random faults, and the oracle after every event."""

from __future__ import annotations

import pytest

from coordinator.config import SchedulerSettings
from coordinator.errors import StageLost
from coordinator.frames import JobId
from fakering.faults import (
    CorruptRow,
    Delay,
    Drop,
    Duplicate,
    FaultScript,
    Refuse,
    Reorder,
    Restart,
    Stall,
    random_script,
)
from fakering.model import FakeModel
from fakering.simulation import PlannedJob, Simulation, SimulationFailed, random_plan

_MODEL = FakeModel(vocab_size=60, seed=3, quoting=0.5, end_token=59, end_one_in=40)
_SETTINGS = SchedulerSettings(
    frame_rows=24, chunk_rows=10, min_chunk_rows=3, min_copy_rows=3, reply_timeout_s=5.0
)
# All but the loss of a stage: a ring that is not rebuilt fails its jobs, and is tested apart.
_SURVIVED = (Delay, Drop, Duplicate, Reorder, Restart, CorruptRow, Refuse, Stall)


def _simulation(seed: int, faults: FaultScript = (), stages: int = 2) -> Simulation:
    return Simulation(
        random_plan(seed, jobs=8, vocab_size=59),
        _MODEL,
        stages=stages,
        max_rows=160,
        exact=seed % 4 != 0,  # else prompts are cut by the cut plan
        settings=_SETTINGS,
        faults=faults,
        end_tokens=frozenset({59}),
    )


@pytest.mark.parametrize("block", range(10))
def test_random_turns_without_faults(block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        simulation = _simulation(seed, stages=1 + seed % 3)
        try:
            simulation.run()
        except SimulationFailed as failed:
            raise AssertionError(f"seed {seed}") from failed
        assert simulation.epochs == 0
        assert any(job.finished for job in simulation.jobs.values())


@pytest.mark.parametrize("block", range(10))
def test_faults_cost_time_and_never_a_token(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        stages = 1 + seed % 3
        faults = random_script(seed, stages, frames=40, kinds=_SURVIVED, longest_s=8.0)
        simulation = _simulation(seed, faults, stages)
        try:
            simulation.run()
        except SimulationFailed as failed:
            raise AssertionError(f"seed {seed}, faults {faults}") from failed
        failures = [job.error for job in simulation.jobs.values() if job.error is not None]
        assert not any(isinstance(error, StageLost) for error in failures), (seed, faults)


def _two_turns(faults: FaultScript = ()) -> Simulation:
    plan = (
        PlannedJob(0.0, tuple(range(30)), session="a", max_new_tokens=8),
        PlannedJob(5.0, (7, 8, 9), session="a", follows=0, max_new_tokens=8),
    )
    return Simulation(plan, _MODEL, settings=_SETTINGS, faults=faults)


def test_the_second_turn_starts_behind_the_rows_of_the_first() -> None:
    simulation = _two_turns()
    simulation.run()
    second = simulation.jobs[JobId(1)]
    assert second.started is not None
    assert second.started.miss is None
    # All rows of the first turn but the last sampled token's, which was never written.
    assert second.started.cached_prefix == 30 + 8 - 1


def test_rows_lost_on_one_stage_are_computed_again() -> None:
    first = _two_turns()
    first.run()
    frames = int(first.network.stages[1].ledger.next_seq)
    for nth in range(frames):
        simulation = _two_turns((Restart(stage=1, nth=nth),))
        simulation.run()
        assert all(job.finished for job in simulation.jobs.values()), nth
        assert simulation.epochs == 0


def test_a_corrupt_row_is_caught_when_the_lane_is_reopened() -> None:
    simulation = _two_turns((CorruptRow(stage=1, nth=0, row=11),))
    simulation.run()
    assert simulation.refusals >= 1
    second = simulation.jobs[JobId(1)]
    assert second.started is not None
    assert second.started.cached_prefix == 0


def test_a_corrupt_row_that_no_ledger_knows_changes_the_text() -> None:
    """Shows that the oracle can fail: the one fault that no rule of the ledger can catch."""
    simulation = _two_turns((CorruptRow(stage=1, nth=0, row=11, in_ledger=False),))
    with pytest.raises(SimulationFailed, match="wrong tokens"):
        simulation.run()


def test_a_dropped_frame_opens_an_epoch_and_the_streams_go_on() -> None:
    simulation = _two_turns((Drop(leg=1, nth=4),))
    simulation.run()
    assert simulation.epochs == 1
    assert all(job.finished for job in simulation.jobs.values())
