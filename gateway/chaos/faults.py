"""Carries out one planned fault on one ring, and says what followed: when it was noticed, healed and answered again.

Decides when to strike by what the ring is seen to do. It waits for nothing without a deadline, and what passes by
itself (a full disk, a slow link, a stopped process) is undone whoever ends it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile

from gateway.chaos.moments import Opening, SeenRing, Sighting
from gateway.chaos.processes import has_ended
from gateway.chaos.storm import Act, Fault, Moment, Planned
from gateway.chaos.victims import Victims
from gateway.chaos.waiting import until

# Traffic comes to each moment within seconds, as long as streams talk.
_SIGHT_S = 20.0
_TRIES = 8
# For the process of a replacement, or of the next spare, to be there.
_LOADER_S = 15.0
_PULSES = 6
_PULSE_S = (0.15, 0.4)
_PAUSE_S = (0.05, 0.3)


@dataclass(frozen=True, slots=True)
class Struck:
    """What a fault did. Times are seconds from the strike, or perf_counter's for `at_s`; None: it did not happen."""

    planned: Planned
    at_s: float
    hit: bool  # what the moment was seen by was still under way
    kills: int = 0
    attempts: int = 0  # to open an epoch
    detected_s: float | None = None
    load_s: float | None = None  # of what was loaded anew, from its first word to its last
    opened_s: float | None = None
    answered_s: float | None = None
    problem: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Patience:
    """Deadlines in seconds."""

    heal_s: float = 120.0  # from a fault to the first answer behind it
    rest_s: float = 60.0  # for a ring to come to rest; a spare may have to load first
    calm_s: float = 1.0  # between a ring's healing and the next fault
    wake_s: float = 45.0  # for a stopped process that is woken to end: its watchdog takes 30


class Striker:
    """One ring's. `strike` returns when the ring answers again."""

    def __init__(
        self,
        ring: SeenRing,
        victims: Victims,
        mark: Callable[[Planned, float], None],
        patience: Patience,
    ) -> None:
        """`mark` hears of each strike, at once, and when it was by perf_counter."""
        self._ring = ring
        self._victims = victims
        self._mark = mark
        self._patience = patience

    @property
    def faults(self) -> frozenset[Fault]:
        return self._victims.faults

    async def strike(self, planned: Planned) -> Struck:
        await until(lambda: self._ring.health().ready, self._patience.heal_s)
        sighting = await self._in_moment(planned)
        match planned.fault.act:
            case Act.KILL if planned.moment is Moment.LOAD:
                return await self._kill_twice(planned)
            case Act.KILL:
                return await self._kill(planned, sighting)
            case Act.STOP:
                return await self._stop(planned, sighting)
            case Act.SLOW:
                return await self._slow(planned, sighting)
            case _:
                return await self._fill_disk(planned, sighting)

    async def _in_moment(self, planned: Planned) -> Sighting | None:
        """Returns in the midst of it, where that can be had."""
        moment = Moment.DECODE if planned.moment is Moment.LOAD else planned.moment
        sighting = None
        for _ in range(_TRIES):
            sighting = await self._ring.sight(moment, _SIGHT_S)
            if sighting is None:
                return None
            await asyncio.sleep(planned.depth * self._ring.usual_s(moment))
            if self._ring.lasts(sighting):
                return sighting
        return sighting

    async def _kill(self, planned: Planned, sighting: Sighting | None) -> Struck:
        openings, hit = len(self._ring.openings), self._lasts(sighting)
        at_s = self._now(planned)
        self._victims.kill(planned.stage)
        return await self._healed(planned, at_s, openings, hit=hit, kills=1)

    async def _kill_twice(self, planned: Planned) -> Struck:
        """Once to have a replacement load, and then that one."""
        openings, kills = len(self._ring.openings), 1
        loads = asyncio.create_task(self._ring.sight(Moment.LOAD, self._patience.heal_s))
        await asyncio.sleep(0)
        at_s = self._now(planned)
        self._victims.kill(planned.stage)
        await until(lambda: loads.done() or self._answers(openings), self._patience.heal_s)
        loads.cancel()
        note = (
            "" if not self._answers(openings) else "a spare took the place, and the next one loaded"
        )
        if await until(lambda: self._victims.kill_loading() is not None, _LOADER_S):
            kills = 2
        return await self._healed(planned, at_s, openings, hit=kills == 2, kills=kills, note=note)

    async def _stop(self, planned: Planned, sighting: Sighting | None) -> Struck:
        openings, hit = len(self._ring.openings), self._lasts(sighting)
        at_s = self._now(planned)
        pid = self._victims.stop(planned.stage)
        try:
            struck = await self._healed(planned, at_s, openings, hit=hit)
            await asyncio.sleep(planned.lasts_s)
            was_gone = has_ended(pid)
        finally:
            if not has_ended(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        ended = was_gone or await until(lambda: has_ended(pid), self._patience.wake_s)
        if not ended:
            return replace(struck, problem=f"process {pid} was woken and lives on")
        return replace(struck, note="ended while stopped" if was_gone else "woken, it ended itself")

    async def _slow(self, planned: Planned, sighting: Sighting | None) -> Struck:
        """The stage stands still for a moment, again and again: to its neighbours, its link stalls."""
        openings, hit = len(self._ring.openings), self._lasts(sighting)
        dice, at_s = random.Random(planned.dice), self._now(planned)
        for _ in range(_PULSES):
            await self._victims.hold_up(planned.stage, dice.uniform(*_PULSE_S))
            await asyncio.sleep(dice.uniform(*_PAUSE_S))
        return await self._unharmed(planned, at_s, openings, hit=hit)

    async def _fill_disk(self, planned: Planned, sighting: Sighting | None) -> Struck:
        openings, hit = len(self._ring.openings), self._lasts(sighting)
        at_s = self._now(planned)
        with self._victims.full_disk(planned.stage):
            await asyncio.sleep(planned.lasts_s)
        return await self._unharmed(planned, at_s, openings, hit=hit)

    async def _unharmed(self, planned: Planned, at_s: float, openings: int, *, hit: bool) -> Struck:
        """What passes by itself may cost time, and no stage."""
        if len(self._ring.openings) == openings:
            return Struck(planned, at_s, hit)
        healed = await self._healed(planned, at_s, openings, hit=hit)
        return replace(healed, problem=healed.problem or "a stage was lost by it")

    def _now(self, planned: Planned) -> float:
        at_s = time.perf_counter()
        self._mark(planned, at_s)
        return at_s

    def _lasts(self, sighting: Sighting | None) -> bool:
        return sighting is not None and self._ring.lasts(sighting)

    async def _healed(
        self,
        planned: Planned,
        at_s: float,
        openings: int,
        *,
        hit: bool,
        kills: int = 0,
        note: str = "",
    ) -> Struck:
        """Waits for the first reply of an epoch that was opened behind the strike."""
        struck = Struck(planned, at_s, hit, kills, note=note)
        if not await until(lambda: self._answers(openings), self._patience.heal_s):
            tried = self._ring.openings[openings:]
            told = tried[-1].failed if tried else "no epoch was opened"
            problem = f"did not answer within {self._patience.heal_s:g} s: {told}"
            return replace(struck, problem=problem, attempts=len(tried))
        return _timed(struck, self._ring.openings[openings:])

    def _answers(self, openings: int) -> bool:
        """Whether an epoch that was opened behind so many others has had a reply."""
        return any(each.answered_s is not None for each in self._ring.openings[openings:])


def _timed(struck: Struck, openings: list[Opening]) -> Struck:
    """By the first epoch that had a reply."""
    tried = [*takewhile(lambda each: each.answered_s is None, openings)]
    last = openings[len(tried)]
    loads = max((each.load_s for each in (*tried, last)), default=0.0)
    assert last.opened_s is not None
    assert last.answered_s is not None
    return replace(
        struck,
        attempts=len(tried) + 1,
        detected_s=openings[0].began_s - struck.at_s,
        load_s=loads or None,
        opened_s=last.opened_s - struck.at_s,
        answered_s=last.answered_s - struck.at_s,
    )
