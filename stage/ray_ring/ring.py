"""The ring port over Ray actors.

Decides what a turn of the ring is, and that there is one way to begin one: rest whoever is there, replace who is lost,
wire all anew, cut all to what all hold. What takes a lost stage's place seats.py decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from coordinator.errors import RingLost, SetupError
from coordinator.frames import Epoch, Frame, Reply
from coordinator.held import Holding, held_by_all
from coordinator.ring import ProgressSink, RingHealth, RingInfo
from stage.actor import Place
from stage.config import RingConfig
from stage.lease import Owner, Served
from stage.messages import FrameMessage
from stage.ray_ring.cluster import RayCluster
from stage.ray_ring.crew import Crew
from stage.ray_ring.detached import FoundRing, Keeper, find, give_back, owner_here, taken_by
from stage.ray_ring.member import Member, in_a_line, together
from stage.ray_ring.seats import Seats
from stage.ray_ring.wiring import Wiring
from stage.replies import ReplyQueue
from stage.runner import LoopEnd
from stage.transport import Endpoint, Sender

# For what is on its way to the disk when a ring is stopped.
_WRITE_S = 5.0


class RayRing:
    """Implements coordinator.ring.Ring. Belongs to the event loop that it was started on."""

    def __init__(
        self,
        config: RingConfig,
        cluster: RayCluster | None = None,
        served: Callable[[], Served] = Served,
    ) -> None:
        """`served`: where a detached ring's gateway is found; asked when it starts."""
        self._config = config
        self._cluster = cluster or RayCluster()
        self._served = served
        self._info: RingInfo | None = None
        self._started: _Started | None = None

    async def start(self, progress: ProgressSink) -> RingInfo:
        """A second start ends what the first one made. A detached ring that is there already is gone on with."""
        await self.stop()
        await self._cluster.acquire()
        try:
            started = await self._begin(progress)
        except BaseException:
            await self._cluster.release()
            raise
        try:
            self._info = await started.start()
        except BaseException as error:
            await self._end(started)
            if isinstance(error, RayError | RingLost):
                raise SetupError(f"a stage could not be started: {error}") from error
            raise
        self._started = started
        return self._info

    async def _begin(self, progress: ProgressSink) -> _Started:
        if not self._config.detached:
            return _Started(self._config, progress)
        owner = owner_here(self._served())
        found = await find(self._config, owner)
        config = self._config if found is None else found.config
        return _Started(config, progress, owner, found)

    def capacity(self) -> RingInfo:
        if self._info is None:
            raise RingLost(None, "not started")
        return self._info

    async def open_epoch(self, epoch: Epoch) -> Holding:
        if self._started is None:
            raise RingLost(None, "not started")
        return await self._started.open(epoch)

    def submit(self, frame: Frame) -> None:
        running = self._running()
        running.sender.send(FrameMessage(running.replies.epoch, frame))

    async def next_reply(self) -> Reply:
        return await self._running().replies.next()

    def health(self) -> RingHealth:
        if self._started is None:
            return RingHealth(False, "not started")
        loss, seats = self._started.replies.loss, self._started.seats
        return RingHealth(loss is None, loss or "", len(seats.spares), seats.replaced)

    async def stop(self) -> None:
        """A detached ring stays, for whoever starts it next."""
        started, self._started = self._started, None
        if started is not None:
            await self._end(started)

    def dissolve(self) -> None:
        """The next stop ends a detached ring as well."""
        if self._started is not None:
            self._started.stays = False

    async def _end(self, started: _Started) -> None:
        ending = asyncio.create_task(started.leave() if started.stays else started.end())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            # Whoever is cancelled here still leaves nothing behind; every wait in it has a deadline.
            await asyncio.wait([ending])
            raise
        finally:
            await self._cluster.release()

    @property
    def pids(self) -> tuple[int, ...]:
        """The actors' processes, in the order of the stages."""
        return () if self._started is None else tuple(each.pid for each in self._started.places)

    @property
    def spares(self) -> tuple[int, ...]:
        """The processes of spares that are ready."""
        return () if self._started is None else self._started.seats.spares.pids

    def _running(self) -> _Started:
        if self._started is None:
            raise RingLost(None, "not started")
        self._started.replies.check()
        return self._started


class _Started:
    """What a start has made so far: whatever happens next, `end` undoes it."""

    def __init__(
        self,
        config: RingConfig,
        progress: ProgressSink,
        owner: Owner | None = None,
        found: FoundRing | None = None,
    ) -> None:
        """`owner`: of a detached ring; `found`: what there is of it."""
        self._config = config
        self._owner = owner
        self._found = found
        self._keeper: Keeper | None = None
        self._ceding: asyncio.Task[None] | None = None  # once another gateway drives it
        self.stays = found is not None  # it is left, not ended
        self.replies = ReplyQueue(on_lost=_nothing)
        self._crew = Crew(config, self._news, owner)
        self.seats = Seats(config, self._crew, progress)
        self._wiring: Wiring | None = None
        self._turn = 0
        self._opening: asyncio.Task[Holding] | None = None
        self._watchers: set[asyncio.Task[None]] = set()

    @property
    def places(self) -> list[Place]:
        return [member.place for member in self.seats.members]

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return () if self._wiring is None else self._wiring.endpoints

    @property
    def sender(self) -> Sender:
        if self._wiring is None:
            raise RingLost(None, "an epoch is being opened")
        return self._wiring.sender

    async def start(self) -> RingInfo:
        if self._owner is not None:
            self._keeper = Keeper(
                self._owner, lambda: self._crew.members, self._config.probe_s, self._lose_all
            )
        epoch = Epoch(0)
        if self._found is None:
            await self.seats.start()
        else:
            self._turn, epoch = self._found.turn, Epoch(self._found.epoch + 1)
            await self.seats.adopt(self._found)
        held = await self.open(epoch)
        self.stays = self._config.detached
        return replace(self.seats.info(), held=held, epoch=epoch)

    async def open(self, epoch: Epoch) -> Holding:
        """In a task of its own: `end` ends it wherever it is, whoever waits for it."""
        await self._end_opening()
        opening = self._opening = asyncio.create_task(self._open(epoch))
        try:
            await asyncio.wait([opening])
        finally:
            # Cancelled with us, it leaves what the next opening takes over.
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        if opening.cancelled():
            raise RingLost(None, "stopped")
        return opening.result()

    async def _open(self, epoch: Epoch) -> Holding:
        try:
            return await self._turned(epoch)
        except RingLost as lost:
            if self._crew.taken:
                # While a stage was waited for, which looked lost.
                self.replies.end(self._crew.taken_away())
                raise self._crew.taken_away() from lost
            self.replies.end(lost)
            raise
        except RayError as error:
            # Of Ray itself, not of a stage.
            reason = in_a_line(error)
            self.replies.fail(None, reason)
            raise RingLost(None, reason) from error
        except BaseException:
            self.replies.fail(None, f"epoch {epoch} was not opened")
            raise

    async def _turned(self, epoch: Epoch) -> Holding:
        await self._confirm()
        self._turn += 1
        await self.seats.rest(self._turn)
        # Once more: stages that another gateway has taken meanwhile look like lost ones.
        await self._confirm()
        self.seats.vacate()
        await self._unwire()
        await self.seats.fill()
        members, within_s = self.seats.members, self._config.call_s
        wiring = self._wiring = Wiring(self._turn, epoch, self.replies)
        state_rows = self.seats.info().state_rows
        mirror_s = self._config.mirror_s if self._config.mirror else None
        held = held_by_all(await wiring.connect(members, state_rows, within_s, mirror_s))
        opens = [m.ask("open_epoch", self._turn, epoch, held, within_s=within_s) for m in members]
        await together(opens)
        self.replies.open_epoch(epoch)
        for member in members:
            watcher = asyncio.create_task(
                self._watch(member, member.call("run", self._turn), epoch)
            )
            self._watchers.add(watcher)
            watcher.add_done_callback(self._watchers.discard)
            if member.loss is not None:
                self.replies.fail(member.index, member.loss)
        self.replies.check()
        return held

    async def _confirm(self) -> None:
        """Nobody is told to rest, and nobody replaced, in a ring that is another gateway's. Raises RingLost."""
        if await self._is_taken(self.seats.members):
            raise self._crew.taken_away()

    async def _is_taken(self, members: Sequence[Member]) -> bool:
        if self._owner is not None and not self._crew.taken:
            living = [member for member in members if member.loss is None]
            held = await taken_by(living, self._owner, self._config.call_s)
            if held is not None:
                self._lose_all(held)
        return self._crew.taken

    def _lose_all(self, taker: Owner | None) -> None:
        """What is being made for a place of the ring would stand in its new gateway's way."""
        self._crew.taken = True
        self._crew.taker = self._crew.taker or taker
        self.replies.end(self._crew.taken_away())
        if self._ceding is None:
            self._ceding = asyncio.create_task(self.seats.stop())

    async def _watch(self, member: Member, running: asyncio.Task[Any], epoch: Epoch) -> None:
        """Waits for the end of a stage's loop. That of its process has its own watcher."""
        try:
            end: LoopEnd = await running
        except RayError as error:
            end = LoopEnd(member.index, in_a_line(error))
        if end.reason is not None:
            self.replies.lose(end.stage, end.reason, epoch)

    def _news(self, member: Member) -> None:
        """It is lost, or silent. Either ends the epoch; the next turn tells them apart."""
        if member.taken or self._crew.taken:
            self._lose_all(member.taker)
        elif member in self.seats.members:
            self.replies.fail(member.index, str(member.loss or member.silence))
        else:
            self.seats.spares.lost(member)

    async def _unwire(self) -> None:
        wiring, self._wiring = self._wiring, None
        if wiring is not None:
            await wiring.close()

    async def _end_opening(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)

    async def leave(self) -> None:
        """The stages rest and keep what they have; whoever comes next may have them at once."""
        self.replies.fail(None, "stopped")
        await self._end_opening()
        try:
            await self.seats.stop()
            if self._owner is not None and not self._crew.taken:
                await self.seats.rest(self._turn + 1)
                self._stop_renewing()
                await give_back(self._crew.members, self._owner, self._config.call_s)
        finally:
            self._stop_renewing()
            await self._crew.leave()
            await self._clean()

    def _stop_renewing(self) -> None:
        if self._keeper is not None:
            self._keeper.close()

    async def end(self) -> None:
        self.replies.fail(None, "stopped")
        await self._end_opening()
        try:
            await self.seats.stop()
            if not await self._is_taken(self._crew.members):
                await self._end_stages()
        finally:
            self._stop_renewing()
            await self._crew.end()
            await self._clean()

    async def _end_stages(self) -> None:
        """Told to end, a loop does so at once, or once it has written what was on its way to the disk."""
        ends = [
            member.ask("end", self._turn + 1, _WRITE_S, within_s=2 * _WRITE_S)
            for member in self.seats.members
            if member.loss is None
        ]
        await asyncio.gather(*ends, return_exceptions=True)

    async def _clean(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await self._unwire()


def _nothing() -> None:
    """Stages go on with the frames that they have: what they compute is there for the next epoch."""
