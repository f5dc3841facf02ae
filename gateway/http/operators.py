"""What operators and their tools ask: whether the process lives, whether it serves, and which version it is."""

from __future__ import annotations

import math
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from coordinator.status import RingState, RingStatus
from gateway.http.front import Front
from gateway.http.openai.errors import OPENAI
from gateway.observing.loading import LoadRecord


class Operators:
    def __init__(self, front: Front, loading: LoadRecord) -> None:
        self._front = front
        self._loading = loading

    def routes(self) -> list[Route]:
        route = self._front.route
        return [
            route("GET", "/health", self.health, OPENAI, is_open=True),
            route("GET", "/ready", self.ready, OPENAI, is_open=True),
            route("GET", "/version", self.version, OPENAI),
        ]

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """503 while no ring has all of its stages, with how far each is, or what it lost."""
        rings = self._front.service.rings()
        told = [self._ring(ring) for ring in rings] if self._front.knows(request) else []
        if self._front.service.draining:
            return JSONResponse({"status": "draining", "rings": told}, 503, {"retry-after": "1"})
        if any(ring.ready for ring in rings):
            return JSONResponse({"status": "ready", "rings": told})
        states = {ring.state for ring in rings}
        waited = (state for state in (RingState.RECOVERING, RingState.LOADING) if state in states)
        status = next((state.value for state in waited), "unavailable")
        after = str(math.ceil(self._front.service.back_s))
        return JSONResponse({"status": status, "rings": told}, 503, {"retry-after": after})

    def _ring(self, ring: RingStatus) -> dict[str, Any]:
        told = {"ring": ring.name, "ready": ring.ready, "reason": ring.reason}
        if ring.info is not None:
            return told
        stages = [msgspec.to_builtins(each) for each in self._loading.stages(ring.name)]
        return {**told, "stages": stages}

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": version("ringserve")})
