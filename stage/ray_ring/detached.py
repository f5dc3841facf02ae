"""How a gateway comes to a detached ring that is there already: found by name, shown to be the same, claimed.

Decides whether the ring is the one that is wanted, and how long a gateway that died is waited for. A ring that another
gateway drives is left alone, whatever is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from coordinator.errors import SetupError
from coordinator.frames import PROTOCOL_VERSION, Epoch
from stage.actor import About
from stage.config import RingConfig
from stage.fingerprint import fingerprint
from stage.lease import Owner, Served, Tenure, claim_all
from stage.processes import has_ended, process_space
from stage.ray_ring.census import actors_of, asked, end_all, group_of
from stage.ray_ring.member import Member

log = logging.getLogger(__name__)

# Beyond the lease itself, for calls on their way.
_MARGIN_S = 2.0
# In so many probes' time a gateway that lives has renewed its lease.
_PROBES = 2.5
# Between looks at a ring that another gateway has just begun to make.
_LOOK_S = 0.2
# What a ring was made with, and keeps: its processes, what they hold, and its places in the cluster.
_MADE_WITH = (
    *("splits", "lanes", "max_rows", "device", "dtype", "numerics"),
    *("kv_host_bytes", "kv_disk", "kv_disk_bytes", "mirror", "spares"),
)
# What a gateway waits for is its own business.
_WAITS = ("place_s", "start_s", "load_s", "rest_s", "call_s", "probe_s", "probe_timeout_s")


@dataclass(frozen=True, slots=True)
class FoundActor:
    name: str
    actor: Any
    about: About
    within_s: float

    async def claim(self, owner: Owner, ended: str) -> Tenure | None:
        """As stage.lease.Leased. Whoever does not answer refuses nobody: he is lost to every gateway."""
        try:
            held: Tenure | None = await self._asked("claim", owner, ended)
        except (RayError, TimeoutError):
            return None
        return held

    async def release(self, owner: str) -> None:
        try:
            await self._asked("release", owner)
        except (RayError, TimeoutError):
            log.warning("not released actor=%s: its lease runs out by itself", self.name)

    async def _asked(self, method: str, *arguments: object) -> Any:
        return await asked(self.actor, method, *arguments, within_s=self.within_s)


@dataclass(frozen=True, slots=True)
class FoundRing:
    """What there is of a ring that is ours by now."""

    config: RingConfig
    group: PlacementGroup
    actors: tuple[FoundActor, ...]
    names: tuple[str, ...]  # of all its actors, also of those that do not answer

    @property
    def turn(self) -> int:
        """The latest of any of its stages."""
        return max(each.about.turn for each in self.actors)

    @property
    def epoch(self) -> Epoch:
        return max(each.about.epoch for each in self.actors)


async def find(config: RingConfig, owner: Owner) -> FoundRing | None:
    """None: there is none of that name. Raises SetupError where there is another one, or it is not to be had."""
    actors = await _await_answers(config)
    group = await asyncio.to_thread(group_of, config.name)
    if not actors or group is None:
        return None
    await asyncio.to_thread(_check, config, [each.about for each in actors])
    await _claim(config, actors, owner)
    # Once more: until now somebody else may have driven it. Whoever did not answer is not waited for again.
    names = tuple(await asyncio.to_thread(actors_of, config.name))
    ours = await _heard(config, [each.name for each in actors])
    if not ours:
        raise SetupError(f"the stages of {config.name} do not answer any more")
    return FoundRing(gone_on_with(ours[0].about.config, config), group, ours, names)


def gone_on_with(theirs: RingConfig, wanted: RingConfig) -> RingConfig:
    """What a found ring is made of, and how its gateway of now goes about it."""
    ours = {name: getattr(wanted, name) for name in ("model_dir", *_WAITS)}
    return replace(theirs, **ours)


async def _await_answers(config: RingConfig) -> tuple[FoundActor, ...]:
    """None at once where there is no such ring. One of which nobody answers may have been begun just now: it gets its
    time, and is ended then.
    """
    began = time.monotonic()
    while True:
        names = await asyncio.to_thread(actors_of, config.name)
        if not names and await asyncio.to_thread(group_of, config.name) is None:
            return ()
        if answers := await _heard(config):
            return answers
        patience_s = config.start_s if names else config.place_s + _MARGIN_S
        if time.monotonic() - began > patience_s:
            log.warning("ended ring=%s: nobody of it answered for %g s", config.name, patience_s)
            await asyncio.to_thread(end_all, config.name)
            return ()
        await asyncio.sleep(_LOOK_S)


async def _heard(config: RingConfig, of: Collection[str] | None = None) -> tuple[FoundActor, ...]:
    """Those that answer, in the order in which their leases are taken: stages first."""
    handles = await asyncio.to_thread(actors_of, config.name)
    asked_for = [each for each in handles.items() if of is None or each[0] in of]
    found = await asyncio.gather(*(_ask(config, *each) for each in asked_for))
    return tuple(sorted((each for each in found if each is not None), key=_order))


def _order(found: FoundActor) -> tuple[bool, int, str]:
    return found.about.report is None, found.about.loaded or 0, found.name


async def _ask(config: RingConfig, name: str, actor: Any) -> FoundActor | None:
    try:
        version = await asked(actor, "protocol", within_s=config.call_s)
        if version != PROTOCOL_VERSION:
            raise _other(config.name, f"speaks protocol {version}, this is {PROTOCOL_VERSION}")
        about = await asked(actor, "about", within_s=config.call_s)
    except (RayError, TimeoutError):
        return None
    except (AttributeError, TypeError) as error:
        raise _other(config.name, f"is of another version ({error})") from error
    return FoundActor(name, actor, about, config.call_s)


def _check(config: RingConfig, told: Sequence[About]) -> None:
    """Raises SetupError with the first thing that is not as it is wanted."""
    theirs = told[0].config
    report = next((about.report for about in told if about.report is not None), None)
    if report is None:
        same_model = theirs.model_dir == config.model_dir
    else:
        same_model = report.fingerprint == fingerprint(config.model_dir)
    if not same_model:
        raise _other(config.name, f"holds another model ({theirs.model_dir})")
    for what in _MADE_WITH:
        have, want = getattr(theirs, what), getattr(config, what)
        if have != want:
            raise _other(config.name, f"has {what} {have}, wanted {want}")


def _other(ring: str, differs: str) -> SetupError:
    return SetupError(
        f"the detached ring {ring} of this cluster {differs}: end it with `ringserve stop {ring}`, "
        "or serve under another --served-name"
    )


async def _claim(config: RingConfig, actors: Sequence[FoundActor], owner: Owner) -> None:
    """Raises SetupError: it is another gateway's, who lives."""
    began, ended = time.monotonic(), ""
    first: dict[int, Tenure] = {}  # by stage
    while (refused := await claim_all(actors, owner, ended)) is not None:
        held = refused.tenure
        lives = first.setdefault(refused.stage, held).lives_on(held)
        if lives or time.monotonic() - began > config.lease_s + _MARGIN_S:
            raise SetupError(f"the detached ring {config.name} is driven by {held.owner}")
        if not ended and has_ended(held.owner.pid, held.owner.space):
            ended = held.owner.id
            continue
        log.info("waiting ring=%s for=%.1f s, of %s", config.name, held.left_s, held.owner)
        await asyncio.sleep(min(held.left_s, _PROBES * config.probe_s))


def owner_here(served: Served) -> Owner:
    """This process, from now on. Another start is another owner."""
    return Owner(
        id=uuid.uuid4().hex,
        host=socket.gethostname(),
        pid=os.getpid(),
        space=process_space(),
        grpc=served.grpc,
        http=served.http,
    )


@dataclass(frozen=True, slots=True)
class _Ours:
    """A stage that was ours when it was asked last, as stage.lease.Leased."""

    member: Member
    within_s: float

    async def claim(self, owner: Owner, ended: str) -> Tenure | None:
        held: Tenure | None = await self._asked("claim", owner, ended)
        return held

    async def release(self, owner: str) -> None:
        await self._asked("release", owner)

    async def _asked(self, method: str, *arguments: object) -> Any:
        with contextlib.suppress(RayError, TimeoutError):
            return await asyncio.wait_for(self.member.call(method, *arguments), self.within_s)
        return None


async def taken_by(members: Sequence[Member], owner: Owner, within_s: float) -> Owner | None:
    """The other gateway that drives them, if one does. Nobody is waited for who does not answer."""
    refused = await claim_all([_Ours(member, within_s) for member in members], owner)
    return None if refused is None else refused.tenure.owner


async def give_back(members: Sequence[Member], owner: Owner, within_s: float) -> None:
    """At once: whoever gets the first stage waits a moment for the others."""
    await asyncio.gather(*(_Ours(member, within_s).release(owner.id) for member in members))


class Keeper:
    """Renews a ring's leases for as long as its gateway lives."""

    def __init__(
        self,
        owner: Owner,
        members: Callable[[], Iterable[Member]],
        every_s: float,
        on_taken: Callable[[Owner | None], None],
    ) -> None:
        """`on_taken`: another gateway drives the ring now; which, where that is known."""
        self._owner = owner
        self._members = members
        self._every_s = every_s
        self._on_taken = on_taken
        self._asking: dict[Member, asyncio.Task[None]] = {}
        self._running = asyncio.create_task(self._run(), name="leases")

    def close(self) -> None:
        for task in (self._running, *self._asking.values()):
            task.cancel()

    async def _run(self) -> None:
        while True:
            for member in self._members():
                # One that does not answer keeps nobody waiting, and is not asked twice.
                if member not in self._asking:
                    task = asyncio.create_task(self._renew(member))
                    self._asking[member] = task
                    task.add_done_callback(partial(self._asked, member))
            await asyncio.sleep(self._every_s)

    def _asked(self, member: Member, _: asyncio.Task[None]) -> None:
        del self._asking[member]

    async def _renew(self, member: Member) -> None:
        try:
            is_ours = await member.call("renew", self._owner.id)
        except RayError:
            return  # its probes tell
        if not is_ours:
            self._on_taken(await self._holder(member))

    async def _holder(self, member: Member) -> Owner | None:
        try:
            about: About = await member.call("about")
        except RayError:
            return None
        return None if about.tenure is None else about.tenure.owner
