"""Loaded processes that wait to take a lost stage's place.

Decides for which stage each is loaded, and that one that was used, or died, is replaced in the background. They make no
stage before they are asked to: a stage's disk belongs to one process at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from coordinator.errors import RingLost, SetupError
from coordinator.ring import StageProgress
from stage.config import RingConfig
from stage.placement import next_spare
from stage.ray_ring.crew import Crew
from stage.ray_ring.member import Member

log = logging.getLogger(__name__)

# Between attempts to load one; doubled each time. A model's folder that is gone may come back.
_RETRY_S = 5.0
_LONGEST_RETRY_S = 60.0


class Spares:
    def __init__(self, config: RingConfig, crew: Crew, neighbours: Callable[[str], int]) -> None:
        """`neighbours`: how many of the ring's stages are on a node."""
        self._config = config
        self._crew = crew
        self._neighbours = neighbours
        self._ready: list[Member] = []
        self._filling: dict[asyncio.Task[None], int] = {}  # and for which stage

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(member.place.pid for member in self._ready)

    def take(self, index: int) -> Member | None:
        """The spare loaded for this stage, or any other one. Whoever takes it says by `fill` which bundle is free
        now.
        """
        mine = [member for member in self._ready if member.loaded == index]
        if not self._ready:
            return None
        member = (mine or self._ready)[0]
        self._ready.remove(member)
        return member

    def adopt(self, member: Member) -> None:
        """One that was loaded for an earlier gateway."""
        member.watch(self._config.probe_s, self._config.probe_timeout_s)
        self._ready.append(member)

    def fill(self, bundles: Sequence[int]) -> None:
        for bundle in bundles:
            self._begin(bundle)

    def lost(self, member: Member) -> None:
        """One that waits has died, or does not answer."""
        if member in self._ready:
            self._ready.remove(member)
            self._begin(member.bundle, member)

    async def stop(self) -> None:
        tasks = list(self._filling)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, bundle: int, former: Member | None = None) -> None:
        held = [*(member.index for member in self._ready), *self._filling.values()]
        index = next_spare(held, self._config.stages)
        task = asyncio.create_task(self._fill(bundle, index, former))
        self._filling[task] = index
        task.add_done_callback(self._filling.pop)

    async def _fill(self, bundle: int, index: int, former: Member | None) -> None:
        """`former`: whoever was there, and is lost."""
        if former is not None:
            await self._crew.dismiss(former)
        retry_s = _RETRY_S
        while True:
            try:
                await self._load(bundle, index)
                return
            except (RingLost, SetupError) as error:
                log.warning("no spare stage=%d reason=%s", index, error)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S)

    async def _load(self, bundle: int, index: int) -> None:
        member = await self._crew.hire(bundle, index)
        try:
            here = max(1, self._neighbours(member.place.node))
            await self._crew.load(member, index, here, _untold)
        except BaseException:
            await self._crew.dismiss(member)
            raise
        member.watch(self._config.probe_s, self._config.probe_timeout_s)
        self._ready.append(member)
        log.info("spare stage=%d pid=%d", index, member.place.pid)


def _untold(_: StageProgress) -> None:
    """Nobody waits for a spare."""
