"""The gRPC server: where it listens, its limits, its health, and how it drains.

The service counts as SERVING while at least one ring takes jobs. It starts no ring and stops none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coordinator.errors import CannotListen
from gateway.fronts import LAST_WORDS_S
from gateway.listening import check_free
from gateway.pb.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from gateway.rings import RingSet
from gateway.rpc.health import RingHealth
from gateway.rpc.interceptors import CallGuard
from gateway.rpc.servicer import SERVICE_NAME, GenerationServicer
from gateway.safety.guard import OPEN, Guard
from gateway.safety.tls import ServerTls
from gateway.service import GenerationService
from gateway.settings import PATIENCE, GrpcSettings

_OPTIONS: tuple[tuple[str, int], ...] = (
    # Two servers on one port would share its calls without a word.
    ("grpc.so_reuseport", 0),
    # Without these a client that stops reading lets the server run megabytes ahead of it.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65536),
    # By default a client that pings during a long prefill is thrown out with "too many pings". gRPC's own clients
    # ping once a second at most; more than this is a flood.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
)


def channel_limits(max_message_bytes: int) -> tuple[tuple[str, int], ...]:
    """gRPC's own default is 4 MiB for what is received; both ends need the same."""
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    )


def _keepalive(settings: GrpcSettings) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.keepalive_time_ms", round(settings.keepalive_s * 1e3)),
        ("grpc.keepalive_timeout_ms", round(settings.keepalive_timeout_s * 1e3)),
        # What counts where a ping stays unanswered; without it a minute.
        ("grpc.http2.ping_timeout_ms", round(settings.keepalive_timeout_s * 1e3)),
    )


@asynccontextmanager
async def serve_grpc(
    service: GenerationService,
    settings: GrpcSettings,
    rings: RingSet | None = None,
    guard: Guard = OPEN,
) -> AsyncIterator[str]:
    """Listens and yields the address; on leaving, running turns get `drain_s` to end. Raises CannotListen."""
    health = RingHealth(SERVICE_NAME, lambda: any(status.ready for status in service.rings()))
    server = grpc.aio.server(
        interceptors=(CallGuard(SERVICE_NAME, guard, service.intake),),
        maximum_concurrent_rpcs=settings.max_calls,
        options=(
            *_OPTIONS,
            *_keepalive(settings),
            *channel_limits(settings.max_message_bytes),
        ),
    )
    add_servicer: Any = add_GenerationServiceServicer_to_server
    unread_s = settings.unread_s * PATIENCE
    add_servicer(GenerationServicer(service, rings, guard, unread_s), server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    if settings.reflection:
        names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
    address = _bind(server, settings, guard.tls)
    await server.start()
    left_s = 0.0
    try:
        yield address
        health.drain()
        # The port stays open: turns are refused with the reason, and everything else is answered.
        left_s = await service.drain(settings.drain_s)
    finally:
        # Whoever is to be gone now has no time for turns; another front may have been draining when that was said.
        service.end_turns()
        health.end()
        await server.stop(max(left_s, LAST_WORDS_S))


def _credentials(tls: ServerTls) -> Any:
    return grpc.ssl_server_credentials(
        [(tls.key, tls.cert)],
        root_certificates=tls.client_ca,
        require_client_auth=tls.client_ca is not None,
    )


def _bind(server: Any, settings: GrpcSettings, tls: ServerTls | None) -> str:
    host = f"[{settings.host}]" if ":" in settings.host.strip("[]") else settings.host
    host = host.replace("[[", "[").replace("]]", "]")
    # gRPC would write why it cannot into a line of its own, and raise without it.
    check_free(host, settings.port, "--grpc-port")
    try:
        if tls is None:
            port = server.add_insecure_port(f"{host}:{settings.port}")
        else:
            port = server.add_secure_port(f"{host}:{settings.port}", _credentials(tls))
    except RuntimeError as error:
        raise CannotListen(f"cannot listen on {host}:{settings.port}: {error}") from error
    return f"{host}:{port}"
