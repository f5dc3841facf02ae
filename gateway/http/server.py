"""The HTTP server: where it listens, and how it drains. One event loop with gRPC; it installs no signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import uvicorn

from coordinator.errors import CannotListen
from gateway.fronts import LAST_WORDS_S
from gateway.http.app import make_app
from gateway.http.connection import Connection, ConnectionConfig
from gateway.http.held import HoldingApp
from gateway.http.status.feed import Feed
from gateway.http.status.snapshot import Snapshots
from gateway.listening import bound
from gateway.observing.sights import Sights
from gateway.safety.guard import OPEN, Guard
from gateway.safety.tls import ServerTls
from gateway.service import GenerationService
from gateway.settings import PATIENCE, HttpSettings

log = logging.getLogger(__name__)

# Calls that wait to be accepted.
_BACKLOG = 1024


class _Server(uvicorn.Server):
    """Signals are gateway/cli/serve.py's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def cut(self) -> None:
        """Ends the connections that did not end by themselves, before uvicorn does: it would cancel their requests and
        log each one's stack.
        """
        left = [each for each in self.server_state.connections if isinstance(each, Connection)]
        if left:
            log.warning(
                "cut off %d connections: their clients did not read, or send, in time", len(left)
            )
        for each in left:
            each.cut()


@asynccontextmanager
async def serve_http(
    service: GenerationService,
    settings: HttpSettings,
    sights: Sights | None = None,
    guard: Guard = OPEN,
) -> AsyncIterator[str]:
    """Listens and yields HOST:PORT; on leaving, running requests get `drain_s` to end. Raises CannotListen."""
    listening = _listen(settings)
    sights = sights or Sights()
    feed = Feed(Snapshots(service, sights).encoded)
    shown = (feed, sights.loading, sights.metrics)
    config = ConnectionConfig(
        HoldingApp(make_app(service, settings.max_body_bytes, *shown, guard), service.intake),
        ssl_context_factory=_context_factory(guard.tls),
        log_config=None,
        ws="none",
        access_log=False,
        lifespan="off",
        server_header=False,
        backlog=_BACKLOG,
        most=settings.max_connections,
        request_s=settings.request_s,
        unread_s=settings.unread_s * PATIENCE,
    )
    server = _Server(config)
    host, port = listening.getsockname()[:2]
    task = asyncio.create_task(server.serve(sockets=[listening]), name="http")
    left_s = 0.0
    try:
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        left_s = await service.drain(settings.drain_s)
    finally:
        service.end_turns()
        feed.close()
        await _end(server, task, max(left_s, LAST_WORDS_S))


def _context_factory(
    tls: ServerTls | None,
) -> Callable[[uvicorn.Config, Callable[[], ssl.SSLContext]], ssl.SSLContext] | None:
    return None if tls is None else lambda _config, _default: tls.context


async def _end(server: _Server, task: asyncio.Task[None], within_s: float) -> None:
    """What is decided is sent, as far as there is time and unless somebody wants to be gone."""
    # Beyond ours: uvicorn cancels what is still there.
    server.config.timeout_graceful_shutdown = math.ceil(within_s + LAST_WORDS_S)
    server.should_exit = True
    try:
        await asyncio.wait((task,), timeout=within_s)
    except asyncio.CancelledError:
        server.force_exit = True
        raise
    finally:
        server.cut()
        await task


def _listen(settings: HttpSettings) -> socket.socket:
    """Before the server runs: who is told the address may connect at once."""
    listening = bound(settings.host, settings.port, "--http-port")
    try:
        listening.listen(_BACKLOG)
    except OSError as error:  # somebody else bound it, too, and was faster
        listening.close()
        raise CannotListen(f"cannot listen on port {settings.port}: {error}") from error
    return listening
