"""Puts the HTTP routes together. It decides which there are; what they do is theirs."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.http.front import Front
from gateway.http.openai.chat import Chat
from gateway.http.openai.models import Models
from gateway.http.operators import Operators
from gateway.service import GenerationService


def make_app(service: GenerationService, most_bytes: int) -> Starlette:
    front = Front(service, most_bytes)
    routes = [*Chat(front).routes(), *Models(front).routes(), *Operators(front).routes()]
    return Starlette(routes=routes, exception_handlers={404: _unknown, 405: _unknown})


async def _unknown(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    said = f"there is no {request.method} {request.url.path} here"
    kind = {"message": said, "type": "invalid_request_error", "param": None}
    return JSONResponse({"error": {**kind, "code": "not_found"}}, status_code=status)
