"""The fuzzer finds what would lose rows, tokens or jobs when an epoch ends: faults planted one at a time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from coordinator import scheduler as core
from coordinator.chain import ChainIndex
from coordinator.frames import Epoch
from coordinator.held import HeldLane, Holding, held_by_all
from coordinator.lanes import LaneTable
from coordinator.recovery import Recovery
from fakering import cases
from fakering.fuzz import explained, run_case
from fakering.simulation import SimulationFailed
from fakering.stages import FakeStage

Plant = Callable[[pytest.MonkeyPatch], None]


def held_too_short(patch: pytest.MonkeyPatch) -> None:
    """The last row that all have is left out."""

    def wrong(holdings: Sequence[Holding]) -> Holding:
        held = held_by_all(holdings)
        shorter = (replace(lane, tokens=array("i", lane.tokens[:-1])) for lane in held.lanes)
        return replace(held, lanes=tuple(shorter))

    patch.setattr("fakering.network.held_by_all", wrong)


def held_by_the_first(patch: pytest.MonkeyPatch) -> None:
    """What the first stage has all others have too."""
    patch.setattr("fakering.network.held_by_all", lambda holdings: holdings[0])


def lanes_never_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recovery, "trusts_rows", property(lambda self: False))


def rows_trusted_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recovery, "trusts_rows", property(lambda self: True))


def nodes_not_asked_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChainIndex, "reconcile", lambda self, nodes, resumable: None)


def seats_kept(patch: pytest.MonkeyPatch) -> None:
    """Sessions keep lanes whose rows are gone."""
    patch.setattr(LaneTable, "forget_empty", lambda self: self._all())


def told_twice(patch: pytest.MonkeyPatch) -> None:
    emit = core.events.Emit

    def twice(actions: list[object]) -> list[object]:
        again = [a for a in actions if isinstance(a, emit) and isinstance(a.event, core.Recovering)]
        return [*again, *actions]

    on = core.Scheduler.on
    patch.setattr(core.Scheduler, "on", lambda self, event: twice(on(self, event)))


def stage_forgets(patch: pytest.MonkeyPatch) -> None:
    """The stage begins with nothing, whatever is held."""
    begin = FakeStage.open_epoch

    def wrong(self: FakeStage, epoch: Epoch, held: Holding | None = None) -> None:
        begin(self, epoch, replace(held, lanes=(HeldLane(),)) if held else None)

    patch.setattr(FakeStage, "open_epoch", wrong)


@pytest.mark.parametrize(
    ("plant", "seen"),
    [
        (held_too_short, "not what all stages have"),
        (held_by_the_first, "other nodes than all stages have|not what all stages have"),
        (lanes_never_held, "is opened at|is wrong of lane"),
        (rows_trusted_for_ever, "is opened at"),
        (nodes_not_asked_for, "the replica refuses its own frame|the index|a store of|are held"),
        (seats_kept, "is a session's"),
        (told_twice, "hears twice"),
        (stage_forgets, "begins with other lanes"),
    ],
)
def test_a_planted_fault_is_found(plant: Plant, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(SimulationFailed, match=seen):
        all(run_case(seed) for seed in range(60))


def test_a_failing_seed_tells_its_story_and_the_least_of_it_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held_too_short(monkeypatch)
    failed = next(seed for seed in range(50) if cases.fails(cases.random_case(seed)))
    with pytest.raises(SimulationFailed) as told:
        run_case(failed)
    assert str(told.value).startswith(f"seed {failed}: at ")
    for part in ("events:", "submitted job=", "faults that struck:"):
        assert part in str(told.value)
    small = cases.shrunk(cases.random_case(failed))
    assert len(small.plan) <= 2
    assert len(small.faults) <= 1
    assert cases.fails(small)
    assert str(small) in explained(failed)
