"""The detached rings of a cluster, as anybody sees them: found by name, told of, ended.

Decides how actors of detached rings are called, and what may be done to a ring without driving it. What actors say
here is JSON, not our classes: a ring that another version left behind is seen, and can be ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group_table,
    remove_placement_group,
)

from coordinator.errors import SetupError
from stage.lease import Owner, Tenure
from stage.processes import has_ended
from stage.ray_ring.cluster import NAMESPACE

# A stage that loads, or computes, answers all the same.
_ANSWER_S = 5.0
# For a gateway to hear that its stages are another one's before it hears of their deaths: two messages.
_NOTICE_S = 0.5


@dataclass(frozen=True, slots=True)
class StageSight:
    """One process of a ring."""

    stage: int | None  # None: it waits as a spare, or loads
    node: str = ""
    pid: int = 0
    answers: bool = True


@dataclass(frozen=True, slots=True)
class RingSight:
    """A detached ring of the cluster."""

    name: str
    model: str = ""
    fingerprint: str = ""
    epoch: int = 0
    tenure: Tenure | None = None  # None: nobody drives it
    rows: tuple[int, ...] = ()  # that each lane holds
    max_rows: int = 0
    splits: tuple[tuple[int, int], ...] = ()
    stages: tuple[StageSight, ...] = ()


def actor_name(ring: str, index: int, generation: int) -> str:
    """`generation`: counts the ring's actors, since a stage that is replaced gets a new one."""
    return f"{ring}/stage-{index}/{generation}"


def ring_of(actor: str) -> str:
    return actor.rsplit("/", 2)[0]


def generation_of(actor: str) -> int:
    last = actor.rpartition("/")[2]
    return int(last) if last.isdecimal() else 0


def named_actors() -> dict[str, Any]:
    """Handles of all detached rings' actors, by name. Those that end meanwhile are left out."""
    found = {}
    for each in list_named_actors(all_namespaces=True):
        if each["namespace"] == NAMESPACE and each["name"].count("/") >= 2:
            with contextlib.suppress(ValueError):
                found[each["name"]] = ray.get_actor(each["name"], namespace=NAMESPACE)
    return found


def actors_of(ring: str) -> dict[str, Any]:
    return {name: actor for name, actor in named_actors().items() if ring_of(name) == ring}


def group_of(ring: str) -> PlacementGroup | None:
    try:
        return get_placement_group(ring)
    except ValueError:
        return None


async def asked(actor: Any, method: str, *arguments: object, within_s: float) -> Any:
    """Raises RayError, or TimeoutError."""
    return await asyncio.wait_for(getattr(actor, method).remote(*arguments), within_s)


async def rings() -> tuple[RingSight, ...]:
    """All detached rings. Ray must be connected."""
    actors = await asyncio.to_thread(named_actors)
    names = {ring_of(name) for name in actors} | await asyncio.to_thread(_empty_groups)
    told = await asyncio.gather(*map(_told, actors.values()))
    summaries = list(zip(actors, told, strict=True))
    return tuple(
        _sight(ring, [told for name, told in summaries if ring_of(name) == ring])
        for ring in sorted(names)
    )


async def find_ring(name: str) -> RingSight:
    """Raises SetupError."""
    known = {sight.name: sight for sight in await rings()}
    if name not in known:
        there = ", ".join(known) or "none"
        raise SetupError(f"no detached ring {name!r} is in this cluster; there are: {there}")
    return known[name]


async def end_ring(ring: str, *, force: bool = False) -> RingSight:
    """Ends its processes and gives their places back; what lies on disk stays. Raises SetupError."""
    sight = await find_ring(ring)
    if sight.tenure is not None and not force:
        raise SetupError(f"{ring} is driven by {sight.tenure.owner}; drain it, or give --force")
    if sight.tenure is not None:
        await _take_by_force(ring)
    await asyncio.to_thread(end_all, ring)
    return sight


async def _take_by_force(ring: str) -> None:
    """A gateway that had its stages taken away makes no new ones."""
    us = Owner(uuid.uuid4().hex, socket.gethostname(), os.getpid(), role="`ringserve stop --force`")
    for actor in (await asyncio.to_thread(actors_of, ring)).values():
        with contextlib.suppress(RayError, TimeoutError):
            held = await asked(actor, "claim", us, "", within_s=_ANSWER_S)
            if held is not None:
                await asked(actor, "claim", us, held.owner.id, within_s=_ANSWER_S)
    await asyncio.sleep(_NOTICE_S)


def end_all(ring: str, but: Sequence[str] = ()) -> None:
    """Its actors, except those of these names; where there are none of them, its places as well. Blocks for
    milliseconds.
    """
    for name, actor in actors_of(ring).items():
        if name not in but:
            ray.kill(actor)
    group = None if but else group_of(ring)
    if group is not None:
        remove_placement_group(group)


def _empty_groups() -> set[str]:
    """Also rings of which no process is left hold their places. Others than ours are not found by name."""
    groups = placement_group_table().values()
    named = {each["name"] for each in groups if each["name"] and each["state"] != "REMOVED"}
    return {name for name in named if group_of(name) is not None}


async def _told(actor: Any) -> dict[str, Any] | None:
    try:
        said: dict[str, Any] = json.loads(await asked(actor, "summary", within_s=_ANSWER_S))
    except (RayError, TimeoutError, ValueError):
        return None
    return said


def _sight(ring: str, told: Sequence[dict[str, Any] | None]) -> RingSight:
    stages = tuple(sorted(map(_stage, told), key=_in_order))
    heard = [each for each in told if each is not None]
    if not heard:
        return RingSight(ring, stages=stages)
    first = min(heard, key=lambda each: (each["stage"] is None, each["stage"] or 0))
    return RingSight(
        name=ring,
        model=first["model"],
        fingerprint=first["fingerprint"],
        epoch=max(each["epoch"] for each in heard),
        tenure=_tenure(heard),
        rows=_least(each["rows"] for each in heard if each["stage"] is not None),
        max_rows=first["max_rows"],
        splits=tuple((begin, end) for begin, end in first["splits"]),
        stages=stages,
    )


def _stage(told: dict[str, Any] | None) -> StageSight:
    if told is None:
        return StageSight(None, answers=False)
    return StageSight(told["stage"], told["node"], told["pid"])


def _in_order(stage: StageSight) -> tuple[bool, int, int]:
    return stage.stage is None, stage.stage or 0, stage.pid


def _tenure(heard: Sequence[dict[str, Any]]) -> Tenure | None:
    """The first stage decides. A gateway that is known to have ended drives nothing, however long its lease is."""
    order = sorted(heard, key=lambda each: (each["stage"] is None, each["stage"] or 0))
    known = [each["tenure"] for each in order if each["tenure"] is not None]
    if not known:
        return None
    owner = Owner(**known[0]["owner"])
    if has_ended(owner.pid, owner.space):
        return None
    return Tenure(owner, known[0]["left_s"], known[0]["renewals"])


def _least(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """What every stage has of each lane."""
    return tuple(map(min, zip(*rows, strict=False)))
