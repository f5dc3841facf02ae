"""What the processes and the rings take while a storm goes on, every ten seconds, and whether any of it grows.

Decides what is looked at, and under which role: a stage's replacement goes on with its series. The rule is flat.py's.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from coordinator.errors import SetupError
from coordinator.router import Router
from gateway.chaos.flat import Growth, growth
from gateway.chaos.moments import SeenRing
from gateway.chaos.processes import Weight, weight
from gateway.chaos.victims import OfProcesses

_EVERY_S = 10.0
# Descriptors and threads that come and go with connections, and with whoever is looked at in the midst of a change.
_FEW_PIECES = 4.0
_MOST_LANES = 1 << 16
GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class Looked:
    """One process, by its role."""

    at_s: float  # since the first look
    role: str
    pid: int
    weight: Weight


@dataclass(frozen=True, slots=True)
class Held:
    """What one ring's coordinator has in its books."""

    at_s: float
    ring: str
    lane_rows: int
    stored_rows: int
    sessions: int


class Soak:
    def __init__(self, router: Router, rings: Sequence[SeenRing]) -> None:
        self.begin_s = time.perf_counter()
        self.processes: list[Looked] = []
        self.rings: list[Held] = []
        self._router = router
        self._seen = rings

    async def look(self) -> None:
        """While a ring heals nothing is looked at: then some of what it has is not there, and some is there twice."""
        if not all(ring.health().ready for ring in self._seen):
            return
        at_s = time.perf_counter() - self.begin_s
        for role, pid in self._roles():
            # It takes the kernel some ten milliseconds to add a large process up.
            found = await asyncio.to_thread(weight, pid)
            if found is not None:
                self.processes.append(Looked(at_s, role, pid, found))
        for status in self._router.rings():
            lanes = self._router.lanes(status.name, _MOST_LANES)
            rows = sum(lane.valid_rows for lane in lanes)
            held = Held(at_s, status.name, rows, status.stored_rows, status.sessions)
            self.rings.append(held)

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        looking = asyncio.create_task(self._look())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    def growths(self) -> list[Growth]:
        found = [
            growth(f"{role}: {what}", times, values, few)
            for (role, what, few), (times, values) in self._series().items()
        ]
        return [each for each in found if each is not None]

    def write(self, path: Path) -> None:
        """Raises SetupError."""
        growths = [asdict(each) | {"is_flat": each.is_flat} for each in self.growths()]
        told = {
            "growths": growths,
            "processes": [asdict(each) for each in self.processes],
            "rings": [asdict(each) for each in self.rings],
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(told), encoding="utf-8")
        except OSError as error:
            raise SetupError(f"{path} cannot be written: {error}") from error

    async def _look(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_EVERY_S)

    def _roles(self) -> Iterator[tuple[str, int]]:
        yield GATEWAY, os.getpid()
        for ring in self._seen:
            if isinstance(ring.inner, OfProcesses):
                for stage, pid in enumerate(ring.inner.pids):
                    yield f"{ring.name} stage {stage}", pid

    def _series(self) -> dict[tuple[str, str, float], tuple[list[float], list[float]]]:
        series = defaultdict[tuple[str, str, float], tuple[list[float], list[float]]](
            lambda: ([], [])
        )
        for each in self.processes:
            pieces = ("descriptors", each.weight.descriptors), ("threads", each.weight.threads)
            for what, value in (("memory", each.weight.uss_bytes), *pieces):
                few = 0.0 if what == "memory" else _FEW_PIECES
                times, values = series[each.role, what, few]
                times.append(each.at_s)
                values.append(value)
        return series
