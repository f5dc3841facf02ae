"""OpenAI's Responses API without its memory: each request brings its whole conversation.

What Codex would do wrong by a refusal's status it does right by an event, and so it gets one.
"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from coordinator.errors import BusyError, ContextTooLong
from gateway.http.fields import Fields
from gateway.http.front import Front
from gateway.http.openai.errors import OPENAI
from gateway.http.openai.responses import request as responses_request
from gateway.http.openai.responses.answer import Answering, status_of
from gateway.http.openai.responses.items import Output
from gateway.http.openai.responses.request import Asked
from gateway.http.openai.responses.stream import ResponseStream
from gateway.http.streaming import collect, started_headers, streamed

_UNCACHED = {"cache-control": "no-cache"}


class Responses:
    def __init__(self, front: Front) -> None:
        self._front = front
        self._service = front.service

    def routes(self) -> list[Route]:
        return [self._front.route("POST", "/v1/responses", self.create, OPENAI)]

    async def create(self, request: Request) -> Response:
        asker = self._front.asker(request)
        header = request.headers.get("session_id")

        def read(body: Fields) -> Asked:
            return responses_request.response(body, asker, header)

        asked = await self._front.read(request, read)
        answering = Answering(self._service.name, int(time.time()), asked)
        output = Output(asked.own, seals=asked.seals)
        if asked.stream:
            return await self._streamed(asked, ResponseStream(answering, output), request)
        (answer,) = await collect(self._service, (asked.turn,), request)
        for part in answer.parts:
            output.take(part)
        output.end(status_of(answer.finished))
        whole = answering.finished(output.items, answer.finished)
        return JSONResponse(whole, headers=started_headers(answer.started))

    async def _streamed(self, asked: Asked, wire: ResponseStream, request: Request) -> Response:
        try:
            return await streamed(self._service, (asked.turn,), wire, request)
        except (ContextTooLong, BusyError) as error:
            # Codex (the one client with this header) shortens its conversation, or waits, only when it is told by an
            # event: a 400 ends its turn, and a 429 is not tried again.
            if "originator" not in request.headers:
                raise
            failed = wire.failed(error, request.state.request_id)
            return StreamingResponse(
                iter([failed]), media_type="text/event-stream", headers=_UNCACHED
            )
