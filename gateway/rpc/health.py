"""grpc.health.v1 over the state of the rings at the moment of the question.

It decides what is told about "" and our own service: NOT_SERVING while loading, healing or draining. Watches end
once the last turn has, since they would hold the server up for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

# How late a watcher may learn of a change.
_WATCH_INTERVAL_S = 0.5


class RingHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # generated, has no types
    def __init__(self, service: str, serving: Callable[[], bool]) -> None:
        self._names = ("", service)
        self._serving = serving
        self._draining = asyncio.Event()
        self._over = asyncio.Event()

    def drain(self) -> None:
        """NOT_SERVING from now on."""
        self._draining.set()

    def end(self) -> None:
        """Who watches is told so, and no more."""
        self._draining.set()
        self._over.set()

    def _state(self, name: str) -> int:
        states = health_pb2.HealthCheckResponse
        if name not in self._names:
            return int(states.SERVICE_UNKNOWN)
        serving = self._serving() and not self._draining.is_set()
        return int(states.SERVING if serving else states.NOT_SERVING)

    async def Check(self, request: Any, context: Any) -> Any:
        state = self._state(request.service)
        if state == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=state)

    async def Watch(self, request: Any, context: Any) -> None:
        told = None
        while True:
            # Asked before the state: an end that comes during the write has still to be told.
            is_last = self._over.is_set()
            state = self._state(request.service)
            if state != told:
                await context.write(health_pb2.HealthCheckResponse(status=state))
                told = state
            if is_last:
                return
            await self._interval()

    async def _interval(self) -> None:
        news = self._over if self._draining.is_set() else self._draining
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WATCH_INTERVAL_S):
                await news.wait()
