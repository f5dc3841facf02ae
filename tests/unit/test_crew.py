"""What becomes of a ring's actors once another gateway drives them. No process is started."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.errors import RingLost, RingTaken
from coordinator.ring import StageProgress
from stage.config import RingConfig
from stage.lease import Owner
from stage.ray_ring import crew as crew_file
from stage.ray_ring.crew import Crew

CONFIG = RingConfig(Path("m"), "m", ((0, 1), (1, 2)), detached=True, name="m-0")


class Actor:
    """As much of a Member as its end takes."""

    def __init__(self, index: int, *, taken: bool) -> None:
        self.index, self.bundle, self.taken = index, index, taken
        self.became = ""

    async def end(self) -> None:
        self.became = "ended"

    async def leave(self) -> None:
        self.became = "left"


def crew_of(*actors: Actor) -> tuple[Crew, list[Any]]:
    crew = Crew(CONFIG, lambda _: None)
    crew._members.update(actors)  # type: ignore[arg-type]
    return crew, list(actors)


async def test_what_another_gateway_has_taken_is_left_to_it_and_its_place_too() -> None:
    crew, actors = crew_of(Actor(0, taken=True), Actor(1, taken=False))
    crew.taken = True
    group: Any = object()
    crew._group = group
    await crew.end()
    assert crew._group is group
    assert [actor.became for actor in actors] == ["left", "left"]


async def test_what_was_being_made_when_the_ring_was_taken_is_ended_and_nothing_else_is() -> None:
    crew, actors = crew_of(Actor(0, taken=True), Actor(1, taken=False))
    crew.taken = True
    for actor in actors:
        await crew.dismiss(actor)
    assert [actor.became for actor in actors] == ["left", "ended"]
    with pytest.raises(RingLost, match="it was taken from this gateway"):
        await crew.hire(0, 0)


def test_a_loss_that_a_stage_raises_arrives_as_what_it_is() -> None:
    lost = pickle.loads(pickle.dumps(RingLost(1, "cannot listen at 192.0.2.1: no port is free")))
    assert (lost.stage, str(lost)) == (1, "stage 1: cannot listen at 192.0.2.1: no port is free")
    taken = pickle.loads(pickle.dumps(RingTaken(None, "it was taken")))
    assert (type(taken), str(taken), taken.for_good) == (RingTaken, "it was taken", True)


def test_a_ring_that_was_taken_says_who_has_it_now() -> None:
    crew, _ = crew_of()
    crew.taker = Owner("x", "h1", 7, grpc="h1:50051")
    assert str(crew.taken_away()).endswith("by a gateway that serves at h1:50051 (host h1, pid 7)")
    crew.taker = Owner("x", "h1", 7, role="`ringserve stop --force`")
    assert str(crew.taken_away()).endswith("by `ringserve stop --force` (host h1, pid 7)")


async def test_a_ring_whose_places_are_gone_was_ended_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crew, _ = crew_of()
    crew._group = object()  # type: ignore[assignment]
    monkeypatch.setattr(crew_file, "placement_group_table", lambda _: {"state": "REMOVED"})
    with pytest.raises(RingTaken, match="`ringserve stop`"):
        await crew.hire(0, 0)
    assert crew.taken


class Loading:
    """As much of a Member as its load takes: it tells of progress for a while, and never ends."""

    def __init__(self, tells: Callable[[float], StageProgress]) -> None:
        self.index, self.loaded, self.loss, self.ends = 0, None, "", False
        self.where = "pid=7 host=h1"
        self._tells = tells
        self._began = asyncio.get_running_loop().time()

    def call(self, method: str, *_: object) -> asyncio.Task[Any]:
        async def answer() -> StageProgress | None:
            if method == "load":
                if not self.ends:
                    await asyncio.Event().wait()
                return None
            return self._tells(asyncio.get_running_loop().time() - self._began)

        return asyncio.create_task(answer())

    async def wait(self, calls: set[asyncio.Task[Any]], within_s: float) -> None:
        await asyncio.wait(calls, timeout=within_s)
        if self.loss:
            raise RingLost(0, self.loss)

    async def ask(self, method: str, *, within_s: float) -> Any:
        return await self.call(method)

    def lose(self, reason: str) -> None:
        self.loss = reason

    def unwatch(self) -> None:
        """Nobody watches."""


async def test_a_load_that_hangs_says_where_and_one_that_is_slow_does_not_count_as_hung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No weight is loaded while the numerics are probed, which takes long where the machine is busy."""
    monkeypatch.setattr(crew_file, "_PROGRESS_EVERY_S", 0.01)

    def tells(at_s: float) -> StageProgress:
        return StageProgress(0, 12, 12, "probing numerics", steps=int(min(at_s, 0.6) / 0.02))

    crew = Crew(replace(CONFIG, load_s=0.2), lambda _: None)
    member: Any = Loading(tells)
    began = asyncio.get_running_loop().time()
    with pytest.raises(RingLost, match="at probing numerics: --load-timeout-s says how long"):
        await crew.load(member, 0, 1, lambda _: None)
    assert asyncio.get_running_loop().time() - began > 0.6


async def test_a_loaded_stage_says_where_it_runs() -> None:
    """Operators look for a process before it is lost, too."""
    crew, told = Crew(CONFIG, lambda _: None), list[StageProgress]()
    member: Any = Loading(lambda _: StageProgress(0, 12, 12, "ready"))
    member.ends = True
    await crew.load(member, 0, 1, told.append)
    assert told[-1].note == "ready pid=7 host=h1"
