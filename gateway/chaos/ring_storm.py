"""The storm over the first of several rings of this process: one planned fault after the other.

Decides when the next one may come and when it is over. What strikes is faults.py's.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from coordinator.errors import InvalidSetting
from gateway.chaos.book import Book
from gateway.chaos.faults import Striker, Struck
from gateway.chaos.moments import SeenRing
from gateway.chaos.options import StormOptions
from gateway.chaos.storm import KILLS, Fault, Planned, storm
from gateway.chaos.victims import OfProcesses, victims_of
from gateway.chaos.waiting import until
from gateway.progress import ProgressBoard
from gateway.settings import RingKind, ServeSettings


class RingStorm:
    """Over the first ring; the others are to notice nothing."""

    def __init__(
        self,
        settings: ServeSettings,
        options: StormOptions,
        rings: tuple[SeenRing, ...],
        book: Book,
        board: ProgressBoard,
    ) -> None:
        self.rings = rings
        self.target = rings[0]
        self.struck: list[Struck] = []
        folder = None if settings.kv_disk is None else settings.kv_disk / self.target.name
        victims = victims_of(self.target.inner, folder, self._seated)
        self._options = options
        self._kind = settings.ring
        self._stages, self._spares = settings.stages, settings.spares
        self._board = board
        self._striker = Striker(
            self.target, victims, partial(book.struck, ring=self.target.name), options.patience
        )
        self._faults = self._possible()
        # Without any that kill, a number of kills would never be reached.
        self._kills = None if set(KILLS).isdisjoint(self._faults) else options.kills

    async def blow(self) -> None:
        faults, begin_s = self._faults, time.perf_counter()
        spell = self._options.spell(self._stages)
        for planned in storm(self._options.seed, faults, self._stages, spell):
            # However late it is: what one fault did should not be taken for another's.
            due_s = begin_s + planned.number * self._options.every_s
            calm_s = self._options.patience.calm_s
            await asyncio.sleep(max(calm_s, due_s - time.perf_counter()))
            await until(self._has_spares, self._options.patience.rest_s)
            if self._is_over(planned, len(faults), time.perf_counter() - begin_s):
                return
            self._board.note(f"{time.perf_counter() - begin_s:6.1f} s  {planned}")
            struck = await self._striker.strike(planned)
            self.struck.append(struck)
            self._board.note(f"{time.perf_counter() - begin_s:6.1f} s  {told(struck)}")
            if struck.problem and struck.answered_s is None:
                return  # nothing more is to be learnt from this ring

    def _possible(self) -> list[Fault]:
        """Raises SetupError when nothing of what was chosen can be done to this kind of ring."""
        can, chosen = self._striker.faults, self._options.faults
        faults = [fault for fault in chosen if fault in can]
        elsewhere = {Fault.GATEWAY} if self._kind is RingKind.RAY else set()
        left_out = [str(fault) for fault in chosen if fault not in can | elsewhere]
        if left_out:
            self._board.note(f"not on this kind of ring: {', '.join(left_out)}")
        if not faults:
            raise InvalidSetting("faults", "none of them can be done to this kind of ring")
        return faults

    def _is_over(self, planned: Planned, faults: int, passed_s: float) -> bool:
        kills, minutes = self._kills, self._options.minutes
        if kills is None and minutes is None:
            return planned.number >= faults
        has_killed = kills is not None and sum(each.kills for each in self.struck) >= kills
        return has_killed or (minutes is not None and passed_s >= 60 * minutes)

    def _has_spares(self) -> bool:
        """Else what is told of a ring with spares would be told of one without."""
        ring = self.target.inner
        return not isinstance(ring, OfProcesses) or len(ring.spares) >= self._spares

    def _seated(self) -> set[int]:
        """All rings' processes that do not load."""
        rings = [ring.inner for ring in self.rings if isinstance(ring.inner, OfProcesses)]
        return {pid for ring in rings for pid in (*ring.pids, *ring.spares)}


def told(struck: Struck) -> str:
    if struck.problem:
        return f"PROBLEM: {struck.problem}"
    if struck.answered_s is None:
        return f"it goes on without a loss {struck.note}".rstrip()
    return f"answers again {struck.answered_s:.2f} s after it, attempt {struck.attempts} {struck.note}".rstrip()
