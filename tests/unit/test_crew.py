"""What becomes of a ring's actors once another gateway drives them. No process is started."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from coordinator.errors import RingLost
from stage.config import RingConfig
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
