"""What others saw when a worker died, or was only slow, over rings of real processes of a tiny model.

Two rings in one process: what happens to one must not be felt in the other. Cold means a ring in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import pytest_asyncio

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.errors import RingserveError, RingUnavailable, StageLost
from coordinator.requests import Finished, Recovering, Request, SessionId, Started, TokenDelta
from fakering.texts import novel
from stage.config import RingConfig
from stage.local_ring import LocalRing
from tests.cluster.slow_actor import NAP, SlowStageActor
from tests.cluster.watched_ring import until

if TYPE_CHECKING:
    from stage.ray_ring import RayCluster, RayRing

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]

VOCABULARY = NAP  # of the prompts: none of them asks for a nap
COUNT = 24
# From a kill to the end of whatever waited for it, on a loaded machine: a process starts, imports torch and loads.
END_S = 60.0
PROBE_TIMEOUT_S = 4.0
NAP_S = 6.0
SETTINGS = SchedulerSettings(
    frame_rows=32,
    chunk_rows=32,
    reply_timeout_s=20.0,
    heal_timeout_s=END_S,
    heal_backoff_s=0.1,
    heal_attempts=3,
)
LONG = novel(400, 1, VOCABULARY)
# What comes again and again is drafted, so that verify frames of several rows are on their way.
REPEATED = novel(12, 2, VOCABULARY) * 6


@dataclass
class Call:
    """One stream, read to its end by a task of its own."""

    driver: RingDriver
    prompt: Sequence[int]
    session: str | None = None
    tokens: list[int] = field(default_factory=list)
    cached: int | None = None
    pauses: int = 0

    def begin(self) -> asyncio.Task[tuple[int, ...]]:
        return asyncio.create_task(self._read())

    async def _read(self) -> tuple[int, ...]:
        owner = None if self.session is None else SessionId(self.session)
        request = Request(tuple(self.prompt), max_new_tokens=COUNT, session=owner)
        async with self.driver.submit(request) as stream:
            async for event in stream:
                match event:
                    case Started(cached_prefix=cached):
                        self.cached = cached
                    case TokenDelta(tokens=tokens):
                        self.tokens += tokens
                    case Recovering():
                        self.pauses += 1
                    case Finished():
                        return tuple(self.tokens)
        raise AssertionError("the stream ended without a word")


@dataclass(frozen=True)
class Pair:
    ring: RayRing
    driver: RingDriver
    other: RingDriver


@pytest.fixture(scope="module")
def config(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RingConfig:
    folder = tmp_path_factory.mktemp("lost") / "tiny"
    shutil.copytree(tiny_model, folder)
    return RingConfig(
        folder,
        "tiny",
        ((0, 2), (2, 4)),
        2,
        512,
        cpu_share=0.1,
        rest_s=NAP_S + 2.0,
        probe_s=0.2,
        probe_timeout_s=PROBE_TIMEOUT_S,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(config: RingConfig, ray_cluster: RayCluster) -> AsyncIterator[Pair]:
    from stage.ray_ring import RayRing, crew

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crew, "StageActor", SlowStageActor)
        rings = [RayRing(config, ray_cluster) for _ in range(2)]
        drivers = [
            RingDriver(f"ring-{n}", ring, SETTINGS, SystemClock()) for n, ring in enumerate(rings)
        ]
        try:
            for driver in drivers:
                await driver.start(lambda _: None)
            yield Pair(rings[0], *drivers)
        finally:
            for driver in drivers:
                await driver.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cold(config: RingConfig) -> AsyncIterator[RingDriver]:
    driver = RingDriver("cold", LocalRing(config), SchedulerSettings(), SystemClock())
    await driver.start(lambda _: None)
    yield driver
    await driver.stop()


@asynccontextmanager
async def undisturbed(other: RingDriver, cold: RingDriver) -> AsyncIterator[None]:
    """A stream of the other ring runs all the time, to the right end and without a pause."""
    prompt = novel(40, 77, VOCABULARY)
    epoch, ends = other.status().epoch, asyncio.Event()
    answers: list[tuple[int, ...]] = []
    pauses = 0

    async def talk() -> None:
        nonlocal pauses
        while not ends.is_set():
            call = Call(other, prompt)
            answers.append(await call.begin())
            pauses += call.pauses

    talking = asyncio.create_task(talk())
    try:
        yield
    finally:
        ends.set()
        await asyncio.wait_for(talking, END_S)
    assert set(answers) == {await Call(cold, prompt).begin()}
    assert (other.status().epoch, pauses) == (epoch, 0)


async def busy_share(pids: Sequence[int], seconds: float = 2.0) -> dict[int, float]:
    """What part of a core each process takes."""
    looked = [psutil.Process(pid) for pid in pids]
    before = [sum(each.cpu_times()[:2]) for each in looked]
    await asyncio.sleep(seconds)
    after = [sum(each.cpu_times()[:2]) for each in looked]
    return {pid: (b - a) / seconds for pid, a, b in zip(pids, before, after, strict=True)}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("moment", ["prefill", "verify"])
async def test_a_stage_that_is_killed_ends_no_call_and_leaves_nothing_spinning(
    pair: Pair, cold: RingDriver, moment: str, stage: int
) -> None:
    """ray-project/ray#26772: a call to an actor that died never returns. exo-explore/exo#1823,
    ggml-org/llama.cpp#28487, b4rtaz/distributed-llama#149: with one worker gone the others spin at 100 %,
    dead-lock, or the root aborts.
    """
    driver, ring = pair.driver, pair.ring
    session = f"{moment}-{stage}"
    # Nothing of an earlier case may be left to be reused.
    prompts = [(stage, *REPEATED), (stage, len(moment), *LONG), (stage, 5, *REPEATED)]
    calls = [Call(driver, prompt) for prompt in prompts]
    calls[0].session = session
    async with undisturbed(pair.other, cold):
        rows, pids = driver.status().counts.rows, ring.pids
        if moment == "prefill":
            reading = [calls[1].begin()]
            await until(lambda: driver.status().counts.rows >= rows + 64)
            assert not calls[1].tokens
            reading = [calls[0].begin(), reading[0], calls[2].begin()]
        else:
            reading = [calls[0].begin()]
            await until(lambda: len(calls[0].tokens) >= 4)
            reading += [call.begin() for call in calls[1:]]
        # Two lanes: the third one waits in the queue.
        os.kill(pids[stage], signal.SIGKILL)
        answers = await asyncio.wait_for(asyncio.gather(*reading), END_S)
    assert answers == [await Call(cold, prompt).begin() for prompt in prompts]
    assert sum(call.pauses for call in calls) >= 1
    assert [old != new for old, new in zip(pids, ring.pids, strict=True)] == [
        index == stage for index in range(2)
    ]
    # The session goes on.
    follow_up = (*prompts[0], *answers[0], 9)
    after = Call(driver, follow_up, session)
    assert await after.begin() == await Call(cold, follow_up).begin()
    assert after.cached == len(follow_up) - 2
    shares = await busy_share([*ring.pids, os.getpid()])
    # What is probed, by Ray and by us, takes about 2 %; what polls or spins takes a whole core.
    assert max(shares.values()) < 0.05, shares


async def test_a_chunk_that_takes_longer_than_any_probe_may_is_no_loss(
    pair: Pair, cold: RingDriver
) -> None:
    """vllm-project/vllm#15102, #27116, #19703: a hidden timeout of 10 s kills the engine in a slow prefill."""
    assert PROBE_TIMEOUT_S < NAP_S < SETTINGS.reply_timeout_s
    epoch, pids = pair.driver.status().epoch, pair.ring.pids
    prompt = (*novel(40, 9, VOCABULARY), NAP, round(NAP_S * 10), 3)
    call = Call(pair.driver, prompt)
    began = time.monotonic()
    assert await call.begin() == await Call(cold, prompt).begin()
    assert time.monotonic() - began >= NAP_S
    assert (pair.driver.status().epoch, pair.ring.pids, call.pauses) == (epoch, pids, 0)


@pytest.mark.long
async def test_a_chunk_of_15_seconds_survives_with_the_settings_as_they_are(
    config: RingConfig, cold: RingDriver, ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-project/vllm#15102, #27116, #19703, with the real seconds."""
    from stage.ray_ring import RayRing, crew

    monkeypatch.setattr(crew, "StageActor", SlowStageActor)
    usual = RingConfig(config.model_dir, "tiny", config.splits, 2, 512, cpu_share=0.1)
    driver = RingDriver("slow", RayRing(usual, ray_cluster), SchedulerSettings(), SystemClock())
    await driver.start(lambda _: None)
    try:
        prompt = (*novel(40, 9, VOCABULARY), NAP, 150, 3)
        call = Call(driver, prompt)
        assert await call.begin() == await Call(cold, prompt).begin()
        assert (driver.status().epoch, call.pauses) == (0, 0)
    finally:
        await driver.stop()


async def test_a_ring_that_cannot_be_mended_ends_every_call_in_time_and_only_its_own(
    pair: Pair, cold: RingDriver, config: RingConfig
) -> None:
    """ray-project/ray#26772: whoever waits, in a lane or in the queue, gets a typed error. The last case of this file:
    the ring is down then.
    """
    driver = pair.driver
    calls = [Call(driver, (7, n, *LONG)) for n in range(4)]
    away = config.model_dir.with_name("away")
    async with undisturbed(pair.other, cold):
        rows = driver.status().counts.rows
        reading = [call.begin() for call in calls]
        await until(lambda: driver.status().counts.rows >= rows + 64)
        config.model_dir.rename(away)
        try:
            os.kill(pair.ring.pids[1], signal.SIGKILL)
            ended = await asyncio.wait_for(
                asyncio.gather(*reading, return_exceptions=True), 3 * END_S
            )
        finally:
            away.rename(config.model_dir)
    assert [type(each) for each in ended] == [StageLost] * 4
    assert "stage 1" in str(ended[0])
    assert "\n" not in str(ended[0])
    with pytest.raises(RingUnavailable):
        await Call(driver, LONG).begin()
    with contextlib.suppress(RingserveError):
        await driver.stop()
    assert not any(psutil.pid_exists(pid) for pid in pair.ring.pids)
