"""The served model, in the shape of both OpenAI's and Anthropic's clients: they ask the same path. And its tokens."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from coordinator.errors import InvalidValue, ModelNotFound
from gateway.http.fields import Fields
from gateway.http.front import Front
from gateway.http.openai import chat_request
from gateway.http.openai.errors import OPENAI
from gateway.turns import Prompt


class Models:
    def __init__(self, front: Front) -> None:
        self._front = front
        self._service = front.service

    def routes(self) -> list[Route]:
        route = self._front.route
        return [
            route("GET", "/v1/models", self.models, OPENAI),
            route("GET", "/v1/models/{model:path}", self.model, OPENAI),
            route("POST", "/tokenize", self.tokenize, OPENAI),
            route("POST", "/detokenize", self.detokenize, OPENAI),
        ]

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
        name = self._service.name
        made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._front.created))
        return {
            "id": name,
            "object": "model",
            "created": self._front.created,
            "owned_by": "ringserve",
            "max_model_len": self._service.info().max_rows,
            "type": "model",
            "display_name": name,
            "created_at": made,
        }

    async def tokenize(self, request: Request) -> Response:
        def read(body: Fields) -> tuple[Prompt, str]:
            return chat_request.tokenized(body), body.text("model") or ""

        prompt, model = await self._front.read(request, read)
        tokens = await self._service.tokenize(prompt, model)
        rows = self._service.info().max_rows
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": rows})

    async def detokenize(self, request: Request) -> Response:
        def read(body: Fields) -> tuple[int, ...]:
            tokens = body.list("tokens")
            if not all(type(token) is int for token in tokens):
                raise InvalidValue("tokens", "must be token ids")
            return tuple(tokens)

        tokens = await self._front.read(request, read)
        return JSONResponse({"prompt": await self._service.detokenize(tokens)})
