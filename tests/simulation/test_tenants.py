"""Tenants in the scheduler: whole random runs in which a witness follows whose each row is, and scripted ones.

The witness (fakering/owners.py) reads frames alone, so it shares no rule with what it watches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from coordinator import foresight, retention
from coordinator.config import SchedulerSettings
from coordinator.events import NextKnown, Send
from coordinator.foresight import Wish
from coordinator.frames import JobId, NodeId
from coordinator.ledger import Ledger
from coordinator.memos import MemoTable
from coordinator.nodes import NodeTable, root_of
from coordinator.requests import MissKind, SessionId
from fakering.cases import random_case
from fakering.fuzz import run_case
from fakering.model import FakeModel
from fakering.plan import PlannedJob, random_plan
from fakering.simulation import Simulation, SimulationFailed

_END_TOKEN = 59
_MODEL = FakeModel(vocab_size=60, seed=3, quoting=0.5, end_token=_END_TOKEN, end_one_in=40)
_SETTINGS = SchedulerSettings(
    frame_rows=24,
    chunk_rows=8,
    min_chunk_rows=3,
    min_copy_rows=3,
    node_rows=8,
    reply_timeout_s=5.0,
)
_HEAD = tuple(range(1, 33))
_LATER = 10.0


def _played(
    *plan: PlannedJob, lanes: int = 3, max_rows: int = 96, state_rows: int = 0
) -> Simulation:
    simulation = Simulation(
        plan,
        _MODEL,
        lanes=lanes,
        max_rows=max_rows,
        host_rows=400,
        state_rows=state_rows,
        checkpoints=20,
        settings=_SETTINGS,
        end_tokens=frozenset({_END_TOKEN}),
    )
    simulation.run()
    return simulation


def _cached(simulation: Simulation) -> list[int]:
    started = [played.started for played in simulation.jobs.values()]
    return [begun.cached_prefix for begun in started if begun is not None]


def _turn(
    at_s: float, tenant: str, *more: int, session: str | None = None, **rest: object
) -> PlannedJob:
    return PlannedJob(
        at_s,
        (*_HEAD, *more),
        session or f"{tenant}/s",
        tenant=tenant,
        **rest,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("state_rows", [0, 4])
@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("first", ["", "a"])
def test_what_one_tenant_left_another_does_not_find_and_the_first_does(
    first: str, lanes: int, state_rows: int
) -> None:
    """In its lane, in the store once that lane was overwritten, as a memo, and as a branch of it."""
    simulation = _played(
        _turn(0.0, first, 40, 41),
        _turn(_LATER, "b", 40, 41),
        _turn(2 * _LATER, "b", 40, 50, session="b/branch"),
        _turn(3 * _LATER, first, 40, 41),
        _turn(4 * _LATER, first, 40, 50, session=f"{first}/branch"),
        _turn(5 * _LATER, "b", 40, 41),
        lanes=lanes,
        state_rows=state_rows,
    )
    cached = _cached(simulation)
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > 0, "each has what is his own"
    misses = [played.started.miss for played in simulation.jobs.values() if played.started]
    assert misses[1] is not None
    assert misses[1].kind is MissKind.NEW_SESSION


def test_a_head_that_another_tenant_is_prefilling_is_not_waited_for() -> None:
    """It takes a lane when it would beside a prompt that has nothing of it. One's own head is waited for and copied."""
    begun = _turn(0.0, "a", 40)
    other, stranger = _turn(0.01, "b", 41), replace(begun, prompt=(*_HEAD[::-1], 40))
    beside = _played(begun, other, _turn(0.02, "a", 42, session="a/2"))
    assert _cached(beside) == [0, 0, len(_HEAD)]
    waits = [
        run.jobs[JobId(1)].finished.timings.queue_s  # type: ignore[union-attr]
        for run in (beside, _played(stranger, other), _played(begun, replace(other, tenant="a")))
    ]
    assert waits[0] == waits[1] < waits[2]


def test_a_session_id_that_two_tenants_use_is_two_sessions() -> None:
    """The gateway does not let it happen; if it does, nothing of the other's is found or told."""
    simulation = _played(
        _turn(0.0, "a", 40, 41, session="s", next_keeps=33, next_adds=(7, 8, 9)),
        _turn(_LATER, "b", 40, 42, session="s", next_keeps=33, next_adds=(7, 8, 9)),
        _turn(2 * _LATER, "a", 7, 8, 9, 10, session="s"),
    )
    second, third = (simulation.jobs[JobId(n)].started for n in (1, 2))
    assert second is not None
    assert third is not None
    assert (second.cached_prefix, second.miss and second.miss.kind) == (0, MissKind.NEW_SESSION)
    assert second.miss is not None
    assert second.miss.token_index is None
    assert third.cached_prefix >= len(_HEAD)


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_a_wish_is_worked_for_in_its_own_tenants_lane_only(tenant: str) -> None:
    """One that comes late finds the session's name with another's rows, if two tenants could share one."""
    scheduler = _played(_turn(0.0, "a", 40, 41, session="s")).scheduler
    wish = Wish(SessionId("s"), (*_HEAD, 40, 7, 8, 9), tenant=tenant)
    sent = [each for each in scheduler.on(NextKnown(wish, _LATER)) if isinstance(each, Send)]
    rows = sum(segment.width for send in sent for segment in send.frame.segments)
    assert rows == (3 if tenant == "a" else 0)
    assert scheduler.usable_prefix((*wish.tokens, 1), "b") == 0


def test_what_a_ring_is_said_to_hold_is_the_tenants_own() -> None:
    """What the router chooses a ring by, in lanes and in the store."""
    simulation = _played(_turn(0.0, "a", 40, 41), lanes=1)
    asked = simulation.scheduler.usable_prefix
    prompt = (*_HEAD, 40, 41, 42)
    assert asked(prompt, "a") == len(_HEAD) + 2
    assert asked(prompt, "b") == asked(prompt, "") == 0


@pytest.mark.parametrize("seed", range(40))
def test_a_tenant_alone_is_served_as_if_there_were_none(seed: int) -> None:
    """Everything that is reused without tenants is reused within one, and at the same time."""
    plan = random_plan(seed, jobs=10, vocab_size=_END_TOKEN)
    runs = []
    for tenant in ("", "a"):
        named = [replace(planned, tenant=tenant) for planned in plan]
        runs.append(_played(*named, max_rows=160))
    assert [job.started for job in runs[0].jobs.values()] == [
        job.started for job in runs[1].jobs.values()
    ]
    assert [job.finished for job in runs[0].jobs.values()] == [
        job.finished for job in runs[1].jobs.values()
    ]
    assert runs[0].scheduler.counts == runs[1].scheduler.counts


def test_the_fuzzer_draws_runs_in_which_two_tenants_want_the_same() -> None:
    """Else its verdict would be hollow."""
    seeds = [s for s in range(60) if len(_tenants(random_case(s).plan)) == 2]
    assert len(seeds) > 20
    runs = [run_case(seed) for seed in seeds]
    assert sum(run.scheduler.counts.reused_rows for run in runs) > 0
    assert sum(run.scheduler.counts.restored_rows for run in runs) > 0
    assert sum(run.scheduler.counts.ahead_rows for run in runs) > 0
    assert sum(run.scheduler.counts.recalled for run in runs) > 0


def _tenants(plan: Sequence[PlannedJob]) -> set[str]:
    return {planned.tenant for planned in plan}


def _without_tenants(fingerprint: str, tenant: str = "") -> NodeId:
    return root_of(fingerprint)


def _dropped_from_the_root(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(retention, "root_of", _without_tenants)
    patch.setattr(foresight, "root_of", _without_tenants)


def _dropped_from_lanes(patch: pytest.MonkeyPatch) -> None:
    """Rows are matched by their tokens alone, and no replica minds."""
    right = Ledger.usable_prefix
    patch.setattr(
        Ledger,
        "usable_prefix",
        lambda self, lane, prompt, root: right(self, lane, prompt, self.root(lane)),
    )
    _blind(patch)


def _dropped_from_memos(patch: pytest.MonkeyPatch) -> None:
    find, keep, holds = MemoTable.find, MemoTable.keep, MemoTable.holds
    patch.setattr(MemoTable, "find", lambda self, prompt, root: find(self, prompt))
    patch.setattr(MemoTable, "keep", lambda self, slot, prompt, root: keep(self, slot, prompt))
    patch.setattr(MemoTable, "holds", lambda self, slot, prompt, root: holds(self, slot, prompt))


def _blind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "_content_guard", lambda self, op: None)
    differs = NodeTable._chain_differs
    make = NodeTable.make

    def any_root(
        self: NodeTable, last: NodeId, lane: Sequence[int], end: int, root: NodeId
    ) -> str | None:
        fault = differs(self, last, lane, end, root)
        return None if fault == "the chain is of another root" else fault

    patch.setattr(NodeTable, "_chain_differs", any_root)
    patch.setattr(
        NodeTable, "make", lambda self, span, lane, root: make(self, span, lane, span.parent)
    )


@pytest.mark.parametrize(
    "fault", [_dropped_from_the_root, _dropped_from_lanes, _dropped_from_memos]
)
def test_the_fuzzer_sees_what_crosses(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    seen = "goes on behind rows of|another tenant's logits|comes back as"
    with pytest.raises(SimulationFailed, match=seen):
        all(run_case(seed) for seed in range(400))


def test_a_replica_minds_a_row_of_another_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that forgot to ask whose rows these are would not get them: its own ledger refuses the frame."""
    right = Ledger.usable_prefix
    monkeypatch.setattr(
        Ledger,
        "usable_prefix",
        lambda self, lane, prompt, root: right(self, lane, prompt, self.root(lane)),
    )
    with pytest.raises(SimulationFailed, match="the replica refuses its own frame"):
        all(run_case(seed) for seed in range(400))
