"""Detached rings of a Ray cluster, as this process finds them when it starts or is asked about them.

Decides how a served model's detached rings are called, and that what a standing ring already is, is not planned anew:
its layers lie where they lie, in memory that is taken. What becomes of a ring is for stage/ray_ring to say.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.models import find_model
from gateway.progress import ProgressBoard
from gateway.settings import ServeSettings, check_ray_address

if TYPE_CHECKING:
    from stage.ray_ring.census import RingSight
    from stage.ray_ring.cluster import RayCluster


@dataclass(frozen=True, slots=True)
class Standing:
    """What is there of a model's rings already."""

    splits: tuple[tuple[int, int], ...]
    max_rows: int


def ring_prefix(served_name: str) -> str:
    """A cluster holds rings of several models. Slashes are what actors' names are put together with."""
    return served_name.replace("/", "-")


def ring_name(prefix: str, number: int) -> str:
    return f"{prefix}-{number}"


@asynccontextmanager
async def connected(ray_address: str) -> AsyncIterator[RayCluster]:
    """A cluster, for as long as the block lasts. Raises SetupError."""
    check_ray_address(ray_address)
    cluster = await asyncio.to_thread(_cluster, ray_address)
    await cluster.acquire()
    try:
        yield cluster
    finally:
        await cluster.release()


def _cluster(ray_address: str) -> RayCluster:
    """In a thread: what it imports takes seconds, and longer on a busy machine."""
    from gateway.ray_address import check_ray

    check_ray(ray_address)
    from stage.ray_ring.cluster import RayCluster

    return RayCluster(ray_address)


async def sights() -> tuple[RingSight, ...]:
    """All detached rings of the cluster that is connected."""
    from stage.ray_ring.census import rings

    return await rings()


async def sight(ring: str) -> RingSight:
    """Of the cluster that is connected. Raises SetupError."""
    from stage.ray_ring.census import find_ring

    return await find_ring(ring)


async def end(ring: str, *, force: bool) -> RingSight:
    """Raises SetupError: there is none of that name, or a gateway drives it."""
    from stage.ray_ring.census import end_ring

    return await end_ring(ring, force=force)


async def standing(
    settings: ServeSettings, board: ProgressBoard, stack: AsyncExitStack
) -> Standing | None:
    """What there is of the detached rings that are to be served; None: this process makes the first of them. The
    cluster stays connected until the stack ends. Raises SetupError.
    """
    if not settings.detached or settings.ray_address is None:
        return None
    folder = await asyncio.to_thread(find_model, settings.model, board.note)
    await stack.enter_async_context(connected(settings.ray_address))
    prefix = ring_prefix(settings.served_name or folder.name)
    wanted = {ring_name(prefix, number) for number in range(settings.rings)}
    for sight in await sights():
        if sight.name in wanted and len(sight.splits) == settings.stages:
            return Standing(sight.splits, settings.max_rows or sight.max_rows)
    return None


@dataclass(slots=True)
class Front:
    """Where this process serves, once it does: what its rings tell others of it."""

    grpc: str = ""
    http: str = ""

    def open(self, addresses: Sequence[str], *, encrypted: bool) -> None:
        grpc, self.http = map(_from_outside, addresses)
        self.grpc = f"grpcs://{grpc}" if encrypted else grpc


def _from_outside(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]") else address
