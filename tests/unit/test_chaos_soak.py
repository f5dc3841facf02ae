"""What a soak calls flat: a leak is found whatever leaks it, and what a sound process does over an hour is none."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest

from coordinator.errors import SetupError
from coordinator.router import Router
from gateway.chaos.flat import Allowance, growth
from gateway.chaos.moments import SeenRing
from gateway.chaos.picture import plot_soak
from gateway.chaos.processes import Weight
from gateway.chaos.soak import GATEWAY, Held, Looked, Soak, check_place

MIB = 2**20
# Of a minute, which is six looks.
Curve = Callable[[float, random.Random], float]
LEAK = 1e6 / MIB


def soaked(
    curve: Curve,
    *,
    minutes: int = 30,
    life: float = math.inf,
    descriptors: Curve = lambda *_: 50.0,
    seed: int = 0,
    role: str = GATEWAY,
) -> Soak:
    """`life`: minutes until another process has the role."""
    soak, dice = Soak(cast("Router", None), []), random.Random(seed)
    for look in range(minutes * 6):
        at_m = look / 6
        weight = Weight(0, int(curve(at_m, dice) * MIB), int(descriptors(at_m, dice)), 30)
        soak.processes.append(Looked(10.0 * look, role, int(at_m // life), weight))
    return soak


def grows(soak: Soak) -> set[str]:
    return {each.what for each in soak.growths() if not each.is_flat}


def swings(dice: random.Random, mib: float = 6.0) -> float:
    return dice.gauss(0, mib)


@pytest.mark.parametrize("minutes", [30, 60])
@pytest.mark.parametrize("mean", [60, 360, 800, 4000])
@pytest.mark.parametrize("seed", range(4))
def test_a_megabyte_a_minute_is_found_in_a_process_of_any_size(
    minutes: int, mean: int, seed: int
) -> None:
    soak = soaked(lambda at, dice: mean + at * LEAK + swings(dice), minutes=minutes, seed=seed)
    assert grows(soak) == {"MiB of memory"}


def test_a_leak_that_comes_in_steps_is_found() -> None:
    assert grows(soaked(lambda at, dice: 360 + 10 * (at // 10) * LEAK + swings(dice, 2)))


SOUND: dict[str, Curve] = {
    "noise": lambda _, dice: 400 + swings(dice),
    "much noise": lambda _, dice: 400 + swings(dice, 30),
    "caches fill": lambda at, dice: 340 + 60 * (1 - math.exp(-at / 3)) + swings(dice),
    "something is loaded late": lambda at, dice: 360 + 40 * (at > 6) + swings(dice),
    "it swings in a period": lambda at, dice: 400 + 8 * math.sin(at * 2) + swings(dice),
    "it falls": lambda at, dice: 500 - at + swings(dice),
}


@pytest.mark.parametrize("minutes", [30, 60])
@pytest.mark.parametrize("what", SOUND)
@pytest.mark.parametrize("seed", range(4))
def test_warm_up_and_noise_are_flat(what: str, minutes: int, seed: int) -> None:
    assert grows(soaked(SOUND[what], minutes=minutes, seed=seed)) == set()


@pytest.mark.parametrize("seed", range(8))
def test_a_stage_that_is_replaced_again_and_again_begins_small_and_that_is_no_leak(
    seed: int,
) -> None:
    def curve(at: float, dice: random.Random) -> float:
        return 380 + 60 * (1 - math.exp(-(at % 2))) + swings(dice, 15)

    assert grows(soaked(curve, life=2, seed=seed)) == set()


def test_replacements_that_are_larger_each_time_are_found() -> None:
    assert grows(soaked(lambda at, dice: 380 + 2 * (at // 2) * LEAK + swings(dice), life=2))


def test_a_survivor_that_grows_with_each_kill_of_its_neighbour_is_found() -> None:
    """Each look is one of fifteen minutes of one process, behind fifteen minutes of processes that lived for one."""

    def pid_of(at: float) -> int:
        return int(at) if at < 15 else 99

    soak, dice = Soak(cast("Router", None), []), random.Random(3)
    for look in range(180):
        at = look / 6
        age = at % 1 if at < 15 else at - 15
        weight = Weight(0, int((1000 + 60 * int(age) + swings(dice)) * MIB), 50, 30)
        soak.processes.append(Looked(10.0 * look, GATEWAY, pid_of(at), weight))
    assert grows(soak) == {"MiB of memory"}


@pytest.mark.parametrize("seed", range(4))
def test_what_a_stages_allocator_holds_back_is_flat_and_a_leak_of_frames_is_not(seed: int) -> None:
    def steps(at: float, dice: random.Random) -> float:
        return 1000 + 28 * (at // 4 % 2) + swings(dice)

    def leaks(at: float, dice: random.Random) -> float:
        return steps(at, dice) + 5 * at

    stage = "ring-0 stage 1"
    assert grows(soaked(steps, life=15, seed=seed, role=stage)) == set()
    assert grows(soaked(leaks, life=15, seed=seed, role=stage)) == {"MiB of memory"}


def test_a_descriptor_for_each_kill_is_found_and_some_that_come_and_go_are_not() -> None:
    def calm(_: float, __: random.Random) -> float:
        return 400.0

    assert grows(soaked(calm, descriptors=lambda at, _: 50 + at)) == {"descriptors"}
    assert grows(soaked(calm, descriptors=lambda at, dice: 50 + dice.randrange(6))) == set()


def test_a_finding_is_told_in_units_that_can_be_read() -> None:
    (found,) = (each for each in soaked(lambda at, _: 360 + at).growths() if not each.is_flat)
    told = "gateway: MiB of memory rises by 29.8 over the run, from about 380: 14.9 may be"
    assert str(found) == told


def test_too_few_values_say_nothing() -> None:
    few: Sequence[float] = [10.0 * n for n in range(7)]
    assert growth("a", "b", few, few, Allowance(1.0)) is None
    assert growth("a", "b", [*few, 70.0], [*few, 70.0], Allowance(1.0)) is not None


async def test_a_soak_that_cannot_look_is_no_flat_one() -> None:
    class Blind(Soak):
        async def look(self) -> None:
            raise RuntimeError("the ring is gone")

    blind = Blind(cast("Router", None), cast("list[SeenRing]", []))
    with pytest.raises(RuntimeError, match="the ring is gone"):
        async with blind.looking():
            await asyncio.sleep(0)


def test_a_place_that_cannot_be_written_is_refused_before_the_storm(tmp_path: Path) -> None:
    check_place(tmp_path / "deep" / "soak.json")
    assert (tmp_path / "deep").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="soak.json cannot be written"):
        check_place(tmp_path / "file" / "soak.json")


def test_a_soak_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    soak = soaked(SOUND["noise"])
    soak.rings += [Held(10.0 * n, "ring-0", 100 + n, 500, 8) for n in range(180)]
    plot_soak(tmp_path / "soak.png", soak, [soak.begin_s + 60 * n for n in range(30)])
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
