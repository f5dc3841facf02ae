"""The HTTP server: where it listens, and how it drains. One event loop with gRPC; it installs no signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import uvicorn

from coordinator.errors import CannotListen
from gateway.http.app import make_app
from gateway.http.connection import ConnectionConfig
from gateway.http.draining import Draining
from gateway.http.held import HoldingApp
from gateway.http.status.feed import Feed
from gateway.http.status.snapshot import Snapshots
from gateway.listening import bound
from gateway.observing.sights import Sights
from gateway.safety.guard import OPEN, Guard
from gateway.safety.tls import ServerTls
from gateway.service import GenerationService
from gateway.settings import PATIENCE, HttpSettings

# Calls that wait to be accepted.
_BACKLOG = 1024


class _Server(uvicorn.Server):
    """Signals are gateway/cli/serve.py's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
    draining = Draining()
    config = ConnectionConfig(
        HoldingApp(
            make_app(service, settings.max_body_bytes, *shown, guard, draining), service.intake
        ),
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
    try:
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    except BaseException:
        draining.end()
        server.force_exit = True
        raise
    else:
        draining.begun = True
        await _last_turns(server, service, draining, settings.drain_s)
    finally:
        feed.close()
        await _end(server, task)


def _context_factory(
    tls: ServerTls | None,
) -> Callable[[uvicorn.Config, Callable[[], ssl.SSLContext]], ssl.SSLContext] | None:
    return None if tls is None else lambda _config, _default: tls.context


async def _last_turns(
    server: uvicorn.Server, service: GenerationService, draining: Draining, drain_s: float
) -> None:
    """Turns that run go on to their end, as far as there is time. Who asks meanwhile is told that there are no more."""
    clock = asyncio.get_running_loop().time
    until = clock() + drain_s
    try:
        async with asyncio.timeout(drain_s):
            await service.idle()
        # What is decided may still be on its way.
        server.config.timeout_graceful_shutdown = max(1, round(until - clock()))
    except (TimeoutError, asyncio.CancelledError) as late:
        # Those that run are told so, and are given a moment for it.
        draining.end()
        server.config.timeout_graceful_shutdown = 1
        if not isinstance(late, TimeoutError):
            raise


async def _end(server: uvicorn.Server, task: asyncio.Task[None]) -> None:
    """Requests end, unless somebody wants to be gone."""
    server.should_exit = True
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        server.force_exit = True
        await task
        raise


def _listen(settings: HttpSettings) -> socket.socket:
    """Before the server runs: who is told the address may connect at once."""
    listening = bound(settings.host, settings.port, "--http-port")
    try:
        listening.listen(_BACKLOG)
    except OSError as error:  # somebody else bound it, too, and was faster
        listening.close()
        raise CannotListen(f"cannot listen on port {settings.port}: {error}") from error
    return listening
