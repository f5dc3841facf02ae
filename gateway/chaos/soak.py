"""What the processes and the rings take while a storm goes on, every ten seconds, and whether any of it grows.

Decides what is looked at, and under which role: a stage's replacement goes on with its series. A role that several
processes had is judged by the one that lived longest; where none lived for long, each counts once, since a new one
begins small again. The rule is flat.py's.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from coordinator.errors import SetupError
from coordinator.router import Router
from gateway.chaos.flat import Allowance, Growth, growth
from gateway.chaos.moments import SeenRing
from gateway.chaos.processes import Weight, weight
from gateway.chaos.victims import OfProcesses

_EVERY_S = 10.0
# Descriptors and threads that come and go with connections, and with whoever is looked at in the midst of a change.
_PIECES = Allowance(few=4.0)
# Allocators hold back some MiB, now more, now less; half a MiB a minute is 700 MiB a day.
_MEMORY = Allowance(few=8.0, a_minute=0.5)
# A stage's large buffers come and go with every frame, and glibc keeps up to 64 MiB of what is free at the heap's end:
# its trim threshold is twice that for blocks mapped alone, which grows with them to 32 MiB (mallopt(3)).
_STAGE_MEMORY = Allowance(few=64.0, a_minute=0.5)
_MIB = 2**20
# Looks, five minutes: a process that lived through them says more than how large its likes were.
_LONG_LIFE = 30
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


def check_place(file: Path) -> None:
    """Before hours are spent on what is to be written there. Raises SetupError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"{file} cannot be written: {error}") from error
    if not os.access(file.parent, os.W_OK):
        raise SetupError(f"{file} cannot be written")


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
            (ended,) = await asyncio.gather(looking, return_exceptions=True)
        # What was not looked at would be taken for flat.
        if isinstance(ended, Exception):
            raise ended

    def growths(self) -> list[Growth]:
        """Without what there are too few values of."""
        roles = defaultdict[str, list[Looked]](list)
        for each in self.processes:
            roles[each.role].append(each)
        found = [each for role, looks in roles.items() for each in _growths(role, looks)]
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


def _growths(role: str, looks: Sequence[Looked]) -> Iterator[Growth | None]:
    memory = _MEMORY if role == GATEWAY else _STAGE_MEMORY
    kinds = (
        ("MiB of memory", memory, [(each, each.weight.uss_bytes / _MIB) for each in looks]),
        ("descriptors", _PIECES, [(each, float(each.weight.descriptors)) for each in looks]),
        ("threads", _PIECES, [(each, float(each.weight.threads)) for each in looks]),
    )
    for what, allowance, values in kinds:
        yield growth(role, what, *_points(values), allowance)


def _points(values: Sequence[tuple[Looked, float]]) -> tuple[list[float], list[float]]:
    """Times and values: each look of the process that had the role for longest, or the middle of each."""
    lives = defaultdict[int, list[tuple[float, float]]](list)
    for each, value in values:
        lives[each.pid].append((each.at_s, value))
    longest = max(lives.values(), key=len)
    is_judged = len(lives) == 1 or len(longest) >= _LONG_LIFE
    points = longest if is_judged else [_middle(life) for life in lives.values()]
    return [at_s for at_s, _ in points], [value for _, value in points]


def _middle(life: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.fmean(at_s for at_s, _ in life), statistics.median(value for _, value in life)
