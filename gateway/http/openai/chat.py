"""OpenAI's chat and plain completions, each a few lines over gateway/service.py."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from coordinator.errors import InvalidValue
from gateway.http.asker import Asker
from gateway.http.fields import Fields
from gateway.http.front import Front
from gateway.http.openai import chat_request
from gateway.http.openai.chat_answer import Answering
from gateway.http.openai.chat_request import Asked
from gateway.http.openai.chat_stream import ChatStream
from gateway.http.openai.errors import OPENAI
from gateway.http.streaming import collect, started_headers, streamed

Reader = Callable[[Fields, Asker], Asked]


class Chat:
    def __init__(self, front: Front) -> None:
        self._front = front
        self._service = front.service

    def routes(self) -> list[Route]:
        route = self._front.route
        return [
            route("POST", "/v1/chat/completions", self.chat, OPENAI),
            route("POST", "/v1/completions", self.completion, OPENAI),
        ]

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, chat_request.chat, chat=True)

    async def completion(self, request: Request) -> Response:
        return await self._answer(request, chat_request.completion, chat=False)

    def _check_choices(self, count: int) -> None:
        most = self._service.most_turns
        if most is not None and count > most:
            raise InvalidValue("n", f"is {count}, and each key may have {most} turns at once")
        room = self._service.room
        if room and count > room:
            raise InvalidValue("n", f"is {count}, and {room} turns run or wait here at most")

    async def _answer(self, request: Request, reader: Reader, *, chat: bool) -> Response:
        asker = self._front.asker(request)
        asked = await self._front.read(request, lambda body: reader(body, asker))
        self._check_choices(len(asked.turns))
        name, text_of = self._service.name, self._service.token_text
        answering = Answering(name, int(time.time()), text_of, chat=chat)
        if asked.stream:
            wire = ChatStream(answering, include_usage=asked.include_usage)
            return await streamed(self._service, asked.turns, wire, request)
        choices = await collect(self._service, asked.turns, request)
        headers = started_headers(choices[0].started)
        return JSONResponse(answering.whole(choices), headers=headers)
