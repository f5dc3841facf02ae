"""What the status page is told, twice a second: rings, stages, lanes, the chain store and the turns of late.

It reads and decides nothing. No prompt's text is in it, and sessions go by their digests. How busy a stage is comes
from what has been counted since a few seconds ago: with nobody looking nothing is sampled, so the first one has none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from types import MappingProxyType

import msgspec

from coordinator.lanes import LaneStatus
from coordinator.requests import Miss, MissKind
from coordinator.ring import StageProgress
from coordinator.status import RingStatus
from gateway.observing.recent_turns import TurnRecord
from gateway.observing.sights import Sights
from gateway.service import GenerationService

# Over how many seconds a stage's share of busy time is taken: a chunk of a long prompt may take one of them.
_WINDOW_S = 4.0
# More bars than these are no picture; they would cost the event loop milliseconds.
_MOST_LANES = 128

_WHY: Mapping[MissKind, str] = MappingProxyType(
    {
        MissKind.NEW_SESSION: "first turn of its session",
        MissKind.DIVERGED: "differs from what its session had",
        MissKind.EVICTED: "its rows made room for others",
        MissKind.RING_LOST: "its ring or its rows were lost",
        MissKind.NO_CHECKPOINT: "no checkpoint to go on from",
        MissKind.MODEL_CHANGED: "another model had its rows",
    }
)


@dataclass(frozen=True, slots=True)
class StageView:
    stage: int
    device: str
    busy: float | None  # share of the last seconds
    busy_s: float
    bytes_done: int
    bytes_total: int
    note: str  # what it does while it loads


@dataclass(frozen=True, slots=True)
class LaneView:
    lane: int
    state: str
    session: str | None
    valid_rows: int
    reused_rows: int


@dataclass(frozen=True, slots=True)
class StoreView:
    rows: int
    room: int
    pinned: int


@dataclass(frozen=True, slots=True)
class RingView:
    name: str
    state: str  # loading, ready, recovering, draining or down
    reason: str
    epoch: int
    spares: int
    replaced: int  # stages
    numerics: str
    max_rows: int
    lane_count: int
    busy_lanes: int
    running_jobs: int
    waiting_jobs: int
    resting_jobs: int  # of those that run: nobody reads them fast enough
    sessions: int
    frames: int
    discarded_frames: int
    refusals: int
    prefilled_rows: int
    reused_rows: int
    restored_rows: int
    drafted: int
    accepted: int
    misses: dict[str, int]
    stages: tuple[StageView, ...]
    lanes: tuple[LaneView, ...]
    store: StoreView | None  # None: there is none


@dataclass(frozen=True, slots=True)
class TurnView:
    number: int
    asked_at: float
    session: str | None
    ring: str | None
    lane: int | None
    prompt_tokens: int | None
    cached_prefix: int | None
    miss: str | None
    why: str | None  # the miss in words
    ttft_s: float | None
    generated_tokens: int
    tokens_per_s: float | None
    drafted: int | None
    accepted: int | None
    outcome: str | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    at: float  # seconds since 1970
    version: str
    model: str
    open_turns: int
    rings: tuple[RingView, ...]
    turns: tuple[TurnView, ...]


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    busy_s: tuple[float, ...]


class Snapshots:
    """Makes them. `now` runs evenly; `wall` gives seconds since 1970."""

    def __init__(
        self,
        service: GenerationService,
        sights: Sights,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._service = service
        self._sights = sights
        self._now = now
        self._wall = wall
        self._version = version("ringserve")
        self._samples: dict[str, deque[_Sample]] = {}

    def take(self) -> Snapshot:
        statuses = self._service.rings()
        self._sample(statuses)
        return Snapshot(
            at=self._wall(),
            version=self._version,
            model=self._service.name,
            open_turns=self._service.open_turns,
            rings=tuple(self._ring(status) for status in statuses),
            turns=tuple(_turn(record) for record in self._sights.turns.last()),
        )

    def encoded(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self.take())

    def _sample(self, statuses: tuple[RingStatus, ...]) -> None:
        now = self._now()
        kept = {status.name: self._samples.get(status.name, deque()) for status in statuses}
        for status in statuses:
            samples = kept[status.name]
            samples.append(_Sample(now, status.counts.stage_busy_s))
            # The oldest one lies just outside of the window, so that the window is always a whole one.
            while len(samples) > 2 and samples[1].at_s <= now - _WINDOW_S:
                samples.popleft()
        self._samples = kept

    def _busy(self, ring: str, stage: int) -> float | None:
        first, last = self._samples[ring][0], self._samples[ring][-1]
        if last.at_s <= first.at_s or stage >= len(first.busy_s):
            return None
        share = (last.busy_s[stage] - first.busy_s[stage]) / (last.at_s - first.at_s)
        # A frame's time counts when it is answered: some of it may lie before the window.
        return min(max(share, 0.0), 1.0)

    def _ring(self, status: RingStatus) -> RingView:
        counts, info = status.counts, status.info
        lanes = self._service.lanes(status.name, _MOST_LANES)
        return RingView(
            name=status.name,
            state=status.state.value,
            reason="" if status.ready else status.reason,
            epoch=status.epoch,
            spares=status.spares,
            replaced=status.replaced,
            numerics="" if info is None else info.numerics,
            max_rows=0 if info is None else info.max_rows,
            lane_count=0 if info is None else info.lanes,
            busy_lanes=status.busy_lanes,
            running_jobs=status.running_jobs,
            waiting_jobs=status.waiting_jobs,
            resting_jobs=status.resting_jobs,
            sessions=status.sessions,
            frames=counts.frames,
            discarded_frames=counts.discarded_frames,
            refusals=counts.refusals,
            prefilled_rows=counts.prefilled_rows,
            reused_rows=counts.reused_rows,
            restored_rows=counts.restored_rows,
            drafted=counts.drafted,
            accepted=counts.accepted,
            misses={kind.value: turns for kind, turns in counts.misses},
            stages=self._stages(status),
            lanes=tuple(self._lane(lane) for lane in lanes),
            store=_store(status),
        )

    def _stages(self, status: RingStatus) -> tuple[StageView, ...]:
        """While the ring loads, those of which something was heard."""
        said = {each.stage: each for each in self._sights.loading.stages(status.name)}
        info = status.info
        known = sorted(said) if info is None else range(info.stages)
        silent = StageProgress(0, 0, 0)
        return tuple(
            StageView(
                stage=stage,
                device="" if info is None else info.devices[stage],
                busy=self._busy(status.name, stage),
                busy_s=sum(status.counts.stage_busy_s[stage : stage + 1]),
                bytes_done=said.get(stage, silent).bytes_done,
                bytes_total=said.get(stage, silent).bytes_total,
                note=said.get(stage, silent).note,
            )
            for stage in known
        )

    def _lane(self, lane: LaneStatus) -> LaneView:
        session = None if lane.session is None else self._sights.turns.digest(lane.session)
        return LaneView(lane.lane, lane.state.value, session, lane.valid_rows, lane.reused_rows)


def _store(status: RingStatus) -> StoreView | None:
    room = 0 if status.info is None else status.info.host_rows
    return StoreView(status.stored_rows, room, status.pinned_rows) if room else None


def _turn(record: TurnRecord) -> TurnView:
    miss = record.miss
    return TurnView(
        number=record.number,
        asked_at=record.asked_at,
        session=record.session,
        ring=record.ring,
        lane=record.lane,
        prompt_tokens=record.prompt_tokens,
        cached_prefix=record.cached_prefix,
        miss=None if miss is None else miss.kind.value,
        why=None if miss is None else miss_words(miss),
        ttft_s=record.ttft_s,
        generated_tokens=record.generated_tokens,
        tokens_per_s=record.tokens_per_s,
        drafted=record.drafted,
        accepted=record.accepted,
        outcome=record.outcome,
    )


def miss_words(miss: Miss) -> str:
    """Why a turn reused less than its session had, for people; places are counted as the request's own."""
    if miss.kind is not MissKind.DIVERGED or miss.token_index is None:
        return _WHY[miss.kind]
    place = f"differs from token {miss.token_index} on"
    return place if miss.message_index is None else f"{place}, in messages[{miss.message_index}]"
