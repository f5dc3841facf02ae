"""The actors of one start of a ring, in a placement group of their own.

Decides where they are made and what a load may take. Every actor that it ever made is ended by `end`, at the latest,
unless another gateway has taken it: then it is that one's, with its place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coordinator.errors import RingLost, RingTaken, SetupError
from coordinator.ring import ProgressSink, StageProgress
from stage.actor import CONCURRENT_CALLS, About, LoadFailure, StageActor
from stage.build import READY, StageReport
from stage.config import RingConfig
from stage.lease import Owner
from stage.placement import Share, Strategy, for_stages, share_of
from stage.ray_ring.census import actor_name, end_all, generation_of
from stage.ray_ring.cluster import NAMESPACE
from stage.ray_ring.detached import FoundRing
from stage.ray_ring.member import Member, in_a_line
from stage.ray_ring.versions import check_versions

log = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 0.2
# Ray answers within milliseconds; it is not waited for when it is not there any more.
_REMOVE_S = 5.0
_NOT_UP = (
    "`ray status` tells whether its node is there, and has room; where it is only busy, start again: "
    "what it imports is in its memory then"
)
# A checkout is on no host's import path by itself.
_IMPORT_FROM = str(Path(__file__).resolve().parents[2])


class Crew:
    def __init__(
        self,
        config: RingConfig,
        on_news: Callable[[Member], None],
        owner: Owner | None = None,
    ) -> None:
        """`owner`: of a detached ring."""
        self._config = config
        self._owner = owner
        self.taken = False  # by another gateway: its places are not ours to fill any more
        self.taker: Owner | None = None  # who, where that is known
        self._made = 0  # actors of this name so far
        self._share: Share = share_of(config)
        self._on_news = on_news
        self._group: PlacementGroup | None = None
        self._members: set[Member] = set()

    @property
    def members(self) -> tuple[Member, ...]:
        """In the order of their stages, as leases are taken."""
        return tuple(sorted(self._members, key=lambda member: member.index))

    def taken_away(self) -> RingTaken:
        """What is said of the ring once it is not ours any more."""
        by = self.taker or "another one, or by `ringserve stop`"
        return RingTaken(None, f"it was taken from this gateway, by {by}")

    async def place(self) -> tuple[list[int], list[int]]:
        """The stages' bundles, in their order, and the spares'. Raises ClusterTooSmall, at once when the whole
        cluster has less than is wanted.
        """
        share = self._share
        share.check(ray.cluster_resources())
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        strategy = share.strategy(self._config.spread, nodes)
        self._group = self._make_group(strategy)
        if not await asyncio.to_thread(self._group.wait, self._config.place_s):
            share.check(ray.available_resources())
            raise share.too_much("no room on its nodes")
        placed = placement_group_table(self._group)["bundles_to_node_id"]
        here = ray.get_runtime_context().get_node_id()
        on = [placed[bundle] for bundle in sorted(placed)]
        await check_versions(set(on) - {here}, _IMPORT_FROM, self._config.start_s)
        chosen = for_stages(on, here, share.stages, self._config.spread)
        return chosen, [bundle for bundle in range(share.places) if bundle not in chosen]

    async def hire(self, bundle: int, index: int) -> Member:
        """A new actor, which has loaded nothing yet. It waits for its place until the process that had it has ended.
        Raises RingLost.
        """
        self.taken = self.taken or await self._is_removed()
        if self.taken:
            raise self.taken_away()
        try:
            actor = self._make_actor(bundle, index)
        except ValueError as error:  # two gateways made one of that name; the next one has another
            raise RingLost(index, str(error)) from error
        member = Member(actor, bundle, self._on_news)
        member.index = index
        self._members.add(member)
        within_s = self._config.start_s
        try:
            await member.settle(within_s, f"did not come up within {within_s:g} s: {_NOT_UP}")
        except BaseException:
            await self.dismiss(member)
            raise
        return member

    async def adopt(self, found: FoundRing) -> list[tuple[Member, About]]:
        """Those that answer; the others are ended."""
        self._group = found.group
        self._made = 1 + max(map(generation_of, found.names))
        await asyncio.to_thread(end_all, self._config.name, [each.name for each in found.actors])
        pairs = [
            (Member(each.actor, each.about.bundle, self._on_news), each.about)
            for each in found.actors
        ]
        self._members.update(member for member, _ in pairs)
        settling = (member.settle(self._config.call_s) for member, _ in pairs)
        await asyncio.gather(*settling, return_exceptions=True)
        for lost in [member for member, _ in pairs if member.loss is not None]:
            await self.dismiss(lost)
        return [(member, about) for member, about in pairs if member.loss is None]

    async def load(self, member: Member, index: int, here: int, tell: ProgressSink) -> None:
        """`here`: the ring's stages on its node, with this one. Raises SetupError, or RingLost: it is lost, too, when
        it makes no progress for load_s.
        """
        member.unwatch()
        member.index, member.loaded = index, None
        loading = member.call("load", index, here)
        asking = member.call("progress")
        told, told_at = None, time.monotonic()
        try:
            while not loading.done():
                await member.wait({loading}, _PROGRESS_EVERY_S)
                if asking.done():
                    news, asking = asking.result(), member.call("progress")
                    if news != told:
                        told, told_at = news, time.monotonic()
                        _tell(news, member, tell)
                if time.monotonic() - told_at > self._config.load_s:
                    member.lose(_stuck(told, self._config.load_s))
            if isinstance(failure := loading.result(), LoadFailure):
                raise failure.error(f"{failure.message} (stage {index} on {member.place.host})")
            member.loaded = index
            _tell(await member.ask("progress", within_s=self._config.call_s), member, tell)
        except RayError as error:
            member.lose(in_a_line(error))
            raise RingLost(index, str(member.loss)) from error
        finally:
            loading.cancel()
            asking.cancel()

    async def take(self, member: Member, host_bytes: int | None, here: int) -> StageReport:
        """Its slice becomes the ring's stage. Raises SetupError or RingLost."""
        report = await member.ask("take", host_bytes, here, within_s=self._config.load_s)
        if isinstance(report, LoadFailure):
            raise report.error(report.message)
        assert isinstance(report, StageReport)
        return report

    def free_bundles(self) -> list[int]:
        taken = {member.bundle for member in self._members}
        return [bundle for bundle in range(self._share.places) if bundle not in taken]

    async def dismiss(self, member: Member) -> None:
        await (member.leave() if member.taken else member.end())
        self._members.discard(member)

    async def leave(self) -> None:
        """They go on without us."""
        await asyncio.gather(*(member.leave() for member in self._members))

    async def end(self) -> None:
        if self.taken:
            await self.leave()
            return
        await asyncio.gather(*(member.end() for member in self._members))
        group, self._group = self._group, None
        if group is not None:
            try:
                removing = asyncio.to_thread(remove_placement_group, group)
                await asyncio.wait_for(removing, _REMOVE_S)
            except (RayError, TimeoutError) as error:
                log.warning("kept a placement group reason=%s", type(error).__name__)

    async def _is_removed(self) -> bool:
        """Whoever ends a ring by hand gives its places back: where no stage was left to tell of it, they do."""
        if not self._config.detached or self._group is None:
            return False
        told = await asyncio.to_thread(placement_group_table, self._group)
        return bool(told.get("state") == "REMOVED")

    def _make_group(self, strategy: Strategy) -> PlacementGroup:
        """Raises SetupError: of two gateways that make a ring at once, one gets the name."""
        share, config = self._share, self._config
        bundles = [share.resources] * share.places
        if not config.detached:
            return placement_group(bundles, strategy=strategy)
        try:
            return placement_group(bundles, strategy, name=config.name, lifetime="detached")
        except RayError as error:
            raise SetupError(f"another gateway makes the ring {config.name} right now") from error

    def _make_actor(self, bundle: int, index: int) -> Any:
        resources = self._share.resources
        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle
        )
        return (
            ray.remote(StageActor)
            .options(
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                max_concurrency=CONCURRENT_CALLS,
                scheduling_strategy=strategy,
                runtime_env={"env_vars": {"PYTHONPATH": _IMPORT_FROM}},
                **self._naming(index),
            )
            .remote(self._config, bundle, self._owner)
        )

    def _naming(self, index: int) -> dict[str, str]:
        if not self._config.detached:
            return {}
        self._made += 1
        name = actor_name(self._config.name, index, self._made - 1)
        return {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}


def _stuck(told: StageProgress | None, within_s: float) -> str:
    at = "loading" if told is None else told.note
    limit = "--load-timeout-s says how long that may take"
    return f"did not get further for {within_s:g} s, at {at}: {limit}"


def _tell(news: StageProgress, member: Member, tell: ProgressSink) -> None:
    """What a process says before it has begun names no stage. Operators look for it by its number."""
    if news.stage == member.index:
        tell(replace(news, note=f"{READY} {member.where}") if news.note == READY else news)
