"""What rings are like when somebody looks, and what they have added up: read from their status, kept nowhere.

Counters are of all rings there ever were. What depends on a part that a ring lacks (a host store) has no series then.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Iterator
from importlib.metadata import version

from prometheus_client.registry import Collector

from coordinator.clock import Clock
from coordinator.lanes import LaneState
from coordinator.ring import RingInfo
from coordinator.router import Router
from coordinator.status import RingState, RingStatus
from gateway.observing.metrics import families
from gateway.observing.metrics.families import Family
from gateway.observing.metrics.idle import IdleWindow
from gateway.observing.metrics.naming import Naming, Scraped

Series = tuple[tuple[str, ...], float]  # values of the family's own labels
ONE: tuple[str, ...] = ()


class RingLook(Collector):
    """Called on the event loop, as everything that asks rings must be. `block_rows`: of one block to the outside."""

    def __init__(self, naming: Naming, router: Router, clock: Clock, block_rows: int) -> None:
        self._naming = naming
        self._router = router
        self._clock = clock
        self._block_rows = block_rows
        self._idle: dict[str, IdleWindow] = {}
        self._version = version("ringserve")

    def describe(self) -> Iterable[Scraped]:
        """Asks no ring: a registry reads it when the collector is registered."""
        return [self._naming.scraped(family) for family in families.AT_A_LOOK]

    def collect(self) -> Iterator[Scraped]:
        rings = self._router.rings()
        for family, series in (
            *self._load(rings),
            *self._added_up(rings),
            *self._state(rings),
            *self._stores(rings),
            (families.STAGE_IDLE, self._idle_stages(rings)),
        ):
            yield from self._family(family, series)

    def _family(self, family: Family, series: list[Series]) -> Iterator[Scraped]:
        if series:
            scraped = self._naming.scraped(family)
            for labels, value in series:
                scraped.add_metric((self._naming.model_name, *labels), value)
            yield scraped

    def _load(self, rings: tuple[RingStatus, ...]) -> Iterator[tuple[Family, list[Series]]]:
        yield families.BUILD, [((self._version,), 1.0)]
        yield families.RUNNING, [(ONE, sum(ring.running_jobs for ring in rings))]
        yield families.WAITING, [(ONE, sum(ring.waiting_jobs for ring in rings))]
        infos = [ring.info for ring in rings if ring.info is not None]
        if infos:
            lanes = sum(info.lanes for info in infos)
            yield families.KV_USAGE, [(ONE, sum(ring.busy_lanes for ring in rings) / lanes)]
            yield families.CACHE_CONFIG, [self._cache_config(infos, lanes)]

    def _cache_config(self, infos: list[RingInfo], lanes: int) -> Series:
        blocks = sum(info.lanes * (info.max_rows // self._block_rows) for info in infos)
        rows = infos[0].max_rows
        return (str(self._block_rows), str(blocks), "True", str(lanes), str(rows)), 1.0

    def _added_up(self, rings: tuple[RingStatus, ...]) -> Iterator[tuple[Family, list[Series]]]:
        counts = self._router.counts()
        yield families.PAUSED, [(ONE, sum(ring.resting_jobs for ring in rings))]
        queries = counts.prefilled_rows + counts.reused_rows
        in_lanes = counts.reused_rows - counts.restored_rows
        figures = {
            families.PAUSES: counts.pauses,
            families.SLOW_READERS: counts.slow_readers,
            families.PREFIX_QUERIES: queries,
            families.PREFIX_HITS: in_lanes,
            families.SPEC_DRAFTS: counts.draft_steps,
            families.SPEC_DRAFT_TOKENS: counts.drafted,
            families.SPEC_ACCEPTED: counts.accepted,
            families.FRAMES: counts.frames,
            families.FRAME_ROWS: counts.rows,
            families.DISCARDED: counts.discarded_frames,
            families.RECALLED: counts.recalled,
            families.AHEAD: counts.ahead_rows,
        }
        if counts.restored_rows or any(ring.info and ring.info.host_rows for ring in rings):
            figures[families.EXTERNAL_QUERIES] = queries - in_lanes
            figures[families.EXTERNAL_HITS] = counts.restored_rows
        for family, value in figures.items():
            yield family, [(ONE, value)]

    def _state(self, rings: tuple[RingStatus, ...]) -> Iterator[tuple[Family, list[Series]]]:
        states = [(ring.name, ring.state) for ring in rings]
        yield (
            families.RING_STATE,
            [((name, each), float(each is state)) for name, state in states for each in RingState],
        )
        started = [ring for ring in rings if ring.info is not None]
        yield families.RING_EPOCH, [((ring.name,), ring.epoch) for ring in started]
        yield families.SPARES, [((ring.name,), ring.spares) for ring in started]
        yield families.SESSIONS, [((ring.name,), ring.sessions) for ring in started]
        yield families.IN_FLIGHT, [((ring.name,), ring.frames_in_flight) for ring in started]
        of_state: list[Series] = []
        rows: list[Series] = []
        for ring in started:
            lanes = self._router.lanes(ring.name, ring.info.lanes if ring.info else 0)
            counted = Counts(lane.state for lane in lanes)
            of_state += [((ring.name, state), counted[state]) for state in LaneState]
            rows.append(((ring.name,), sum(lane.valid_rows for lane in lanes)))
        yield families.LANE_STATE, of_state
        yield families.LANE_ROWS, rows

    def _stores(self, rings: tuple[RingStatus, ...]) -> Iterator[tuple[Family, list[Series]]]:
        rooms = {ring.name: ring.info.host_rows for ring in rings if ring.info is not None}
        stored = [ring for ring in rings if rooms.get(ring.name)]
        yield families.HOST_ROWS, [((ring.name,), ring.stored_rows) for ring in stored]
        yield families.HOST_PINNED, [((ring.name,), ring.pinned_rows) for ring in stored]
        yield families.HOST_ROOM, [((ring.name,), rooms[ring.name]) for ring in stored]

    def _idle_stages(self, rings: tuple[RingStatus, ...]) -> list[Series]:
        now = self._clock.now()
        there = {ring.name: ring for ring in rings if ring.info is not None}
        for name in self._idle.keys() - there.keys():
            del self._idle[name]
        series: list[Series] = []
        for name, ring in there.items():
            busy_s = ring.counts.stage_busy_s
            window = self._idle.setdefault(name, IdleWindow(now, busy_s))
            ratios = window.ratios(now, busy_s)
            series += [((name, str(stage)), ratio) for stage, ratio in enumerate(ratios)]
        return series
