"""Answers to requests that are still arriving, on connections that end with their answer: the rest is read first.

A connection that is closed while bytes come in is reset, and a client that was still sending never reads why. It
decides how much of a refused request is read for that, and for how long. Where the connection stays, uvicorn reads on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from starlette.types import Message, Receive, Scope, Send

# Several times the longest body that is taken; whoever sends more has not looked at any answer for long.
_MOST_BYTES = 64 * 2**20
_LONGEST_S = 5.0

_Headers = Iterable[tuple[bytes, bytes]]


class Lingering:
    """One request's `receive` and `send`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        headers = dict(scope["headers"])
        self._closes = scope["http_version"] == "1.0" or _says_close(headers.items())
        # Who asks first sends nothing when it is told no.
        self._asks_first = b"expect" in headers
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        self._is_arriving = has_body

    async def receive(self) -> Message:
        message = await self._receive()
        self._asks_first = False
        self._is_arriving = bool(message.get("more_body", False))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not self._asks_first:
            if self._closes or _says_close(message.get("headers", ())):
                await self._read_rest()
        await self._send(message)

    async def _read_rest(self) -> None:
        size = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_S):
                while self._is_arriving and size < _MOST_BYTES:
                    size += len((await self.receive()).get("body", b""))


def _says_close(headers: _Headers) -> bool:
    return any(name == b"connection" and b"close" in value.lower() for name, value in headers)
