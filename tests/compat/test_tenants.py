"""Tenants on a ring with a model: what one left is nothing to another, in lanes, store, memos and behind a restart.

Faults that others hit: a cache that several users share tells by its speed what others asked
(vllm-project/vllm#16016, "cache salting for prefix caching"). Log-probabilities stand for logits: they would show
another rounding.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.errors import InvalidValue
from coordinator.requests import (
    Finished,
    MissKind,
    Request,
    RowLogprobs,
    SamplingSpec,
    SessionId,
    Started,
    TokenDelta,
)
from coordinator.router import Router
from fakering.texts import novel
from stage.config import RingConfig
from stage.local_ring import LocalRing

_SETTINGS = SchedulerSettings(node_rows=16, min_copy_rows=1, chunk_rows=32)
_SPEC = SamplingSpec(temperature=0.8, seed=5, logprobs=3)
_HEAD = novel(64, 1, 199)
_PROMPT = (*_HEAD, *novel(20, 2, 199))
_BRANCH = (*_PROMPT[:70], *novel(14, 3, 199))
_OTHER = novel(84, 4, 199)


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[RowLogprobs, ...]
    cached: int
    miss: MissKind | None

    @property
    def said(self) -> object:
        return self.tokens, self.logprobs


@asynccontextmanager
async def driven(
    model: Path, disk: Path | None = None, lanes: int = 2
) -> AsyncIterator[RingDriver]:
    config = RingConfig(
        model, "tiny", ((0, 2), (2, 4)), lanes, 256, kv_host_bytes=2**26, kv_disk=disk
    )
    driver = RingDriver("ring-0", LocalRing(config), _SETTINGS, SystemClock())
    await driver.start(lambda progress: None)
    try:
        yield driver
    finally:
        await driver.stop()


async def ask(
    driver: RingDriver, tenant: str, prompt: tuple[int, ...] = _PROMPT, *, reuse: bool = True
) -> Answer:
    request = Request(
        prompt,
        _SPEC,
        max_new_tokens=5,
        anchor=min(len(_HEAD), len(prompt)),
        session=SessionId(f"{tenant}/s"),
        tenant=tenant,
        reuse=reuse,
    )
    deltas: list[TokenDelta] = []
    miss: MissKind | None = None
    async with driver.submit(request) as stream:
        async for event in stream:
            match event:
                case Started():
                    miss = None if event.miss is None else event.miss.kind
                case TokenDelta():
                    deltas.append(event)
                case Finished(usage=usage):
                    tokens = tuple(token for delta in deltas for token in delta.tokens)
                    logprobs = tuple(row for delta in deltas for row in delta.logprobs)
                    return Answer(tokens, logprobs, usage.cached_prefix, miss)
    raise AssertionError("the stream ended without a word")


async def at_rest(driver: RingDriver) -> None:
    """Until all that its lanes hold is written back."""
    core = driver._scheduler
    assert core is not None
    async with asyncio.timeout(60):
        while core.retention._at_rest or core.oldest_in_flight is not None:  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize("lanes", [1, 3])
async def test_the_other_tenant_computes_all_and_says_what_a_cold_ring_says(
    tiny_model: Path, lanes: int
) -> None:
    async with driven(tiny_model, lanes=lanes) as driver:
        cold = [await ask(driver, "cold", p, reuse=False) for p in (_PROMPT, _BRANCH)]
        first = await ask(driver, "a")
        await at_rest(driver)
        for tenant in ("b", ""):
            others = await ask(driver, tenant, _BRANCH)
            assert (others.cached, others.miss) == (0, MissKind.NEW_SESSION)
            assert others.said == cold[1].said
            others = await ask(driver, tenant)
            assert others.cached == 70, "his own branch, up to where it parts"
            assert others.said == cold[0].said
        again = await ask(driver, "a")
        assert again.cached >= len(_PROMPT) - 1
        assert first.said == again.said == cold[0].said


async def test_behind_a_restart_each_finds_on_disk_what_was_his(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with driven(tiny_model, tmp_path) as driver:
        first = await ask(driver, "a")
        await ask(driver, "", _OTHER)
        await at_rest(driver)
    async with driven(tiny_model, tmp_path) as driver:
        assert (await ask(driver, "b", _OTHER)).cached == 0
        for tenant in ("b", ""):
            others = await ask(driver, tenant)
            assert others.cached == 0
            assert others.said == first.said
        again = await ask(driver, "a")
        assert again.cached >= 80
        assert again.said == first.said
        assert (await ask(driver, "", _OTHER)).cached >= 80


async def test_a_pin_is_of_one_tenants_rows(tiny_model: Path) -> None:
    async with driven(tiny_model) as driver:
        await ask(driver, "a")
        router = Router([driver], 10)
        for tenant in ("", "b"):
            with pytest.raises(InvalidValue, match="only 0 of its 64 tokens are held here"):
                router.pin(_HEAD, tenant)
        assert router.pin(_HEAD, "a") == ("ring-0",)


async def test_two_tenants_stores_lie_beside_each_other(tiny_model: Path) -> None:
    """The same tokens twice, and each head pinned for its own."""
    async with driven(tiny_model) as driver:
        for tenant in ("a", "b"):
            await ask(driver, tenant)
            await at_rest(driver)
        nodes = {node.id: node for node in driver.nodes()}
        roots = {node.parent for node in nodes.values()} - nodes.keys()
        assert len(roots) == 2
        pinned = [node for node in nodes.values() if node.pinned and node.start == 0]
        assert len({node.parent for node in pinned}) == 2
