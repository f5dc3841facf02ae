"""Spare processes take a lost stage's place without a load, and end themselves once nobody wants them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from stage.config import RingConfig
from tests.cluster.watched_ring import Watched, all_end, processes, until

if TYPE_CHECKING:
    from stage.ray_ring import RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> RingConfig:
    splits = ((0, 2), (2, 4))
    times = {"rest_s": 3.0, "probe_s": 0.2, "probe_timeout_s": 2.5, "fence_s": 8.0}
    return RingConfig(tiny_model, "tiny", splits, 2, 64, cpu_share=0.1, spares=1, **times)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def started(config: RingConfig, ray_cluster: RayCluster) -> AsyncIterator[Watched]:
    from stage.ray_ring import RayRing

    watched = Watched(RayRing(config, ray_cluster))
    await watched.start()
    yield watched
    await watched.ring.stop()


async def spare_other_than(started: Watched, pids: set[int]) -> int:
    await until(lambda: bool(set(started.ring.spares) - pids))
    return (set(started.ring.spares) - pids).pop()


@pytest.mark.parametrize(("stage", "loads"), [(1, set()), (0, {0})])
async def test_a_spare_takes_the_place_and_loads_only_what_it_was_not_loaded_for(
    started: Watched, stage: int, loads: set[int]
) -> None:
    pids, answer = started.ring.pids, await started.answer()
    spare = await spare_other_than(started, set())
    started.told.clear()
    os.kill(pids[stage], signal.SIGKILL)
    await started.lose()
    begin = time.monotonic()
    await started.heal()
    assert time.monotonic() - begin < 3.0  # an actor takes as long to begin
    assert started.ring.pids[stage] == spare
    assert started.ring.pids[1 - stage] == pids[1 - stage]
    assert {news.stage for news in started.told} == loads
    assert await started.answer() == answer
    await spare_other_than(started, {spare})


async def test_a_spare_that_dies_or_hangs_is_replaced_and_costs_no_epoch(started: Watched) -> None:
    pids, answer = started.ring.pids, await started.answer()
    for how in (signal.SIGKILL, signal.SIGSTOP):
        spare = await spare_other_than(started, set())
        gone = processes((spare,))
        os.kill(spare, how)
        await spare_other_than(started, {spare})
        assert await all_end(gone, 5.0)
    assert started.ring.health().ready
    assert started.ring.pids == pids
    assert await started.answer() == answer


async def test_a_process_that_is_woken_after_it_was_given_up_ends_itself(
    config: RingConfig, ray_cluster: RayCluster
) -> None:
    """Nothing else ends it: this is what runs on a host that no signal of ours reaches."""
    import ray

    from stage.actor import CONCURRENT_CALLS, StageActor

    made = ray.remote(StageActor).options(num_cpus=0.1, max_concurrency=CONCURRENT_CALLS)
    actor = made.remote(replace(config, probe_timeout_s=0.5, fence_s=1.0))
    pid = (await actor.place.remote()).pid
    gone = processes((pid,))
    await actor.probe.remote()
    os.kill(pid, signal.SIGSTOP)
    assert not await asyncio.to_thread(gone[0].await_exit, 2.0)
    os.kill(pid, signal.SIGCONT)
    assert await all_end(gone, 5.0)
