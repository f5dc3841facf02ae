"""Constrained jobs in whole runs: drafts, stages, neighbours and faults never change a token, and all of them obey."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from coordinator.config import SchedulerSettings
from coordinator.constraints import allows
from coordinator.errors import ConstraintFailed
from coordinator.frames import Frame, JobId, Segment, SegmentKind
from coordinator.requests import FinishReason
from fakering.faults import Drop, FaultScript, Restart
from fakering.fuzz import run_case
from fakering.model import FakeModel
from fakering.network import Network
from fakering.plan import PlannedJob
from fakering.simulation import Simulation
from fakering.toys import ToyConstraint

_VOCABULARY = 60
_END = 59
_MODEL = FakeModel(_VOCABULARY, seed=3, quoting=0.9, end_token=_END, end_one_in=40)
_SETTINGS = SchedulerSettings(
    frame_rows=24, chunk_rows=10, min_chunk_rows=3, min_copy_rows=3, reply_timeout_s=5.0
)
_LOOSE = ToyConstraint(_VOCABULARY, seed=5, one_in=2, forced_in=4)


def _plan(
    jobs: int, *, draft: bool, sampled: bool, toys: Sequence[ToyConstraint | None]
) -> tuple[PlannedJob, ...]:
    """Jobs that begin together, and quote themselves a lot: their drafts are right now and then."""
    dice = random.Random(11)
    return tuple(
        PlannedJob(
            0.01 * n,
            tuple(dice.randrange(50) for _ in range(6)) * 3,
            f"s{n}",
            max_new_tokens=40,
            seed=77 + n if sampled else None,
            draft=draft,
            constraint=toys[n % len(toys)],
        )
        for n in range(jobs)
    )


def _played(plan: tuple[PlannedJob, ...], faults: FaultScript = (), *, stages: int) -> Simulation:
    simulation = Simulation(
        plan,
        _MODEL,
        stages=stages,
        settings=_SETTINGS,
        faults=faults,
        end_tokens=frozenset({_END}),
    )
    simulation.run()
    return simulation


def _answers(simulation: Simulation) -> list[tuple[int, ...]]:
    return [tuple(job.tokens) for job in simulation.jobs.values()]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("jobs", [1, 3, 7])
def test_drafts_change_no_token_of_a_constrained_job(stages: int, jobs: int, sampled: bool) -> None:
    toys = (_LOOSE, None, ToyConstraint(_VOCABULARY, seed=6))
    runs = [
        _played(_plan(jobs, draft=draft, sampled=sampled, toys=toys), stages=stages)
        for draft in (True, False)
    ]
    assert _answers(runs[0]) == _answers(runs[1])
    for run in runs:
        for job in run.jobs.values():
            toy = job.request.constraint
            assert toy is None or (isinstance(toy, ToyConstraint) and toy.obeyed(job.tokens))
    assert runs[0].scheduler.counts.accepted > 0
    assert runs[1].scheduler.counts.drafted == 0


@pytest.mark.parametrize("stages", [2, 3])
def test_a_job_alone_speculates_ahead_under_its_constraint(stages: int) -> None:
    """Frames sent before the reply have masks of the state behind their own drafts; some of those are wrong."""
    toys = [replace(_LOOSE, seed=seed) for seed in range(12)]
    runs = [_played(_plan(1, draft=True, sampled=False, toys=[toy]), stages=stages) for toy in toys]
    assert sum(run.scheduler.counts.discarded_frames for run in runs) > 0
    assert sum(run.scheduler.counts.accepted for run in runs) > 20


@pytest.mark.parametrize("jobs", [1, 3])
def test_no_draft_that_the_constraint_refuses_is_sent(
    jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row of a frame holds a token that the mask of the row before it lets follow."""
    sent: list[Segment] = []
    send = Network.send

    def recorded(self: Network, frame: Frame, now: float) -> None:
        sent.extend(frame.segments)
        send(self, frame, now)

    monkeypatch.setattr(Network, "send", recorded)
    _played(_plan(jobs, draft=True, sampled=False, toys=[_LOOSE]), stages=2)
    drafts = 0
    for segment in (each for each in sent if each.kind is SegmentKind.VERIFY):
        assert len(segment.masks) == len(segment.sampled_rows)
        for mask, token in zip(segment.masks, segment.tokens[1:], strict=False):
            drafts += 1
            assert allows(mask, token)
    assert drafts > 5


def test_a_constraint_that_lets_only_the_end_follow_ends_the_turn() -> None:
    class OnlyTheEnd(ToyConstraint):
        def _allowed(self, said: Sequence[int]) -> list[int]:
            return [_END] if len(said) == 5 else [7]

    run = _played(_plan(1, draft=True, sampled=True, toys=[OnlyTheEnd(_VOCABULARY)]), stages=2)
    job = run.jobs[JobId(0)]
    assert tuple(job.tokens) == (7, 7, 7, 7, 7, _END)
    assert job.finished is not None
    assert job.finished.reason is FinishReason.STOP


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("fails_at", [0, 1, 9])
def test_a_constraint_that_fails_costs_its_own_job_only(fails_at: int, draft: bool) -> None:
    broken = replace(_LOOSE, fails_at=fails_at)
    run = _played(_plan(5, draft=draft, sampled=False, toys=(None, broken)), stages=2)
    for number, job in run.jobs.items():
        if number % 2:
            assert isinstance(job.error, ConstraintFailed)
            assert len(job.tokens) == fails_at
        else:
            assert job.finished is not None
    assert run.refusals == run.epochs == 0


@pytest.mark.parametrize("jobs", [1, 4])
def test_a_lost_frame_or_lost_rows_change_no_token_of_a_constrained_job(jobs: int) -> None:
    plan = _plan(jobs, draft=True, sampled=True, toys=(_LOOSE,))
    clean = _played(plan, stages=2)
    frames = int(clean.network.stages[1].ledger.next_seq)
    for nth in range(1, frames, 3):
        for fault in (Drop(leg=1, nth=nth), Restart(stage=1, nth=nth)):
            assert _answers(_played(plan, (fault,), stages=2)) == _answers(clean), fault


def test_a_resent_prompt_is_sampled_from_its_memo_under_the_new_constraint() -> None:
    """The memo keeps raw logits: what may follow is the second request's business."""
    prompt = tuple(range(20))
    toys = (None, _LOOSE, replace(_LOOSE, seed=9))
    plan = tuple(
        PlannedJob(3.0 * n, prompt, "a", max_new_tokens=8, constraint=toy)
        for n, toy in enumerate(toys)
    )
    run = _played(plan, stages=2)
    assert run.scheduler.counts.recalled == 2
    for number, toy in enumerate(toys):
        first = run.jobs[JobId(number)].tokens[0]
        assert toy is None or allows(toy.masks((), ())[0], first)


def test_forced_tokens_are_drafts_without_any_drafter_that_knows_them() -> None:
    """Each token is new to the context, and each is the only one that may follow."""
    forced = replace(_LOOSE, forced_in=1, memory=8)
    run = _played(_plan(1, draft=True, sampled=True, toys=[forced]), stages=2)
    counts = run.scheduler.counts
    assert counts.accepted == counts.drafted > 20


def test_the_fuzzer_plays_constrained_jobs_that_end_and_that_fail() -> None:
    jobs = [job for seed in range(40) for job in run_case(seed).jobs.values()]
    constrained = [job for job in jobs if job.request.constraint is not None]
    assert sum(job.finished is not None for job in constrained) > 20
    assert sum(isinstance(job.error, ConstraintFailed) for job in constrained) > 1
