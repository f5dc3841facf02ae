"""What a lost stage had in host memory comes back from the stage that keeps a copy: its conversations stay warm."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.requests import Request, Started, TokenDelta
from fakering import texts
from stage.config import RingConfig
from tests.cluster.watched_ring import until

if TYPE_CHECKING:
    from stage.ray_ring import RayCluster, RayRing

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]

VOCABULARY = 199
ROWS = 70
NEWS = (7, 8, 9)
STORED = 64  # rows of the prompt and its answer, in nodes of 16
SETTINGS = SchedulerSettings(node_rows=16, heal_backoff_s=0.1)


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> RingConfig:
    # One lane: whoever comes next pushes a conversation's rows into host memory.
    return RingConfig(
        tiny_model,
        "tiny",
        ((0, 1), (1, 3), (3, 4)),
        lanes=1,
        max_rows=256,
        cpu_share=0.1,
        kv_host_bytes=2**22,
        mirror=True,
        rest_s=3.0,
        probe_s=0.2,
    )


@pytest.fixture(scope="module")
def hybrid(config: RingConfig, tiny_hybrid: Path) -> RingConfig:
    splits = ((0, 2), (2, 4))
    return replace(config, model_dir=tiny_hybrid, model="hybrid", splits=splits, spares=1)


@dataclass(frozen=True)
class Turn:
    tokens: tuple[int, ...]
    cached: int


class Served:
    """A ring with its driver."""

    def __init__(self, ring: RayRing, is_mirrored: bool) -> None:
        self.ring = ring
        self.is_mirrored = is_mirrored
        self.driver = RingDriver("ring-0", ring, SETTINGS, SystemClock())
        self._said = 0

    async def turn(self, prompt: Sequence[int], *, reuse: bool = True) -> Turn:
        request = Request(tuple(prompt), max_new_tokens=8, reuse=reuse)
        tokens: list[int] = []
        cached = -1
        async with self.driver.submit(request) as stream:
            async for event in stream:
                if isinstance(event, Started):
                    cached = event.cached_prefix
                elif isinstance(event, TokenDelta):
                    tokens += event.tokens
        return Turn(tuple(tokens), cached)

    async def leave_a_conversation(self) -> tuple[int, ...]:
        """A new one, whose rows are nodes now, and mirrored if anything is. Returns the prompt of its next turn."""
        self._said += 1
        prompt, other = (
            texts.novel(ROWS, seed, VOCABULARY) for seed in (self._said, 1000 + self._said)
        )
        first = await self.turn(prompt)
        await self.turn(other)
        if self.is_mirrored:
            await self.until_mirrored()
        return (*prompt, *first.tokens, *NEWS)

    async def go_on(self, prompt: tuple[int, ...]) -> int:
        """How much of it was reused; its answer is that of a cold turn."""
        warm = await self.turn(prompt)
        assert warm.tokens == (await self.turn(prompt, reuse=False)).tokens
        return warm.cached

    async def until_mirrored(self) -> None:
        """Each stage keeps as many bytes of another one as that one has."""
        from stage.ray_ring.member import together

        assert self.ring._started is not None
        members = self.ring._started.seats.members
        async with asyncio.timeout(30.0):
            while True:
                probes = await together([each.ask("probe", within_s=10.0) for each in members])
                stored = [probe.stored for probe in probes]
                if all(stored) and [probe.mirrored for probe in probes] == [
                    stored[-1],
                    *stored[:-1],
                ]:
                    return
                await asyncio.sleep(0.02)

    def kill(self, *stages: int) -> None:
        for stage in stages:
            os.kill(self.ring.pids[stage], signal.SIGKILL)


@asynccontextmanager
async def served(config: RingConfig, cluster: RayCluster) -> AsyncIterator[Served]:
    from stage.ray_ring import RayRing

    it = Served(RayRing(config, cluster), config.mirror)
    await it.driver.start(lambda _: None)
    try:
        yield it
    finally:
        await it.driver.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mirrored(config: RingConfig, ray_cluster: RayCluster) -> AsyncIterator[Served]:
    async with served(config, ray_cluster) as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mirrored_hybrid(hybrid: RingConfig, ray_cluster: RayCluster) -> AsyncIterator[Served]:
    async with served(hybrid, ray_cluster) as it:
        yield it


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_killed_stage_costs_no_row_that_was_in_host_memory(
    mirrored: Served, stage: int
) -> None:
    prompt = await mirrored.leave_a_conversation()
    mirrored.kill(stage)
    assert await mirrored.go_on(prompt) == STORED
    await mirrored.until_mirrored()


async def test_stages_that_are_lost_one_after_the_other_cost_nothing_either(
    mirrored: Served,
) -> None:
    """The second one kept what the first one got back; what it had itself the third one keeps."""
    prompt = await mirrored.leave_a_conversation()
    for stage in (0, 1):
        mirrored.kill(stage)
        await mirrored.turn(NEWS, reuse=False)
        await mirrored.until_mirrored()
    assert await mirrored.go_on(prompt) == STORED


async def test_two_neighbours_that_are_lost_at_once_cost_time_and_no_token(
    mirrored: Served,
) -> None:
    prompt = await mirrored.leave_a_conversation()
    mirrored.kill(1, 2)
    assert await mirrored.go_on(prompt) == 0
    prompt = await mirrored.leave_a_conversation()
    mirrored.kill(1)
    assert await mirrored.go_on(prompt) == STORED


@pytest.mark.parametrize("stage", [0, 1])
async def test_recurrent_states_come_back_with_the_rows_to_a_spare_as_well(
    mirrored_hybrid: Served, stage: int
) -> None:
    undisturbed = await mirrored_hybrid.go_on(await mirrored_hybrid.leave_a_conversation())
    assert undisturbed >= STORED
    prompt = await mirrored_hybrid.leave_a_conversation()
    await until(lambda: len(mirrored_hybrid.ring.spares) == 1, within_s=120.0)
    (spare,) = mirrored_hybrid.ring.spares
    mirrored_hybrid.kill(stage)
    assert await mirrored_hybrid.go_on(prompt) == undisturbed
    assert mirrored_hybrid.ring.pids[stage] == spare


async def test_copies_travel_between_nodes_as_frames_do(
    config: RingConfig, ray_cluster: RayCluster, second_node: None
) -> None:
    over_two = replace(config, splits=((0, 2), (2, 4)), spread=True)
    async with served(over_two, ray_cluster) as it:
        endpoints = it.ring._running().endpoints
        assert all(each.address.startswith("tcp://") for each in endpoints)
        prompt = await it.leave_a_conversation()
        it.kill(1)
        assert await it.go_on(prompt) == STORED


async def test_without_a_mirror_the_rows_are_computed_again(
    config: RingConfig, ray_cluster: RayCluster
) -> None:
    """The control of the tests above."""
    bare = replace(config, splits=((0, 2), (2, 4)), mirror=False)
    async with served(bare, ray_cluster) as it:
        for killed, cached in (((), STORED), ((0,), 0)):
            prompt = await it.leave_a_conversation()
            it.kill(*killed)
            assert await it.go_on(prompt) == cached
