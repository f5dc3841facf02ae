"""Every setting that a serving process waits by, in one record, for the line that is printed at its start.

Decides none of them: they are the settings', the ring's and the fronts' own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from gateway.http.streaming import KEEP_ALIVE_S
from gateway.settings import PATIENCE, RingKind, ServeSettings

if TYPE_CHECKING:
    from stage.config import RingConfig


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds, but for heal_attempts. Named as their flags, or as the settings that have none. None: it waits for no
    such thing.
    """

    # A ring's frames, and its healing
    reply_timeout_s: float
    heal_timeout_s: float
    heal_attempts: int
    heal_backoff_s: float
    # Its stages' processes
    probe_s: float | None
    probe_timeout_s: float | None
    fence_s: float | None
    lease_s: float | None
    place_s: float | None
    start_s: float | None
    load_timeout_s: float | None
    rest_s: float | None
    call_s: float | None
    mirror_s: float | None
    # The fronts' clients
    unread_s: float
    request_s: float
    http_unread_s: float
    keep_alive_s: float
    grpc_keepalive_s: float
    grpc_keepalive_timeout_s: float
    # The end
    drain_s: float


def deadlines_of(settings: ServeSettings, config: RingConfig | None) -> Deadlines:
    """`config`: what each ring is made of; None: it has no stages to speak of."""
    scheduler = settings.scheduler
    ring = config if settings.ring is RingKind.RAY else None
    return Deadlines(
        reply_timeout_s=scheduler.reply_timeout_s,
        heal_timeout_s=scheduler.heal_timeout_s,
        heal_attempts=scheduler.heal_attempts,
        heal_backoff_s=scheduler.heal_backoff_s,
        probe_s=None if ring is None else ring.probe_s,
        probe_timeout_s=None if ring is None else ring.probe_timeout_s,
        fence_s=None if ring is None else ring.fence_s,
        lease_s=None if ring is None or not ring.detached else ring.lease_s,
        place_s=None if ring is None else ring.place_s,
        start_s=None if ring is None else ring.start_s,
        load_timeout_s=None if ring is None else ring.load_s,
        rest_s=None if config is None else config.rest_s,
        call_s=None if ring is None else ring.call_s,
        mirror_s=None if ring is None or not ring.mirror else ring.mirror_s,
        unread_s=scheduler.unread_s,
        request_s=settings.http.request_s,
        http_unread_s=settings.http.unread_s * PATIENCE,
        keep_alive_s=KEEP_ALIVE_S,
        grpc_keepalive_s=settings.grpc.keepalive_s,
        grpc_keepalive_timeout_s=settings.grpc.keepalive_timeout_s,
        drain_s=settings.grpc.drain_s,
    )


def deadlines_line(deadlines: Deadlines) -> str:
    named = ((each.name, getattr(deadlines, each.name)) for each in fields(deadlines))
    told = (f"{name} {value:g}" for name, value in named if value is not None)
    return f"deadlines: {', '.join(told)}"
