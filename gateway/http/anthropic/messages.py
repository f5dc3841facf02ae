"""Anthropic's messages and their token counts, each a few lines over gateway/service.py."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.http.anthropic import request as reading
from gateway.http.anthropic.answer import Answering
from gateway.http.anthropic.errors import ANTHROPIC
from gateway.http.anthropic.session import asker_of
from gateway.http.anthropic.stream import MessageStream
from gateway.http.front import Front
from gateway.http.streaming import collect, started_headers, streamed


class Messages:
    def __init__(self, front: Front) -> None:
        self._front = front
        self._service = front.service

    def routes(self) -> list[Route]:
        route = self._front.route
        return [
            route("POST", "/v1/messages", self.message, ANTHROPIC),
            route("POST", "/v1/messages/count_tokens", self.count, ANTHROPIC),
        ]

    async def message(self, request: Request) -> Response:
        asker = asker_of(self._front.asker(request), request.headers)
        asked = await self._front.read(request, lambda body: reading.asked(body, asker))
        answering = Answering(self._service.name, asked)
        if asked.stream:
            wire = MessageStream(answering)
            return await streamed(self._service, (asked.turn,), wire, request)
        (answer,) = await collect(self._service, (asked.turn,), request)
        return JSONResponse(answering.whole(answer), headers=started_headers(answer.started))

    async def count(self, request: Request) -> Response:
        prompt, model = await self._front.read(request, reading.counted)
        return JSONResponse({"input_tokens": await self._service.count_tokens(prompt, model)})
