"""Counts what requests bring from the first byte that is read to the end of the answer. It knows no route."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.errors import QueueFull
from gateway.intake import Intake

# Of a request that is turned away. An announced length beyond what is read was refused before.
_MOST_DISCARDED = 16 * 2**20


class HoldingApp:
    """An ASGI application around another. Who brings too much is told so where the body is read: QueueFull."""

    def __init__(self, app: ASGIApp, intake: Intake) -> None:
        self._app = app
        self._intake = intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._intake.opened() as held:

            async def counted() -> Message:
                message = await receive()
                try:
                    held.add(len(message.get("body", b"")))
                except QueueFull:
                    held.drop()
                    await _discarded(message, receive)
                    raise
                return message

            await self._app(scope, counted, send)


async def _discarded(message: Message, receive: Receive) -> None:
    """The rest of the body: a client that is still sending, and whose connection is closed, reads no answer."""
    size = 0
    while message.get("more_body", False) and size < _MOST_DISCARDED:
        message = await receive()
        size += len(message.get("body", b""))
