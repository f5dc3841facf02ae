"""One run of a simulation, as a value: drawn from a seed, played, and made smaller while it still fails.

Decides what is drawn and how often. What is right or wrong simulation.py knows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from coordinator.config import SchedulerSettings
from fakering.faults import (
    ALL_FAULTS,
    LEG_FAULTS,
    FailHeal,
    FaultScript,
    GatewayRestart,
    Lose,
    LoseAt,
    Stall,
    random_script,
)
from fakering.model import FakeModel
from fakering.plan import PlannedJob, random_plan
from fakering.simulation import NOTICED, Simulation, SimulationFailed

_VOCABULARY = 60
_END_TOKEN = _VOCABULARY - 1
_JOBS = 8
# As many rows as all jobs together: nothing has to give way.
_ROOM_FOR_ALL = 10_000


@dataclass(frozen=True, slots=True)
class Case:
    """The same case is the same run."""

    seed: int
    plan: tuple[PlannedJob, ...]
    faults: FaultScript
    model: FakeModel
    settings: SchedulerSettings
    stages: int
    lanes: int
    max_rows: int
    exact: bool
    host_rows: int
    state_rows: int
    checkpoints: int
    rest_s: float

    def simulation(self) -> Simulation:
        return Simulation(
            self.plan,
            self.model,
            stages=self.stages,
            lanes=self.lanes,
            max_rows=self.max_rows,
            exact=self.exact,
            host_rows=self.host_rows,
            state_rows=self.state_rows,
            checkpoints=self.checkpoints,
            rest_s=self.rest_s,
            settings=self.settings,
            faults=self.faults,
            end_tokens=frozenset({_END_TOKEN}),
        )

    def __str__(self) -> str:
        jobs = "\n  ".join(f"{number}: {job}" for number, job in enumerate(self.plan))
        faults = "\n  ".join(map(str, self.faults)) or "none"
        sizes = (
            f"stages={self.stages} lanes={self.lanes} max_rows={self.max_rows} exact={self.exact} "
            f"host_rows={self.host_rows} state_rows={self.state_rows} "
            f"checkpoints={self.checkpoints} rest_s={self.rest_s}"
        )
        return f"{sizes}\n{self.settings}\njobs:\n  {jobs}\nfaults:\n  {faults}"


def random_case(seed: int) -> Case:
    """Eight jobs over a ring of odd sizes, most times with faults."""
    dice = random.Random(seed)
    stages = dice.randint(1, 4)
    settings = _random_settings(dice)
    model = FakeModel(
        _VOCABULARY,
        seed=seed,
        quoting=dice.choice((0.0, 0.5, 0.9, 1.0)),
        end_token=_END_TOKEN,
        end_one_in=dice.choice((8, 40, 400)),
    )
    tenants = dice.choice((("",), ("a", "b"), ("", "a")))
    plan = random_plan(
        seed,
        jobs=_JOBS,
        vocab_size=_END_TOKEN,
        head=dice.choice((0, 4, 20, 40)),
        tenants=tenants,
        within_s=dice.choice((1.0, 1.0, 5.0)),
    )
    case = Case(
        seed,
        plan,
        _random_faults(dice, seed, stages),
        model,
        settings,
        stages,
        lanes=dice.choice((1, 2, 3, 8)),
        max_rows=dice.choice((24, 64, 160)),
        exact=dice.random() < 0.75,
        host_rows=dice.choice((0, 8, 60, 60, 1000, _ROOM_FOR_ALL)),
        state_rows=dice.choice((0, 0, 4, 16)),
        checkpoints=dice.choice((0, 1, 3, 50)),
        rest_s=dice.choice((0.5, 4.0)),
    )
    return _roomy(dice, case, tenants) if dice.random() < 0.25 else case


def _roomy(dice: random.Random, case: Case, tenants: Sequence[str]) -> Case:
    """Few lanes, a large store and turns that come one after the other: whatever is not reused is a fault."""
    head, within_s = dice.choice((0, 20)), dice.choice((3.0, 8.0))
    shared = tenants[:1] if dice.random() < 0.5 else tenants
    plan = random_plan(case.seed, _JOBS, _END_TOKEN, head=head, tenants=shared, within_s=within_s)
    return replace(
        case,
        plan=plan,
        settings=replace(case.settings, min_copy_rows=1),
        faults=tuple(fault for fault in case.faults if isinstance(fault, NOTICED)),
        lanes=dice.choice((1, 2, 2)),
        max_rows=160,
        exact=True,
        host_rows=_ROOM_FOR_ALL,
        state_rows=0,
    )


def _random_settings(dice: random.Random) -> SchedulerSettings:
    chunk_rows = dice.choice((1, 4, 10, 64))
    return SchedulerSettings(
        frame_rows=chunk_rows * dice.choice((1, 2, 5)),
        chunk_rows=chunk_rows,
        min_chunk_rows=dice.choice((1, 3)),
        min_copy_rows=dice.choice((1, 3, 16)),
        node_rows=dice.choice((1, 4, 16)),
        max_drafts=dice.choice((0, 1, 3, 15)),
        max_stretch=dice.choice((1.0, 2.5, 10.0)),
        queue_limit=dice.choice((1, 4, 64)),
        reply_timeout_s=dice.choice((0.5, 5.0)),
        heal_attempts=dice.choice((1, 2, 5, 5)),
    )


# What is drawn from together: nothing, what legs do, what costs stages, and anything.
_KINDS = ((), LEG_FAULTS, (Lose, LoseAt, Stall, *LEG_FAULTS), ALL_FAULTS, ALL_FAULTS)


def _random_faults(dice: random.Random, seed: int, stages: int) -> FaultScript:
    kinds = dice.choice(_KINDS)
    faults: FaultScript = ()
    if kinds:
        frames, count = dice.choice((10, 40, 80)), dice.choice((1, 2, 4, 8))
        faults = random_script(seed, stages, frames, count=count, kinds=kinds, longest_s=8.0)
    if faults and dice.random() < 0.25:
        # Again and again: now and then for good.
        begin, times = dice.randrange(3), dice.randint(1, 6)
        faults += tuple(
            FailHeal(nth, dice.choice((None, dice.randint(0, stages))))
            for nth in range(begin, begin + times)
        )
    if dice.random() < 0.25:
        restarts = dice.randint(1, 2)
        faults += tuple(GatewayRestart(dice.uniform(0.0, 6.0)) for _ in range(restarts))
    return faults


# Smaller


def shrunk(case: Case) -> Case:
    """The failing case without faults and jobs that it does not take to fail, in whatever way."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _without_one(case):
            if fails(candidate):
                case, smaller = candidate, True
                break
    return case


def fails(case: Case) -> bool:
    try:
        case.simulation().run()
    except SimulationFailed:
        return True
    return False


def _without_one(case: Case) -> Iterator[Case]:
    for place in range(len(case.faults)):
        yield replace(case, faults=case.faults[:place] + case.faults[place + 1 :])
    for place in range(len(case.plan) - 1, -1, -1):
        if len(case.plan) > 1 and all(job.follows != place for job in case.plan):
            yield replace(case, plan=_without_job(case.plan, place))


def _without_job(plan: tuple[PlannedJob, ...], place: int) -> tuple[PlannedJob, ...]:
    """Nobody follows it."""
    rest = plan[:place] + plan[place + 1 :]
    return tuple(
        replace(job, follows=job.follows - 1)
        if job.follows is not None and job.follows > place
        else job
        for job in rest
    )
