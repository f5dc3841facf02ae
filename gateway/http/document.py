"""The HTTP interface as an OpenAPI document, for clients' authors and tools. What it says is in openapi.json."""

from __future__ import annotations

from importlib.metadata import version
from importlib.resources import files
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.http.front import Front
from gateway.http.openai.errors import OPENAI


def openapi_document() -> dict[str, Any]:
    text = files("gateway.http").joinpath("openapi.json").read_bytes()
    document: dict[str, Any] = msgspec.json.decode(text)
    document["info"]["version"] = version("ringserve")
    return document


class Document:
    def __init__(self, front: Front) -> None:
        self._front = front
        self._document = openapi_document()

    def routes(self) -> list[Route]:
        return [self._front.route("GET", "/openapi.json", self.openapi, OPENAI)]

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self._document)
