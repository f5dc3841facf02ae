"""Who holds which stage of a ring.

Decides what takes a lost stage's place: a spare loaded for it, another spare, or a new actor where the lost one was. A
replacement goes on when whoever waits for it is cancelled; the next one who asks finds what it made.
"""

from __future__ import annotations

import asyncio
import logging

from coordinator.errors import RingLost, SetupError
from coordinator.ring import ProgressSink, RingInfo
from stage.actor import About
from stage.build import StageReport, check_belongs, ring_info
from stage.config import RingConfig
from stage.ray_ring.crew import Crew
from stage.ray_ring.detached import FoundRing
from stage.ray_ring.member import NOWHERE, Member, together
from stage.ray_ring.spares import Spares

log = logging.getLogger(__name__)

# Beside what the actor itself waits, for the call to come back.
_CALL_S = 1.0
_UNSEEN = "it ended while no gateway drove the ring, or does not answer this one"
# A machine that was too busy for a probe gets part of a probe's time once more, before a stage is loaded anew.
_AGAIN = 2


class _Seat:
    def __init__(self, index: int, bundle: int) -> None:
        self.index = index
        self.bundle = bundle
        self.member: Member | None = None  # who has all that it needs
        self.first: StageReport | None = None  # of the first one: what the ring was told
        self.filling: asyncio.Task[None] | None = None
        self.leaving: asyncio.Task[None] | None = None  # whoever had it before

    def failure(self) -> BaseException | None:
        """Takes the outcome of a filling that is over."""
        filling, self.filling = self.filling, None
        return None if filling is None else filling.exception()


class Seats:
    def __init__(self, config: RingConfig, crew: Crew, progress: ProgressSink) -> None:
        self._config = config
        self._crew = crew
        self._progress = progress
        self._seats: list[_Seat] = []
        self._info: RingInfo | None = None
        self.replaced = 0  # stages, so far
        self.spares = Spares(config, crew, self._on_node)

    @property
    def members(self) -> tuple[Member, ...]:
        """In the order of the stages; only whoever is there."""
        return tuple(seat.member for seat in self._seats if seat.member is not None)

    # Start

    async def start(self) -> RingInfo:
        """Raises SetupError; RingLost when an actor dies."""
        bundles, spare = await self._crew.place()
        self._seats = [_Seat(index, bundle) for index, bundle in enumerate(bundles)]
        hired = await together([self._crew.hire(s.bundle, s.index) for s in self._seats])
        nodes = [member.place.node for member in hired]
        here = [nodes.count(node) for node in nodes]
        loads = [
            self._crew.load(member, index, count, self._progress)
            for index, (member, count) in enumerate(zip(hired, here, strict=True))
        ]
        # All have ended before the first one's error leaves.
        for failure in await asyncio.gather(*loads, return_exceptions=True):
            if failure is not None:
                raise failure
        reports = await together(
            [
                self._crew.take(member, None, count)
                for member, count in zip(hired, here, strict=True)
            ]
        )
        self._info = ring_info(self._config, reports)
        for seat, member, report in zip(self._seats, hired, reports, strict=True):
            seat.first = report
            self._sit(seat, member)
        self.spares.fill(spare)
        return self._info

    async def adopt(self, found: FoundRing) -> None:
        """Whoever holds a stage sits down; seats that are empty then are filled with the next turn. Loaded
        ones beyond the spares were on their way to such a seat when their gateway died, and give its place back.
        """
        config = self._config
        self._seats = [_Seat(index, 0) for index in range(config.stages)]
        adopted = await self._crew.adopt(found)
        # Of two that hold one stage the later one is the ring's.
        for member, about in sorted(adopted, key=_latest):
            seat = None if about.report is None else self._seats[about.loaded or 0]
            member.loaded = about.loaded
            if seat is not None and seat.member is None:
                member.index, seat.bundle, seat.first = seat.index, member.bundle, about.report
                self._sit(seat, member)
            elif seat is None and about.loaded is not None and len(self.spares) < config.spares:
                member.index = about.loaded
                self.spares.adopt(member)
            else:
                await self._crew.dismiss(member)
        free = self._crew.free_bundles()
        for seat in self._seats:
            if seat.member is None:
                seat.bundle = free.pop(0)
                log.warning("lost stage=%d %s reason=%s", seat.index, NOWHERE, _UNSEEN)
        self.spares.fill(free)

    # Healing

    async def rest(self, turn: int) -> None:
        """Whoever does not rest in time, or is broken, is lost."""
        await asyncio.gather(*(self._rest(seat, turn) for seat in self._seats))

    async def _rest(self, seat: _Seat, turn: int) -> None:
        member = seat.member
        if member is None:
            return
        within_s = self._config.rest_s
        await member.hear(self._config.probe_timeout_s / _AGAIN)
        try:
            rested = await member.ask("rest", turn, within_s, within_s=within_s + _CALL_S)
            if rested.reason is not None:
                member.lose(rested.reason)
        except RingLost:
            pass  # it says so itself

    def vacate(self) -> None:
        """Whoever is lost has lost his seat, and is ended."""
        for seat in self._seats:
            member = seat.member
            if member is not None and member.loss is not None:
                seat.member = None
                seat.leaving = asyncio.create_task(self._crew.dismiss(member))

    async def fill(self) -> None:
        """Waits until every stage has somebody again. Raises RingLost."""
        for seat in self._seats:
            if seat.filling is not None and seat.filling.done():
                seat.failure()  # of an opening that nobody waited for
            if seat.member is None and seat.filling is None:
                seat.filling = asyncio.create_task(self._fill(seat))
        filling = [seat for seat in self._seats if seat.filling is not None]
        if filling:
            await asyncio.wait([seat.filling for seat in filling if seat.filling is not None])
        failures = [(seat, seat.failure()) for seat in filling]
        for seat, error in failures:
            if error is not None:
                raise RingLost(seat.index, f"could not be replaced: {error}") from error

    async def _fill(self, seat: _Seat) -> None:
        """Raises SetupError or RingLost."""
        if seat.leaving is not None:
            # Its disk, and the memory of its GPU, are not free before.
            await seat.leaving
        while (spare := self.spares.take(seat.index)) is not None:
            try:
                await self._replace(seat, spare)
            except RingLost:
                self.spares.fill([spare.bundle])
                continue
            except SetupError:
                self.spares.fill([spare.bundle])
                raise
            left, seat.bundle = seat.bundle, spare.bundle
            self.spares.fill([left])
            return
        await self._replace(seat, await self._crew.hire(seat.bundle, seat.index))

    async def _replace(self, seat: _Seat, member: Member) -> None:
        """Raises SetupError or RingLost; then the member has been ended."""
        here = self._on_node(member.place.node) + 1
        try:
            if member.loaded != seat.index:
                await self._crew.load(member, seat.index, here, self._progress)
            had = None if seat.first is None else seat.first.host_bytes
            report = await self._crew.take(member, had, here)
            if seat.first is None:
                seat.first = report  # the one before it died unseen; info() compares it
            else:
                check_belongs(self.info(), seat.first, report)
        except BaseException:
            await self._crew.dismiss(member)
            raise
        log.warning("replaced stage=%d %s", seat.index, member.where)
        self.replaced += 1
        self._sit(seat, member)

    def _sit(self, seat: _Seat, member: Member) -> None:
        seat.member = member
        log.info("stage=%d %s", seat.index, member.where)
        member.watch(self._config.probe_s, self._config.probe_timeout_s)

    def info(self) -> RingInfo:
        """Of those who have sat here. Raises SetupError."""
        if self._info is not None:
            return self._info
        reports = [seat.first for seat in self._seats if seat.first is not None]
        info = ring_info(self._config, reports)
        if len(reports) == len(self._seats):
            self._info = info
        return info

    def _on_node(self, node: str) -> int:
        return sum(member.place.node == node for member in self.members)

    # End

    async def stop(self) -> None:
        """Nobody is replaced any more; those who are there write what is to outlive them."""
        tasks = [seat.filling for seat in self._seats if seat.filling is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, self.spares.stop(), return_exceptions=True)


def _latest(adopted: tuple[Member, About]) -> int:
    return -adopted[1].turn
