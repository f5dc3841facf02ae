"""Where Prometheus scrapes: GET /metrics, as text or OpenMetrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.http.front import Front
from gateway.http.openai.errors import OPENAI
from gateway.observing.metrics.exposition import Metrics


class Scraping:
    def __init__(self, front: Front, metrics: Metrics) -> None:
        self._front = front
        self._metrics = metrics

    def routes(self) -> list[Route]:
        return [self._front.route("GET", "/metrics", self.metrics, OPENAI)]

    async def metrics(self, request: Request) -> Response:
        text, content_type = self._metrics.text(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})
