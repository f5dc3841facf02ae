"""Idle prefill: rows that a session's next request is known to begin with, computed while nobody waits.

Decides what is computed ahead and in which lane: only in the session's own, only while the ring has nothing else to do,
one frame at a time, so that real work waits for one frame at most. It holds no lane: each frame opens it anew at what
the ledger has, and whoever comes in between is served as if nothing had been planned. A guess that proves wrong costs
rows that nobody wanted, never a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.config import SchedulerSettings
from coordinator.cuts import cut_plan, next_cut
from coordinator.frames import JobId, LaneId, OpenLane, Segment, SegmentKind
from coordinator.lanes import LaneTable
from coordinator.ledger import Ledger
from coordinator.prefixes import digest_of
from coordinator.requests import SessionId

# The job of every frame that serves nobody yet: replies to it concern no client.
AHEAD = JobId(-1)
# Sessions whose next rows are known and not there yet; the oldest wish is forgotten first.
_MOST_WISHES = 64


@dataclass(frozen=True, slots=True)
class Wish:
    """What a session's next prompt begins with; `boundaries` as in Request."""

    session: SessionId
    tokens: tuple[int, ...]
    boundaries: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One frame's worth."""

    wish: Wish
    opening: OpenLane
    segment: Segment

    @property
    def completes(self) -> bool:
        return self.segment.end == len(self.wish.tokens)


class Foresight:
    def __init__(self, ledger: Ledger, lanes: LaneTable, settings: SchedulerSettings) -> None:
        self._ledger = ledger
        self._lanes = lanes
        self._settings = settings
        self._wishes: OrderedDict[SessionId, Wish] = OrderedDict()

    def wish(self, wish: Wish) -> None:
        """Takes the place of the session's earlier one."""
        self.forget(wish.session)
        if len(wish.tokens) <= self._ledger.max_rows:
            self._wishes[wish.session] = wish
        while len(self._wishes) > _MOST_WISHES:
            self._wishes.popitem(last=False)

    def forget(self, session: SessionId | None) -> None:
        """The session's next request has come, or never will."""
        if session is not None:
            self._wishes.pop(session, None)

    def next_step(self) -> Step | None:
        """What an idle ring may compute now; None when there is nothing. Wishes that came true are forgotten."""
        for wish in tuple(self._wishes.values()):
            lane = self._lanes.lane_of(wish.session)
            if lane is None or self._lanes.is_busy(lane):
                self.forget(wish.session)
                continue
            depth = self._ledger.restore_point(lane, wish.tokens, len(wish.tokens))
            if depth == len(wish.tokens):
                self.forget(wish.session)
                continue
            opening = OpenLane(lane, AHEAD, depth, digest_of(wish.tokens[:depth]))
            tokens = wish.tokens[depth : self._end(wish, depth)]
            return Step(wish, opening, Segment(lane, AHEAD, depth, tokens, SegmentKind.PREFILL))
        return None

    def refused(self, lane: LaneId) -> None:
        """Some stage does not hold what we believed. A job that has the lane by now is told by its own opening."""
        if not self._lanes.is_busy(lane):
            self._ledger.truncate(lane, 0)

    def _end(self, wish: Wish, depth: int) -> int:
        """Where the cut plan has it, so that rows are those that the request itself would compute."""
        settings = self._settings
        plan: Sequence[int] = cut_plan(
            len(wish.tokens),
            wish.boundaries,
            chunk_rows=settings.chunk_rows,
            min_chunk_rows=settings.min_chunk_rows,
        )
        return next_cut(plan, depth)
