"""What operators and their tools ask: whether the process lives, whether it serves, and which version it is."""

from __future__ import annotations

from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.http.front import Front
from gateway.http.openai.errors import OPENAI


class Operators:
    def __init__(self, front: Front) -> None:
        self._front = front

    def routes(self) -> list[Route]:
        route = self._front.route
        return [
            route("GET", "/health", self.health, OPENAI),
            route("GET", "/ready", self.ready, OPENAI),
            route("GET", "/version", self.version, OPENAI),
        ]

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        rings = [
            {"ring": ring.name, "ready": ring.ready, "reason": ring.reason}
            for ring in self._front.service.rings()
        ]
        if any(ring["ready"] for ring in rings):
            return JSONResponse({"status": "ready", "rings": rings})
        return JSONResponse({"status": "loading", "rings": rings}, 503, {"retry-after": "1"})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": version("ringserve")})
