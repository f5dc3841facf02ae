"""A ring that is looked at while it serves: what each frame does, what waits for its reply, when epochs begin.

Decides which moment a frame is of, and changes nothing: every call goes on to the ring itself. Whoever wants to strike
in a moment is told when the next frame of it goes out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.frames import Epoch, Frame, JobId, LoadNodes, Reply, SegmentKind, Seq
from coordinator.held import Holding
from coordinator.ring import ProgressSink, Ring, RingHealth, RingInfo, StageProgress
from gateway.chaos.storm import Moment

# Fewer rows are a turn's few new words; a stage is through with them before anybody can strike.
_LEAST_PREFILL = 16
# How much the latest reply weighs in how long a moment lasts.
_LATEST = 0.3


@dataclass(frozen=True, slots=True)
class Sighting:
    """A frame of the moment has gone out, or in LOAD a stage has begun to load."""

    moment: Moment
    at_s: float
    epoch: Epoch
    seq: Seq | None = None
    stage: int | None = None


@dataclass(slots=True)
class Opening:
    """One attempt to begin an epoch. Times are perf_counter's; None: not yet."""

    epoch: Epoch
    began_s: float
    opened_s: float | None = None
    answered_s: float | None = None  # the first reply of it came
    failed: str = ""
    loads: dict[int, list[float]] = field(default_factory=dict)  # when each stage told of its load

    @property
    def load_s(self) -> float:
        """From the first word of a loading stage to its last; stages load beside one another."""
        return max((told[-1] - told[0] for told in self.loads.values()), default=0.0)


@dataclass(frozen=True, slots=True)
class _Flight:
    frame: Frame
    sent_s: float
    moments: frozenset[Moment]


class SeenRing:
    """Implements coordinator.ring.Ring around another one."""

    def __init__(self, name: str, inner: Ring) -> None:
        self.name = name
        self.inner = inner
        self.openings: list[Opening] = []
        self._out: dict[tuple[Epoch, Seq], _Flight] = {}
        self._lasts_s: dict[Moment, float] = {}
        self._waiting: dict[Moment, list[asyncio.Future[Sighting]]] = {}
        self._opening: Opening | None = None

    # The port

    async def start(self, progress: ProgressSink) -> RingInfo:
        def tell(news: StageProgress) -> None:
            self._loading(news)
            progress(news)

        return await self.inner.start(tell)

    def capacity(self) -> RingInfo:
        return self.inner.capacity()

    async def open_epoch(self, epoch: Epoch) -> Holding:
        self._out.clear()
        opening = self._opening = Opening(epoch, time.perf_counter())
        self.openings.append(opening)
        try:
            held = await self.inner.open_epoch(epoch)
        except BaseException as error:
            opening.failed = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._opening = None
        opening.opened_s = time.perf_counter()
        return held

    def submit(self, frame: Frame) -> None:
        self.inner.submit(frame)
        moments = moments_of(frame, (flight.frame for flight in self._out.values()))
        flight = _Flight(frame, time.perf_counter(), moments)
        self._out[frame.epoch, frame.seq] = flight
        for moment in moments:
            self._tell(Sighting(moment, flight.sent_s, frame.epoch, frame.seq))

    async def next_reply(self) -> Reply:
        reply = await self.inner.next_reply()
        if (flight := self._out.pop((reply.epoch, reply.seq), None)) is not None:
            self._learn(flight, time.perf_counter())
        last = self.openings[-1] if self.openings else None
        if last is not None and last.answered_s is None and reply.epoch == last.epoch:
            last.answered_s = time.perf_counter()
        return reply

    def health(self) -> RingHealth:
        return self.inner.health()

    async def stop(self) -> None:
        await self.inner.stop()

    # For who waits for a moment

    async def sight(self, moment: Moment, within_s: float) -> Sighting | None:
        """The next sighting of the moment; None: there was none in time."""
        future: asyncio.Future[Sighting] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(moment, []).append(future)
        try:
            return await asyncio.wait_for(future, within_s)
        except TimeoutError:
            return None
        finally:
            if future in self._waiting.get(moment, ()):
                self._waiting[moment].remove(future)

    def lasts(self, sighting: Sighting) -> bool:
        """Whether the frame still waits for its reply, or the stage still loads."""
        if sighting.seq is not None:
            return (sighting.epoch, sighting.seq) in self._out
        return self._opening is not None and self._opening.epoch == sighting.epoch

    def usual_s(self, moment: Moment) -> float:
        """How long the moment lasts, from what was seen of it: a frame of it waits so long for its reply."""
        return self._lasts_s.get(moment, 0.0)

    def _learn(self, flight: _Flight, now: float) -> None:
        took_s = now - flight.sent_s
        for moment in flight.moments:
            known_s = self._lasts_s.get(moment, took_s)
            self._lasts_s[moment] = known_s + _LATEST * (took_s - known_s)

    def _tell(self, sighting: Sighting) -> None:
        for future in self._waiting.pop(sighting.moment, ()):
            if not future.done():
                future.set_result(sighting)

    def _loading(self, news: StageProgress) -> None:
        """Stages of spares tell nothing, and those of a start no opening waits for."""
        opening = self._opening
        if opening is None:
            return
        now = time.perf_counter()
        if news.stage not in opening.loads:
            self._tell(Sighting(Moment.LOAD, now, opening.epoch, stage=news.stage))
        opening.loads.setdefault(news.stage, []).append(now)


def moments_of(frame: Frame, out: Iterable[Frame]) -> frozenset[Moment]:
    """`out`: the frames that are on their way before it."""
    behind: set[JobId] = {segment.job for other in out for segment in other.segments}
    found = set()
    if any(isinstance(op, LoadNodes) for op in frame.ops):
        found.add(Moment.RESTORE)
    if frame.after:
        found.add(Moment.PUBLISH)
    for segment in frame.segments:
        if segment.kind is SegmentKind.PREFILL and segment.width >= _LEAST_PREFILL:
            found.add(Moment.PREFILL)
        if segment.kind is SegmentKind.VERIFY:
            found.add(Moment.DECODE)
            if segment.width > 1 or segment.job in behind:
                found.add(Moment.SPECULATION)
    return frozenset(found)
