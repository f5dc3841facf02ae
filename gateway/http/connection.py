"""One client's connection: how long it may take over sending a request, and how long it may leave an answer unread.

Decides when a connection is given up, and which is one too many. Whose turn that ends is for the routes, which see a
client that left, and in their request's state how long it had not read.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.errors import TooManyConnections
from gateway.http.anthropic.errors import ANTHROPIC
from gateway.http.errors import error_response
from gateway.http.lingering import Lingering
from gateway.http.openai.errors import OPENAI

log = logging.getLogger(__name__)

# In a request's state: for how many seconds its answer lay unread when its connection was given up.
UNREAD = "unread_s"
# The client has said all of its request, or will say nothing more.
_ARRIVED = frozenset({h11.DONE, h11.MUST_CLOSE, h11.CLOSED, h11.ERROR})
_UNANSWERED = frozenset({h11.IDLE, h11.SEND_RESPONSE})
# Of an answer that the system takes before its client reads. By itself it takes megabytes, hundreds of seconds of an
# answer that nobody may be reading; this much is enough for 2 MB/s over 100 ms.
_SEND_BYTES = 1 << 17
# Bytes of further requests that are kept while one is answered.
_MOST_AHEAD = 1 << 18


class ConnectionConfig(uvicorn.Config):
    """uvicorn's settings and ours. Connections beyond `most` are told so, and when to come back."""

    def __init__(
        self, app: Any, *, request_s: float, unread_s: float, most: int, **others: Any
    ) -> None:
        super().__init__(app, http=Connection, **others)
        self.request_s = request_s
        self.unread_s = unread_s
        self.most = most


class Connection(H11Protocol):
    """Aborted, not closed: closing would wait until the other side has read what lies there, which it does not."""

    config: ConnectionConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        give_up = self._give_up
        late = "its request did not arrive in time"
        self._arrival = _Deadline(self.loop, self.config.request_s, lambda: give_up(late))
        self._reading = _Deadline(self.loop, self.config.unread_s, self._unread)
        self._served, self.app = self.app, self._let_in

    async def _let_in(self, scope: Any, receive: Any, send: Any) -> None:
        app: Any = self._served
        if len(self.connections) > self.config.most:
            is_message = scope["path"].startswith("/v1/messages")
            dialect = ANTHROPIC if is_message else OPENAI
            too_many = TooManyConnections(self.config.most)
            app = error_response(too_many, uuid.uuid4().hex, dialect)
            # Kept open it would go on to count, and those that were here before would be turned away as well.
            app.headers["connection"] = "close"
        lingering = Lingering(scope, receive, send)
        await app(scope, lingering.receive, lingering.send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES
        )
        super().connection_made(transport)
        self._arrival.start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrival.stop()
        self._reading.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_rest()
        self._listen_on()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # What was sent behind this request is read only now.
        self._await_rest()
        self._listen_on()

    def _listen_on(self) -> None:
        """uvicorn stops reading at the next request, and then it does not hear that the client left."""
        if self.conn.their_state is not h11.DONE or not self.flow.read_paused:
            return
        if len(self.conn.trailing_data[0]) > _MOST_AHEAD:
            self._give_up("it sends requests ahead of its answers")
        else:
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in _UNANSWERED:
            super().send_400_response(msg)
        else:
            self._give_up("it sent what is no request behind one that is being answered")

    def _await_rest(self) -> None:
        if self.conn.their_state in _ARRIVED:
            self._arrival.stop()
        else:
            self._arrival.start()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading.stop()

    def _unread(self) -> None:
        self.cycle.scope["state"][UNREAD] = self.config.unread_s
        self._give_up("its answer was not read in time")

    def _give_up(self, why: str) -> None:
        log.info("a client is given up: %s", why)
        self.cut()

    def cut(self) -> None:
        """Whatever of its answer is still to be sent."""
        self.transport.abort()


class _Deadline:
    """`after_s` seconds from when it was started first."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, after_s: float, then: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._after_s = after_s
        self._then = then
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._after_s, self._then)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
