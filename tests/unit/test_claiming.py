"""How long a gateway waits for a ring's leases: not for one that is known to have ended, and not for one that lives."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.errors import SetupError
from stage.config import RingConfig
from stage.lease import Lease, Owner, Tenure
from stage.processes import process_space
from stage.ray_ring.detached import _claim

LEASE_S = 0.6
ONE, TWO = Owner("one", "192.0.2.1", 1), Owner("two", "192.0.2.2", 2)


class Nearby:
    """A stage in this process."""

    def __init__(self) -> None:
        self.lease = Lease(LEASE_S)

    async def claim(self, owner: Owner, ended: str) -> Tenure | None:
        return self.lease.claim(owner, time.monotonic(), ended)

    async def release(self, owner: str) -> None:
        self.lease.release(owner)


def stages_of(owner: Owner) -> list[Any]:
    stages = [Nearby(), Nearby()]
    for stage in stages:
        stage.lease.claim(owner, time.monotonic())
    return stages


@pytest.fixture(scope="module")
def config() -> RingConfig:
    return RingConfig(
        Path(), "m", ((0, 1), (1, 2)), detached=True, name="m-0", probe_s=0.1, lease_s=LEASE_S
    )


async def claim(config: RingConfig, stages: list[Any]) -> float:
    """How long it took."""
    began = time.monotonic()
    await _claim(config, stages, TWO)
    assert all(stage.lease.is_of("two") for stage in stages)
    return time.monotonic() - began


async def test_one_that_fell_silent_is_waited_for_until_its_leases_run_out(
    config: RingConfig,
) -> None:
    assert 0.9 * LEASE_S < await claim(config, stages_of(ONE)) < LEASE_S + 2.0


async def test_leases_of_one_ring_that_end_one_after_another_show_no_life(
    config: RingConfig,
) -> None:
    """Each stage counts its own renewals, and was renewed at its own time."""
    stages = stages_of(ONE)
    await asyncio.sleep(LEASE_S / 2)
    for _ in range(3):
        stages[1].lease.renew("one", time.monotonic())
    await claim(config, stages)


async def test_one_that_lives_keeps_its_ring_and_is_named(config: RingConfig) -> None:
    stages = stages_of(ONE)

    async def live() -> None:
        while True:
            await asyncio.sleep(0.02)
            for stage in stages:
                stage.lease.renew("one", time.monotonic())

    living = asyncio.create_task(live())
    with pytest.raises(SetupError, match=r"m-0 is driven by a gateway \(host 192.0.2.1, pid 1\)"):
        await claim(config, stages)
    living.cancel()
    assert all(stage.lease.is_of("one") for stage in stages)


async def test_one_whose_process_has_ended_here_is_not_waited_for(config: RingConfig) -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await child.wait()
    ended = replace(ONE, pid=child.pid, space=process_space())
    assert await claim(config, stages_of(ended)) < LEASE_S / 2
