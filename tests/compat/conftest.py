"""A fake ring that is served over real sockets, for every test of a wire."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.router import Router
from fakering.model import FakeModel
from fakering.ring import FakeRing
from fakering.scripted import ScriptedModel
from gateway.chat.byte_tokenizer import END, ByteTokenizer
from gateway.client import Client
from gateway.http.server import serve_http
from gateway.observing.metrics.exposition import Metrics
from gateway.observing.sights import Sights
from gateway.pb.generation_pb2_grpc import GenerationServiceStub
from gateway.rpc.server import serve_grpc
from gateway.service import GenerationService
from gateway.settings import GrpcSettings, HttpSettings
from tests.compat.http_client import Http

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from fakering.faults import FaultScript

MAX_ROWS = 2048
_STRICT: Any = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True}


@dataclass(frozen=True)
class Site:
    """A served fake ring and a client of it."""

    address: str
    client: Client
    stub: Any
    driver: RingDriver
    ring: FakeRing
    service: GenerationService
    channel: Any


@asynccontextmanager
async def _site(
    *,
    endless: bool = False,
    step_s: float = 0.0,
    queue_limit: int = 64,
    start: bool = True,
    drain_s: float = 0.0,
    keepalive_s: float = 30.0,
    host_rows: int = 0,
    says: Mapping[str, str] | None = None,
    tokenizer: ByteTokenizer | None = None,
    faults: FaultScript = (),
    kind: type[FakeRing] = FakeRing,
) -> AsyncIterator[Site]:
    language = _language(None if endless else END, says or {})
    clock = SystemClock()
    sizes: Any = {"vocab_size": 258, "step_s": step_s, "host_rows": host_rows}
    ring = kind(2, 4, MAX_ROWS, language=language, faults=faults, **sizes)
    # A ring that was stopped does not heal, and is soon given up.
    settings = SchedulerSettings(queue_limit=queue_limit, heal_backoff_s=0.01)
    driver = RingDriver("ring-0", ring, settings, clock)
    router = Router([driver], session_limit=64)
    tokens = tokenizer or ByteTokenizer()
    service = GenerationService("fake", router, tokens, clock, random.Random(1))
    grpc_settings = GrpcSettings(
        drain_s=drain_s, keepalive_s=keepalive_s, keepalive_timeout_s=keepalive_s
    )
    if start:
        await driver.start(lambda _: None)
    try:
        async with (
            serve_grpc(service, grpc_settings) as address,
            Client(address) as client,
            grpc.aio.insecure_channel(
                address, options=(("grpc.max_send_message_length", -1),)
            ) as channel,
        ):
            stub = GenerationServiceStub(channel)
            yield Site(address, client, stub, driver, ring, service, channel)
    finally:
        await driver.stop()


def _language(end: int | None, says: Mapping[str, str]) -> FakeModel:
    encode = ByteTokenizer().encode
    script = {encode(asked): encode(said) for asked, said in says.items()}
    opening = encode("<|start|>assistant\n")
    return ScriptedModel(258, low=32, high=127, end_token=end, opening=opening, script=script)


@pytest.fixture
def site() -> Callable[..., AbstractAsyncContextManager[Site]]:
    """Makes a site; `endless`: answers that never end by themselves, `step_s`: seconds a frame takes, `says`: what is
    answered to a prompt in which a text stands, `faults` and `kind`: of its ring.
    """
    return _site


@pytest.fixture
def http(
    site: Callable[..., AbstractAsyncContextManager[Site]],
) -> Callable[..., AbstractAsyncContextManager[tuple[Http, Site]]]:
    """Makes a site behind HTTP."""

    @asynccontextmanager
    async def make(**kinds: Any) -> AsyncIterator[tuple[Http, Site]]:
        named = ("max_body_bytes", "request_s", "unread_s")
        own = {name: kinds.pop(name) for name in named if name in kinds}
        settings = HttpSettings(drain_s=1.0, **own)
        seen = Sights(metrics=Metrics("ringserve:", "fake"))
        async with site(**kinds) as fake, serve_http(fake.service, settings, seen) as address:
            yield Http(address), fake

    return make


@pytest.fixture
def openai_sdk(
    site: Callable[..., AbstractAsyncContextManager[Site]],
) -> Callable[..., AbstractAsyncContextManager[tuple[AsyncOpenAI, Site]]]:
    """Makes a site behind HTTP and OpenAI's own client of it, which refuses what it does not know."""

    @asynccontextmanager
    async def make(**kinds: Any) -> AsyncIterator[tuple[AsyncOpenAI, Site]]:
        async with (
            site(**kinds) as fake,
            serve_http(fake.service, HttpSettings(drain_s=1.0)) as address,
            AsyncOpenAI(base_url=f"http://{address}/v1", **_STRICT) as client,
        ):
            yield client, fake

    return make


@pytest.fixture
def anthropic_sdk(
    site: Callable[..., AbstractAsyncContextManager[Site]],
) -> Callable[..., AbstractAsyncContextManager[tuple[AsyncAnthropic, Site]]]:
    """The same with Anthropic's."""

    @asynccontextmanager
    async def make(**kinds: Any) -> AsyncIterator[tuple[AsyncAnthropic, Site]]:
        async with (
            site(**kinds) as fake,
            serve_http(fake.service, HttpSettings(drain_s=1.0)) as address,
            AsyncAnthropic(base_url=f"http://{address}", **_STRICT) as client,
        ):
            yield client, fake

    return make
