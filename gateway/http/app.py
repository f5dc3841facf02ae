"""The routes: OpenAI's chat and plain completions, models, tokens, and what operators ask a server.

Each is a few lines over gateway/service.py. Errors are raised as they come, and become answers in one place.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from coordinator.errors import InvalidValue, ModelNotFound, RequestTooLarge
from gateway.errors import is_internal
from gateway.http import chat_request
from gateway.http.chat_answer import Answering
from gateway.http.chat_request import Asked
from gateway.http.errors import CLIENT_CLOSED, error_response
from gateway.http.fields import Fields, parse
from gateway.http.turns import ClientGone, Told, collect, merged, sent
from gateway.service import GenerationService
from gateway.turns import TurnStarted

log = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
Reader = Callable[[Fields, str | None], Asked]

# Seconds that a stream's headers wait for its first event, so that what is refused is refused with a status.
_FIRST_EVENT_S = 2.0
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Front:
    """Handlers over one service. `most_bytes`: of a request's body."""

    def __init__(self, service: GenerationService, most_bytes: int) -> None:
        self._service = service
        self._most_bytes = most_bytes
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        post, get = ["POST"], ["GET"]
        return [
            Route("/v1/chat/completions", self._guarded(self.chat), methods=post),
            Route("/v1/completions", self._guarded(self.completion), methods=post),
            Route("/v1/models", self._guarded(self.models), methods=get),
            Route("/v1/models/{model:path}", self._guarded(self.model), methods=get),
            Route("/tokenize", self._guarded(self.tokenize), methods=post),
            Route("/detokenize", self._guarded(self.detokenize), methods=post),
            Route("/health", self._guarded(self.health), methods=get),
            Route("/ready", self._guarded(self.ready), methods=get),
            Route("/version", self._guarded(self.version), methods=get),
        ]

    # Turns

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, chat_request.chat, chat=True)

    async def completion(self, request: Request) -> Response:
        return await self._answer(request, chat_request.completion, chat=False)

    async def _answer(self, request: Request, reader: Reader, *, chat: bool) -> Response:
        session = request.headers.get("x-session-id") or None
        asked = await self._read(request, lambda body: reader(body, session))
        name, text_of = self._service.name, self._service.token_text
        answering = Answering(name, int(time.time()), text_of, chat=chat)
        if asked.stream:
            return await self._stream(asked, answering)
        choices = await collect(self._service, asked.turns, request)
        headers = _headers(choices[0].started)
        return JSONResponse(answering.whole(choices), headers=headers)

    async def _stream(self, asked: Asked, answering: Answering) -> Response:
        events = merged(self._service, asked.turns)
        coming: asyncio.Future[Told | None] = asyncio.ensure_future(anext(events, None))
        try:
            await asyncio.wait({coming}, timeout=_FIRST_EVENT_S)
            told = coming.result() if coming.done() else None
        except BaseException:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
            await events.aclose()
            raise
        first = None if told is None else told.event
        headers = _headers(first) if isinstance(first, TurnStarted) else {}
        body = sent(coming, events, answering, include_usage=asked.include_usage)
        return StreamingResponse(
            body, media_type="text/event-stream", headers={**_STREAM_HEADERS, **headers}
        )

    # The model and its tokens

    async def models(self, request: Request) -> Response:
        card = self._card()
        ids = {"first_id": card["id"], "last_id": card["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": [card], **ids})

    async def model(self, request: Request) -> Response:
        asked = request.path_params["model"]
        if asked != self._service.name:
            raise ModelNotFound(model=asked, served=self._service.name)
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        """In OpenAI's and in Anthropic's shape: their clients ask the same path."""
        name = self._service.name
        made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created))
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "ringserve",
            "max_model_len": self._service.info().max_rows,
            "type": "model",
            "display_name": name,
            "created_at": made,
        }

    async def tokenize(self, request: Request) -> Response:
        def read(body: Fields) -> tuple[Any, str]:
            return chat_request.tokenized(body), body.text("model") or ""

        prompt, model = await self._read(request, read)
        tokens = await self._service.tokenize(prompt, model)
        rows = self._service.info().max_rows
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": rows})

    async def detokenize(self, request: Request) -> Response:
        def read(body: Fields) -> tuple[int, ...]:
            tokens = body.list("tokens")
            if not all(type(token) is int for token in tokens):
                raise InvalidValue("tokens", "must be token ids")
            return tuple(tokens)

        tokens = await self._read(request, read)
        return JSONResponse({"prompt": await self._service.detokenize(tokens)})

    # Operators

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        rings = [
            {"ring": ring.name, "ready": ring.ready, "reason": ring.reason}
            for ring in self._service.rings()
        ]
        if any(ring["ready"] for ring in rings):
            return JSONResponse({"status": "ready", "rings": rings})
        return JSONResponse({"status": "loading", "rings": rings}, 503, {"retry-after": "1"})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": version("ringserve")})

    # What all of them share

    async def _read(self, request: Request, read: Callable[[Fields], T]) -> T:
        """Raises InvalidValue, RequestTooLarge and QueueFull."""
        body = await self._body(request)
        return await self._service.converted(len(body), partial(_parsed, body, read))

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._most_bytes:
                raise RequestTooLarge(received_bytes=size, limit_bytes=self._most_bytes)
            parts.append(part)
        return b"".join(parts)

    def _guarded(self, handler: Handler) -> Handler:
        """Errors become answers, and every answer says whose request it was."""

        async def guarded(request: Request) -> Response:
            given = request.headers.get("x-request-id", "")
            request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
            try:
                response = await handler(request)
            except (ClientGone, ClientDisconnect):
                return Response(status_code=CLIENT_CLOSED)
            except Exception as error:
                if is_internal(error):
                    log.exception("request_id=%s path=%s", request_id, request.url.path)
                return error_response(error, request_id)
            response.headers["x-request-id"] = request_id
            return response

        return guarded


def _parsed(body: bytes, read: Callable[[Fields], T]) -> T:
    return read(parse(body))


def _headers(started: TurnStarted) -> dict[str, str]:
    headers = {
        "x-ringserve-ring": started.ring,
        "x-ringserve-cached-prefix": str(started.cached_prefix),
    }
    if started.miss is not None:
        headers["x-ringserve-miss"] = started.miss.kind.value
    return headers


def make_app(service: GenerationService, most_bytes: int) -> Starlette:
    async def unknown(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        said = f"there is no {request.method} {request.url.path} here"
        kind = {"message": said, "type": "invalid_request_error", "param": None}
        return JSONResponse({"error": {**kind, "code": "not_found"}}, status_code=status)

    routes = Front(service, most_bytes).routes()
    return Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown})
