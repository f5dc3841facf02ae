"""Counts what requests bring from the first byte that is read to the end of the answer. It knows no route."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.errors import QueueFull
from gateway.intake import Intake


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
                    raise
                return message

            await self._app(scope, counted, send)
