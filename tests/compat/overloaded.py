"""A small fake ring behind both fronts, and clients that ask it on any of its wires. For tests of overload."""

from __future__ import annotations

import json
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.requests import SamplingSpec
from coordinator.router import Router
from fakering.model import FakeModel
from fakering.ring import FakeRing
from gateway.chat.byte_tokenizer import ByteTokenizer
from gateway.client import Client, ErrorInfo, error_info
from gateway.http.server import serve_http
from gateway.intake import MOST_BYTES, Intake
from gateway.observing.metrics.exposition import Metrics
from gateway.observing.sights import Sights
from gateway.rpc.client_convert import generate_request
from gateway.rpc.server import serve_grpc
from gateway.service import GenerationService
from gateway.settings import GrpcSettings, HttpSettings
from gateway.turns import TextPrompt, TurnRequest
from tests.compat.http_client import Http

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

GREEDY = SamplingSpec(temperature=0.0)
MODEL = FakeModel(258, low=32, high=127)


@dataclass(frozen=True)
class Place:
    http: Http
    client: Client
    driver: RingDriver
    service: GenerationService
    metrics: Metrics
    ring: Any

    @property
    def is_idle(self) -> bool:
        status = self.driver.status()
        return not (status.running_jobs or status.waiting_jobs or self.service.open_turns)

    def figure(self, name: str) -> float:
        """Of one series, written as it is exposed: name{label="value"}, without the model's name."""
        text = self.metrics.text("")[0].decode()
        for own in ('{model_name="fake"}', 'model_name="fake",', ',model_name="fake"'):
            text = text.replace(own, "")
        values = [line for line in text.splitlines() if line.startswith(f"ringserve:{name} ")]
        return float(values[0].split()[-1])


@asynccontextmanager
async def crowded_place(
    *,
    lanes: int = 2,
    max_rows: int = 8192,
    step_s: float = 0.0,
    request_bytes: int = MOST_BYTES,
    kind: type[FakeRing] = FakeRing,
    **scheduler: Any,
) -> AsyncIterator[Place]:
    """An endless model: an answer is as long as was asked for."""
    settings, clock = SchedulerSettings(**scheduler), SystemClock()
    ring = kind(2, lanes, max_rows, vocab_size=258, language=MODEL, step_s=step_s)
    metrics = Metrics("ringserve:", "fake")
    driver = RingDriver("ring-0", ring, settings, clock, observers=(metrics.rings,))
    router = Router([driver], session_limit=64)
    metrics.look_at(router, clock, settings.node_rows)
    intake = Intake(clock, request_bytes, metrics.turns.shed)
    service = GenerationService(
        "fake",
        router,
        ByteTokenizer(),
        clock,
        random.Random(1),
        (metrics.turns,),
        intake=intake,
    )
    grpc_settings = GrpcSettings(drain_s=0.0, unread_s=settings.unread_s)
    http_settings = HttpSettings(drain_s=1.0, unread_s=settings.unread_s)
    await driver.start(lambda _: None)
    try:
        async with (
            serve_grpc(service, grpc_settings) as grpc_address,
            serve_http(service, http_settings, Sights(metrics=metrics)) as http_address,
            Client(grpc_address) as client,
        ):
            yield Place(Http(http_address), client, driver, service, metrics, ring)
    finally:
        await driver.stop()


@dataclass(frozen=True)
class Answer:
    """`text` None: it was turned away, and told to come back after so many seconds."""

    status: str
    text: str | None = None
    retry_after_s: float | None = None


def asking(text: str, tokens: int, padding: int = 0) -> dict[str, Any]:
    """`padding`: bytes that mean nothing."""
    messages = [{"role": "user", "content": text}]
    return {
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "padding": "x" * padding,
    }


async def by_chat(place: Place, text: str, tokens: int, padding: int = 0) -> Answer:
    body = asking(text, tokens, padding)
    status, headers, raw = await place.http.ask("POST", "/v1/chat/completions", body)
    said = json.loads(raw)
    if status == 200:
        return Answer("200", said["choices"][0]["message"]["content"])
    return Answer(f"{status} {said['error']['code']}", None, _after(headers))


async def by_message(place: Place, text: str, tokens: int, padding: int = 0) -> Answer:
    body = asking(text, tokens, padding)
    status, headers, raw = await place.http.ask("POST", "/v1/messages", body)
    said = json.loads(raw)
    if status == 200:
        return Answer("200", said["content"][0]["text"])
    return Answer(f"{status} {said['error']['type']}", None, _after(headers))


async def by_grpc(place: Place, text: str, tokens: int, padding: int = 0) -> Answer:
    message = generate_request(TurnRequest(TextPrompt(text), sampling=GREEDY, max_tokens=tokens))
    if padding:
        # A field of a version to come.
        message.MergeFromString(_FIELD_2047 + _varint(padding) + b"x" * padding)
    call = place.client._stub.Generate(message)
    try:
        said = [event.delta.text async for event in call]
    except grpc.aio.AioRpcError as error:
        info = error_info(error) or ErrorInfo("nothing of ours", {})
        return Answer(f"{error.code().name} {info.reason}", None, info.retry_after_s)
    return Answer("200", "".join(said))


_FIELD_2047 = b"\xfa\x7f"


def _varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


def _after(headers: dict[str, str]) -> float | None:
    told = headers.get("retry-after")
    return None if told is None else float(int(told))
