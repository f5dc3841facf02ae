"""What others saw when a stage failed in the middle of a turn: what the session's next turn is computed from.

On fake rings in virtual time; every stream is held against what a cold ring gives.
"""

from __future__ import annotations

import math
from functools import partial

import pytest

from coordinator.config import SchedulerSettings
from coordinator.frames import JobId
from fakering.faults import Drop, Fault, Lose, Stall
from fakering.model import FakeModel
from fakering.simulation import PlannedJob, Simulation
from fakering.texts import novel

MODEL = FakeModel(vocab_size=90, seed=5)
SETTINGS = SchedulerSettings(
    frame_rows=32,
    chunk_rows=10,
    min_chunk_rows=4,
    min_copy_rows=4,
    node_rows=8,
    reply_timeout_s=5.0,
)
TEXT = novel(74, 1, 90)
FIRST = 24  # rows of the first prompt
COUNT = 6
ALL = 3 * 96  # rows of three lanes: whatever is kept finds room


def _dialogue(fault: Fault | None, cancel_after_s: float | None = None) -> Simulation:
    """The third turn goes on from the first, behind a second one whose long prompt a stage fails in."""
    plan = (
        PlannedJob(0.0, TEXT[:FIRST], session="s", max_new_tokens=COUNT),
        PlannedJob(
            2.0,
            TEXT[FIRST:],
            session="s",
            follows=0,
            max_new_tokens=COUNT,
            cancel_after_s=cancel_after_s,
        ),
        PlannedJob(40.0, novel(20, 9, 90), session="s", follows=0, max_new_tokens=COUNT),
    )
    faults = () if fault is None else (fault,)
    return Simulation(plan, MODEL, settings=SETTINGS, faults=faults, host_rows=ALL)


def _frames_of_second_turn() -> range:
    """The frames that reach a stage while the second turn runs, and that prefill it."""
    seen = []
    simulation = _dialogue(None)
    while simulation._step():
        seen.append((simulation.now, int(simulation.network.stages[1].ledger.next_seq)))
    first = max(count for when, count in seen if when < 2.0)
    last = max(count for when, count in seen if when < 40.0)
    return range(first, min(first + 6, last))


FAULTS = {
    "a message to it is lost": partial(Drop, 1),
    "its reply is lost": partial(Drop, 2),
    "it dies": partial(Lose, 1),
    "it dies behind it": partial(Lose, 1, passes_on=True),
    "it dies and finds its nodes": partial(Lose, 1, keeps=1.0),
    "it hangs": partial(Stall, 1, seconds=math.inf),
}
SURVIVES = ("a message to it is lost", "its reply is lost", "it dies and finds its nodes")


@pytest.mark.parametrize("cancel_after_s", [None, 0.05])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_turn_behind_a_failed_one_goes_on_from_what_survived_of_the_first(
    fault: str, cancel_after_s: float | None
) -> None:
    """sgl-project/sglang#40252: a turn that failed half-way is committed as the session's checkpoint."""
    reused = epochs = 0
    for nth in _frames_of_second_turn():
        simulation = _dialogue(FAULTS[fault](nth=nth), cancel_after_s)
        simulation.run()  # every stream is held against the oracle
        third = simulation.jobs[JobId(2)]
        assert third.finished is not None, nth
        assert third.started is not None
        # No row of the second turn's own: its question, or its answer. (A cancelled one may leave the fault to it.)
        assert third.started.cached_prefix <= FIRST + COUNT or third.recoveries, nth
        reused += third.started.cached_prefix >= FIRST
        epochs += simulation.epochs
    assert epochs > 0
    if fault in SURVIVES:
        assert reused == len(_frames_of_second_turn())
