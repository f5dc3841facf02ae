"""Loading can be told from dead, over a socket: modelship-ai/modelship#31, ggml-org/llama.cpp#4860."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.ring import StageProgress
from coordinator.router import Router
from fakering.ring import FakeRing
from gateway.chat.byte_tokenizer import ByteTokenizer
from gateway.http.server import serve_http
from gateway.observing.sights import Sights
from gateway.service import GenerationService
from gateway.settings import HttpSettings
from tests.compat.http_client import Http

if TYPE_CHECKING:
    from coordinator.ring import ProgressSink, RingInfo

GIB = 2**30


class SlowRing(FakeRing):
    """Loads when it is told to: `go_on` lets it take one more step."""

    def __init__(self) -> None:
        super().__init__(2, 2, 512, vocab_size=258)
        self.steps = asyncio.Semaphore(0)
        self.at_rest = asyncio.Event()

    async def start(self, progress: ProgressSink) -> RingInfo:
        for stage, done in ((0, 0), (0, GIB), (1, GIB // 2), (0, 2 * GIB), (1, GIB)):
            progress(StageProgress(stage, done, (2 - stage) * GIB, "weights"))
            self.at_rest.set()
            await self.steps.acquire()
        return await super().start(lambda _: None)

    async def rest(self) -> None:
        await self.at_rest.wait()
        self.at_rest.clear()

    async def go_on(self) -> None:
        self.steps.release()
        await self.rest()


async def asked(client: Http, path: str) -> tuple[int, dict[str, str], Any]:
    status, headers, raw = await client.ask("GET", path)
    return status, headers, json.loads(raw)


def stages(told: Any) -> list[tuple[int, int, int]]:
    (ring,) = told["rings"]
    return [(each["stage"], each["bytes_done"], each["bytes_total"]) for each in ring["stages"]]


async def test_health_is_live_at_once_and_ready_tells_each_stages_progress_until_all_are_loaded() -> (
    None
):
    clock, ring, sights = SystemClock(), SlowRing(), Sights()
    driver = RingDriver("ring-0", ring, SchedulerSettings(), clock)
    router = Router([driver], session_limit=8)
    service = GenerationService("fake", router, ByteTokenizer(), clock, random.Random(1))
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(
            serve_http(service, HttpSettings(drain_s=1.0), sights)
        )
        client = Http(address)
        assert (await asked(client, "/health"))[0] == 200
        status, headers, told = await asked(client, "/ready")
        assert (status, told["status"], stages(told)) == (503, "loading", [])
        assert int(headers["retry-after"]) >= 1

        loading = asyncio.create_task(driver.start(sights.loading.sink("ring-0")))
        stack.push_async_callback(driver.stop)
        await ring.rest()
        seen = []
        for _ in range(4):
            await ring.go_on()
            status, _, told = await asked(client, "/ready")
            assert status == 503
            assert (await asked(client, "/health"))[0] == 200
            seen.append(stages(told))
        assert seen == [
            [(0, GIB, 2 * GIB)],
            [(0, GIB, 2 * GIB), (1, GIB // 2, GIB)],
            [(0, 2 * GIB, 2 * GIB), (1, GIB // 2, GIB)],
            # All bytes are there, and what comes behind them is not: it does not serve yet.
            [(0, 2 * GIB, 2 * GIB), (1, GIB, GIB)],
        ]
        page = (await asked(client, "/status.json"))[2]["rings"][0]
        assert (page["state"], page["stages"][1]["note"]) == ("loading", "weights")
        refused = await client.post("/v1/completions", {"prompt": "x"})
        assert (refused[0], refused[2]["error"]["code"]) == (503, "ring_unavailable")

        ring.steps.release()
        await loading
        status, _, told = await asked(client, "/ready")
        assert (status, told["status"]) == (200, "ready")
        assert (await client.post("/v1/completions", {"prompt": "x", "max_tokens": 1}))[0] == 200


async def test_a_ring_that_is_lost_is_not_said_to_load() -> None:
    clock = SystemClock()
    driver = RingDriver("ring-0", FakeRing(2, 2, 64, vocab_size=258), SchedulerSettings(), clock)
    router = Router([driver], session_limit=8)
    service = GenerationService("fake", router, ByteTokenizer(), clock, random.Random(1))
    async with serve_http(service, HttpSettings(drain_s=1.0)) as address:
        await driver.start(lambda _: None)
        assert (await asked(Http(address), "/ready"))[0] == 200
        await driver.stop()
        status, _, told = await asked(Http(address), "/ready")
        assert (status, told["status"]) == (503, "unavailable")
        assert told["rings"][0]["reason"] == "the ring was stopped"
        assert (await asked(Http(address), "/health"))[0] == 200
