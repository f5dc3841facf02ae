"""The real scheduler over the fake network: random turns, random faults, and the oracle after every event."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from coordinator.chain import ChainIndex, ChainMatch
from coordinator.config import SchedulerSettings
from coordinator.errors import StageLost
from coordinator.frames import JobId, LaneId, NodeId
from coordinator.ledger import Ledger
from coordinator.requests import MissKind
from fakering.faults import (
    ALL_FAULTS,
    CorruptRow,
    Drop,
    FaultScript,
    KeepNothing,
    LoseNode,
    Restart,
)
from fakering.fuzz import run_case
from fakering.model import FakeModel
from fakering.plan import PlannedJob
from fakering.simulation import Simulation, SimulationFailed

_MODEL = FakeModel(vocab_size=60, seed=3, quoting=0.5, end_token=59, end_one_in=40)
_SETTINGS = SchedulerSettings(
    frame_rows=24,
    chunk_rows=10,
    min_chunk_rows=3,
    min_copy_rows=3,
    node_rows=8,
    reply_timeout_s=5.0,
)


def _play(seeds: range) -> list[Simulation]:
    return [run_case(seed) for seed in seeds]


def _check_worth(runs: list[Simulation]) -> None:
    """What would make the verdict hollow: nothing reused, nothing speculated, nothing refused, nothing lost."""
    counts = [run.scheduler.counts for run in runs]
    assert sum(count.reused_rows for count in counts) > 0
    assert sum(count.restored_rows for count in counts) > 0
    assert sum(count.ahead_rows for count in counts) > 0
    assert sum(count.recalled for count in counts) > 0
    assert sum(count.pauses for count in counts) > 0
    assert sum(count.accepted for count in counts) > 0
    assert sum(count.discarded_frames for count in counts) > 0
    assert sum(run.refusals for run in runs) > 0
    assert sum(run.epochs for run in runs) > 0
    assert sum(run.restarts for run in runs) > 0
    assert sum(run.void_replies for run in runs) > 0
    struck = {type(fault) for run in runs for fault in run.network.struck}
    assert struck == set(ALL_FAULTS)
    jobs = [job for run in runs for job in run.jobs.values()]
    assert sum(job.finished is not None for job in jobs) > 3 * len(runs)
    assert sum(job.recoveries for job in jobs) > 0
    assert any(isinstance(job.error, StageLost) for job in jobs)


def test_whole_runs_of_random_turns_and_faults_never_change_a_token() -> None:
    """`make fuzz` runs others for as long as it is told."""
    _check_worth(_play(range(300)))


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_20_000_runs_lose_nothing() -> None:
    for first in range(0, 20_000, 500):
        _check_worth(_play(range(first, first + 500)))


def test_the_fuzzer_finds_a_fault_that_was_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token too many is trusted in each reused prefix: an off-by-one of the worst kind."""
    right = Ledger.restore_point

    def wrong(self: Ledger, lane: LaneId, prompt: Sequence[int], most: int, root: NodeId) -> int:
        depth = right(self, lane, prompt, most, root)
        return depth + 1 if 0 < depth < most else depth

    monkeypatch.setattr(Ledger, "restore_point", wrong)
    with pytest.raises(SimulationFailed, match="seed"):
        all(run_case(seed) for seed in range(50))


def test_the_fuzzer_finds_a_chain_that_is_trusted_a_row_too_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node's rows are served up to one row behind where the prompt differs."""
    right = ChainIndex.match

    def wrong(self: ChainIndex, tokens: Sequence[int], root: NodeId) -> ChainMatch:
        match = right(self, tokens, root)
        more = match.rows < len(tokens) and match.nodes
        reach = self.node(match.nodes[-1]).end if more else 0
        return ChainMatch(match.nodes, match.rows + 1) if reach > match.rows else match

    monkeypatch.setattr(ChainIndex, "match", wrong)
    monkeypatch.setattr(Ledger, "_content_guard", lambda self, op: None)
    with pytest.raises(SimulationFailed, match="seed"):
        all(run_case(seed) for seed in range(200))


def test_a_node_that_only_some_stages_have_is_never_served() -> None:
    """Stage 1 keeps nothing: its rows are computed again, the store is given up, and the next turn is warm."""
    simulation = _many_sessions((KeepNothing(stage=1, nth=0), LoseNode(stage=1, nth=0)))
    simulation.run()
    assert all(job.finished for job in simulation.jobs.values())
    assert simulation.scheduler.counts.restored_rows > 0


def _many_sessions(faults: FaultScript = ()) -> Simulation:
    """Two turns each of four sessions that take turns on one lane."""
    dice = random.Random(5)
    heads = [tuple(dice.randrange(50) for _ in range(30)) for _ in range(4)]
    plan = [PlannedJob(3.0 * n, head, f"s{n}") for n, head in enumerate(heads)]
    plan += [PlannedJob(20.0 + 3.0 * n, (7, 8), f"s{n}", follows=n) for n in range(4)]
    return Simulation(
        tuple(plan), _MODEL, lanes=1, settings=_SETTINGS, faults=faults, host_rows=500
    )


def test_sessions_that_share_one_lane_go_on_from_the_store() -> None:
    simulation = _many_sessions()
    simulation.run()
    for number in range(4, 8):
        job = simulation.jobs[JobId(number)]
        assert job.started is not None
        assert job.started.cached_prefix >= 30
        assert job.started.miss is None or job.started.miss.kind is MissKind.EVICTED
    assert simulation.scheduler.counts.restored_rows >= 4 * 30


def _thinking(faults: FaultScript = ()) -> Simulation:
    """The next prompt has the first turn's question, but not what the model thought; the ring is told in time."""
    said = tuple(range(20, 40))
    plan = (
        PlannedJob(0.0, tuple(range(30)), "a", max_new_tokens=8, next_keeps=30, next_adds=said),
        PlannedJob(9.0, (*range(30), *said, 7, 8, 9), "a", max_new_tokens=8),
    )
    return Simulation(plan, _MODEL, settings=_SETTINGS, faults=faults, host_rows=200)


def test_what_the_next_prompt_begins_with_is_prefilled_while_nobody_waits() -> None:
    simulation = _thinking()
    simulation.run()
    second = simulation.jobs[JobId(1)]
    assert second.started is not None
    assert second.started.cached_prefix == 50
    assert second.started.miss is None
    assert simulation.scheduler.counts.ahead_rows == 20


def test_a_stage_that_lost_what_was_computed_ahead_costs_rows_and_no_token() -> None:
    frames = int(_played(_thinking()).network.stages[1].ledger.next_seq)
    for nth in range(frames):
        simulation = _played(_thinking((Restart(stage=1, nth=nth),)))
        assert all(job.finished for job in simulation.jobs.values()), nth


def _played(simulation: Simulation) -> Simulation:
    simulation.run()
    return simulation


def _recurrent(*, checkpoints: int, faults: FaultScript = ()) -> Simulation:
    """Six turns of one conversation and a regenerated one, beside others that take its lane, with recurrent layers."""
    plan = [PlannedJob(0.0, tuple(range(30)), "a", max_new_tokens=9)]
    for n in range(1, 6):
        plan.append(PlannedJob(6.0 * n, (7, n, 9), "a", follows=2 * n - 2, max_new_tokens=9))
        plan.insert(2 * n - 1, PlannedJob(6.0 * n - 3.0, (40 + n,) * 20, f"other{n}"))
    plan.append(PlannedJob(40.0, tuple(range(30)), "a", max_new_tokens=9))
    return Simulation(
        tuple(plan),
        _MODEL,
        lanes=1,
        max_rows=160,
        settings=_SETTINGS,
        faults=faults,
        host_rows=1000,
        state_rows=4,
        checkpoints=checkpoints,
    )


def test_recurrent_layers_go_on_from_checkpoints_and_prefill_nothing_twice() -> None:
    simulation = _played(_recurrent(checkpoints=50))
    turns = [simulation.jobs[JobId(number)] for number in (2, 4, 6, 8, 10)]
    for before, turn in pairwise([simulation.jobs[JobId(0)], *turns]):
        assert turn.started is not None
        assert turn.started.cached_prefix >= len(before.request.prompt) + len(before.tokens) - 4
    again = simulation.jobs[JobId(11)]
    assert again.started is not None
    assert again.started.cached_prefix == 29
    assert simulation.refusals == 0


def test_without_room_for_checkpoints_the_turn_is_cold_and_right() -> None:
    simulation = _played(_recurrent(checkpoints=0))
    assert all(job.finished for job in simulation.jobs.values())
    assert simulation.scheduler.counts.restored_rows == 0
    assert dict(simulation.scheduler.counts.misses)[MissKind.EVICTED] > 0


def test_rows_without_their_state_are_a_miss_of_their_own() -> None:
    """A regenerated answer, long after the lane's state went past the end of its prompt."""
    prompt = tuple(range(30))
    plan = (
        PlannedJob(0.0, prompt, "a", max_new_tokens=20),
        PlannedJob(6.0, prompt, "a", max_new_tokens=20),
    )
    simulation = _played(
        Simulation(plan, _MODEL, settings=_SETTINGS, lanes=1, state_rows=4, host_rows=1000)
    )
    again = simulation.jobs[JobId(1)].started
    assert again is not None
    assert again.cached_prefix == 0
    assert again.miss is not None
    assert again.miss.kind is MissKind.NO_CHECKPOINT


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


def test_a_corrupt_row_that_no_ledger_knows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one fault that no rule of the ledger can catch: in the stage's buffers, and without a look there, in the
    text.
    """
    fault = CorruptRow(stage=1, nth=0, row=11, in_ledger=False)
    with pytest.raises(SimulationFailed, match="stage 1, lane 0: rows of other tokens"):
        _two_turns((fault,)).run()
    monkeypatch.setattr("fakering.simulation.check_rows", lambda *_, **__: None)
    with pytest.raises(SimulationFailed, match="wrong tokens"):
        _two_turns((fault,)).run()


def test_a_dropped_frame_opens_an_epoch_and_the_streams_go_on() -> None:
    simulation = _two_turns((Drop(leg=1, nth=4),))
    simulation.run()
    assert simulation.epochs == 1
    assert all(job.finished for job in simulation.jobs.values())
