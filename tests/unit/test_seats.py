"""What takes a lost stage's place, and what becomes of places and processes when that fails. No process is started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.errors import ModelUnusable, RingLost
from coordinator.ring import ProgressSink
from stage.actor import Place, Rested
from stage.build import StageReport
from stage.config import RingConfig
from stage.ray_ring.crew import Crew
from stage.ray_ring.seats import Seats

CONFIG = RingConfig(Path("m"), "m", ((0, 1), (1, 2), (2, 3)), spares=2)
REPORT = StageReport(1, "f", 99, 3, "exact", True, "cpu", False, host_bytes=7, memos=4)


class Actor:
    """As much of a Member as seats and spares use."""

    def __init__(self, crew: Troupe, bundle: int, pid: int) -> None:
        self.bundle, self.index, self.loaded = bundle, 0, cast("int | None", None)
        self.loss: str | None = None
        self.holds: int | None = None  # a stage, with its disk
        self.place = Place("node", "host", pid, "space")
        self.where = f"pid={pid} host=host"
        self._crew = crew

    def watch(self, probe_s: float, timeout_s: float) -> None: ...

    async def hear(self, within_s: float) -> None: ...

    def lose(self, reason: str) -> None:
        self.loss = reason
        self._crew.on_lost(self)

    async def ask(self, method: str, *arguments: object, within_s: float) -> Rested:
        if self.loss is not None:
            raise RingLost(self.index, self.loss)
        return Rested()


@dataclass
class Troupe:
    """A Crew whose actors are no processes. `fails` is asked before each load and each taking of a stage."""

    report: StageReport = REPORT
    fails: Callable[[str, Actor, int], Exception | None] = lambda *_: None
    on_lost: Callable[[Actor], None] = lambda _: None

    def __post_init__(self) -> None:
        self.here: list[Actor] = []
        self.loads: list[int] = []
        self.budgets: list[int | None] = []
        self.gate = asyncio.Event()  # that loads wait for
        self.gate.set()
        self._pids = count(1)

    async def place(self) -> tuple[list[int], list[int]]:
        return [0, 1, 2], [3, 4]

    async def hire(self, bundle: int, index: int) -> Actor:
        await asyncio.sleep(0)
        assert bundle not in [actor.bundle for actor in self.here], "two in one place"
        actor = Actor(self, bundle, next(self._pids))
        actor.index = index
        self.here.append(actor)
        return actor

    async def load(self, actor: Actor, index: int, here: int, tell: ProgressSink) -> None:
        actor.index, actor.loaded = index, None
        await self.gate.wait()
        await self._try("load", actor, index)
        self.loads.append(index)
        actor.loaded = index

    async def take(self, actor: Actor, host_bytes: int | None, here: int) -> StageReport:
        assert actor.loaded == actor.index
        await self._try("take", actor, actor.index)
        assert actor.loaded not in [other.holds for other in self.here], "two on one disk"
        actor.holds = actor.loaded
        self.budgets.append(host_bytes)
        return self.report

    async def adopt(self, found: Sequence[tuple[int, int | None, bool]]) -> list[tuple[Any, Any]]:
        """`found`: of each its bundle, what it has loaded, and whether it holds that stage."""
        self.here = [Actor(self, bundle, next(self._pids)) for bundle, _, _ in found]
        about = [
            SimpleNamespace(turn=1, loaded=loaded, report=self.report if holds else None)
            for _, loaded, holds in found
        ]
        return list(zip(self.here, about, strict=True))

    def free_bundles(self) -> list[int]:
        return [bundle for bundle in range(5) if bundle not in [a.bundle for a in self.here]]

    async def dismiss(self, actor: Actor) -> None:
        for _ in range(20):  # longer than anything else here
            await asyncio.sleep(0)
        if actor in self.here:
            self.here.remove(actor)

    async def _try(self, what: str, actor: Actor, index: int) -> None:
        await asyncio.sleep(0)
        if (error := self.fails(what, actor, index)) is not None:
            raise error


class Stand:
    def __init__(self, config: RingConfig = CONFIG) -> None:
        self.crew = Troupe()
        self.seats = Seats(config, cast("Crew", self.crew), lambda _: None)
        self.crew.on_lost = cast("Any", self.seats.spares.lost)

    async def start(self) -> None:
        await self.seats.start()
        await self.settled()
        self.crew.loads.clear()
        self.crew.budgets.clear()

    async def settled(self) -> None:
        """All that happens in the background has happened."""
        for _ in range(100):
            await asyncio.sleep(0)

    def lose(self, *stages: int) -> None:
        for stage in stages:
            self.seats.members[stage].loss = "died"

    async def heal(self) -> None:
        await self.seats.rest(1)
        self.seats.vacate()
        await self.seats.fill()

    async def heal_and_leave(self) -> None:
        """Begins to, and is cancelled while it waits for a load, which ends later."""
        self.crew.gate.clear()
        healing = asyncio.create_task(self.heal())
        await self.settled()
        healing.cancel()
        self.crew.gate.set()
        await self.settled()
        assert healing.cancelled()

    @property
    def pids(self) -> list[int]:
        return [member.place.pid for member in self.seats.members]


@pytest.fixture
async def stand() -> Stand:
    stand = Stand()
    await stand.start()
    return stand


async def test_the_spare_loaded_for_a_stage_takes_its_place_and_is_replaced(stand: Stand) -> None:
    first, _, _ = stand.pids
    spares = stand.seats.spares.pids
    stand.lose(1, 2)
    await stand.heal()
    assert stand.pids[0] == first
    assert set(stand.pids[1:]) == set(spares)
    assert stand.crew.loads == []
    assert stand.crew.budgets == [7, 7]
    await stand.settled()
    assert len(stand.seats.spares) == 2
    assert sorted(actor.bundle for actor in stand.crew.here) == [0, 1, 2, 3, 4]


async def test_another_spare_loads_the_lost_stage_and_a_new_actor_comes_last(stand: Stand) -> None:
    (of_tail, _) = stand.seats.spares.pids
    stand.lose(0)
    await stand.heal()
    assert stand.pids[0] in (of_tail, of_tail + 1)
    assert stand.crew.loads == [0]
    none = Stand(replace(CONFIG, spares=0))
    none.crew.place = lambda: _placed([0, 1, 2], [])  # type: ignore[method-assign]
    await none.start()
    none.lose(0)
    await none.heal()
    assert none.pids[0] == 4
    assert [actor.bundle for actor in none.crew.here] == [1, 2, 0]


async def _placed(stages: list[int], spares: list[int]) -> tuple[list[int], list[int]]:
    return stages, spares


async def test_spares_that_fail_in_taking_over_are_replaced_and_the_next_one_is_tried(
    stand: Stand,
) -> None:
    spares = stand.seats.spares.pids
    stand.crew.fails = lambda what, actor, _: (
        RingLost(2, "died") if what == "take" and actor.place.pid in spares else None
    )
    stand.lose(2)
    await stand.heal()
    assert stand.pids[2] > max(spares)
    await stand.settled()
    assert not {actor.place.pid for actor in stand.crew.here} & set(spares)
    assert len(stand.crew.here) == 5


async def test_a_stage_that_could_not_be_replaced_is_tried_again_and_others_keep_theirs(
    stand: Stand,
) -> None:
    stand.crew.fails = lambda _, actor, index: ModelUnusable("gone") if index == 0 else None
    stand.lose(0, 1)
    with pytest.raises(RingLost, match="stage 0: could not be replaced: gone"):
        await stand.heal()
    (replaced, tail) = stand.pids
    stand.crew.fails = lambda *_: None
    await stand.heal()
    assert stand.pids[1:] == [replaced, tail]


async def test_a_failure_that_nobody_waited_for_is_not_told_to_the_next_one(stand: Stand) -> None:
    stand.crew.fails = lambda _, actor, index: ModelUnusable("gone") if index == 0 else None
    stand.lose(0)
    await stand.heal_and_leave()
    stand.crew.fails = lambda *_: None
    await stand.heal()
    assert len(stand.pids) == 3


async def test_a_replacement_that_nobody_waits_for_is_there_for_the_next_one(stand: Stand) -> None:
    stand.lose(0)
    await stand.heal_and_leave()
    assert stand.crew.loads.count(0) == 1
    await stand.heal()
    assert stand.crew.loads.count(0) == 1


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"fingerprint": "g"}, "reads another model"),
        ({"exact": False, "numerics": "0.1"}, "not as exact as the ring: 0.1"),
        ({"memos": 3}, "room for 3 of 4 memos"),
    ],
)
async def test_whoever_does_not_belong_to_the_ring_is_ended(
    stand: Stand, other: dict[str, Any], why: str
) -> None:
    stand.lose(1)
    stand.crew.report = replace(REPORT, **other)
    with pytest.raises(RingLost, match=f"could not be replaced: .*{why}"):
        await stand.heal()
    assert len(stand.pids) == 2


async def test_a_spare_that_dies_is_replaced_where_it_was(stand: Stand) -> None:
    spare = next(actor for actor in stand.crew.here if actor.place.pid == 4)
    spare.lose("died")
    await stand.settled()
    assert len(stand.seats.spares) == 2
    assert spare not in stand.crew.here
    assert sorted(actor.bundle for actor in stand.crew.here) == [0, 1, 2, 3, 4]


async def test_one_that_was_loading_when_its_gateway_died_gives_an_empty_seat_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As it is found where stage 0 was being replaced; every place is taken."""
    stand = Stand()
    found = [(0, 0, False), (1, 1, True), (2, 2, True), (3, 2, False), (4, 1, False)]
    await stand.seats.adopt(cast("Any", found))
    assert len(stand.seats.spares) == 2
    lost = [each.getMessage() for each in caplog.records if "lost stage" in each.getMessage()]
    assert [line.partition(" reason=")[0] for line in lost] == ["lost stage=0 pid=None host=None"]
    await stand.heal()
    await stand.settled()
    assert len(stand.pids) == 3
    assert len(stand.seats.spares) == 2
    assert sorted(actor.bundle for actor in stand.crew.here) == [0, 1, 2, 3, 4]
