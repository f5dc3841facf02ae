"""A whole guarded process of a fake ring, and what two callers of it have. For tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from openai import AsyncOpenAI

from gateway.client import Client
from gateway.launch import Running, launch
from gateway.progress import SilentBoard
from gateway.safety.settings import SafetySettings
from gateway.settings import RingKind, ServeSettings
from tests.compat.http_client import Http

ALICE, BOB, WRONG = "sk-alice-0123456789", "sk-bob-0123456789", "sk-wrong-0123456789"
KEYS = f"alice {ALICE}, bob {BOB}"


@dataclass(frozen=True)
class Guarded:
    running: Running
    http: Http

    def openai(self, key: str, **more: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"http://{self.running.http_address}/v1", api_key=key, **more)

    def channel(self) -> Any:
        return grpc.aio.insecure_channel(self.running.grpc_address)

    def grpc(self, key: str) -> Client:
        return Client(self.running.grpc_address, api_key=key)


@asynccontextmanager
async def guarded(**safety: Any) -> AsyncIterator[Guarded]:
    """Keys of alice and bob, and whatever else is demanded."""
    settings = ServeSettings("fake", RingKind.FAKE, safety=SafetySettings(api_keys=KEYS, **safety))
    async with launch(settings, SilentBoard()) as running:
        yield Guarded(running, Http(running.http_address))
