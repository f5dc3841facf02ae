"""Puts the HTTP routes together. It decides which there are; what they do is theirs."""

from __future__ import annotations

import uuid

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.http.anthropic.errors import error_body
from gateway.http.anthropic.messages import Messages
from gateway.http.document import Document
from gateway.http.errors import request_id_headers
from gateway.http.front import Front
from gateway.http.metrics import Scraping
from gateway.http.openai.chat import Chat
from gateway.http.openai.models import Models
from gateway.http.openai.responses.route import Responses
from gateway.http.operators import Operators
from gateway.http.status.feed import Feed
from gateway.http.status.page import StatusPage
from gateway.observing.loading import LoadRecord
from gateway.observing.metrics.exposition import Metrics
from gateway.safety.guard import OPEN, Guard
from gateway.service import GenerationService


def make_app(
    service: GenerationService,
    most_bytes: int,
    feed: Feed,
    loading: LoadRecord,
    metrics: Metrics | None = None,
    guard: Guard = OPEN,
) -> Starlette:
    front = Front(service, most_bytes, guard)
    operators = (Operators(front, loading), StatusPage(front, feed), Document(front))
    fronts = (Chat(front), Responses(front), Messages(front), Models(front), *operators)
    routes = [route for each in fronts for route in each.routes()]
    if metrics is not None:
        routes += Scraping(front, metrics).routes()
    return Starlette(routes=routes, exception_handlers={404: _unknown, 405: _unknown})


async def _unknown(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    said = f"there is no {request.method} {request.url.path} here"
    request_id = uuid.uuid4().hex
    # Starlette says which methods there are.
    headers = {**(getattr(error, "headers", None) or {}), **request_id_headers(request_id)}
    headers["x-should-retry"] = "false"
    if request.url.path.startswith("/v1/messages"):
        return JSONResponse(error_body("not_found_error", said, request_id), status, headers)
    code = "method_not_allowed" if status == 405 else "not_found"
    kind = {"message": said, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": kind}, status, headers)
