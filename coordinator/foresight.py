"""Idle prefill: rows that a session's next request is known to begin with, computed while nobody waits.

Decides what is computed ahead and in which lane: only in the session's own, only while the ring has nothing else to do,
one frame at a time, so that real work waits for one frame at most. It holds no lane: each frame opens it anew at what
the ledger has, and whoever comes in between is served as if nothing had been planned. A guess that proves wrong costs
rows that nobody wanted, never a token.

On a ring whose rows depend on the shapes they were computed in, rows are made anew as well: those that no whole chunk
of the next prompt's cut plan made, such as all that were generated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from coordinator.config import SchedulerSettings
from coordinator.cuts import next_cut, planned_cuts
from coordinator.frames import Epoch, Frame, JobId, LaneId, OpenLane, Segment, SegmentKind, Seq
from coordinator.lanes import LaneTable
from coordinator.ledger import Ledger
from coordinator.nodes import root_of
from coordinator.prefixes import digest_of
from coordinator.requests import Request, SessionId
from coordinator.ring import RingInfo

# The job of every frame that serves nobody yet: replies to it concern no client.
AHEAD = JobId(-1)
# Sessions whose next rows are known and not there yet; the oldest wish is forgotten first.
_MOST_WISHES = 64


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Wish:
    """What a session's next prompt begins with; `boundaries` and `tenant` as in Request."""

    session: SessionId
    tokens: tuple[int, ...]
    boundaries: tuple[int, ...] = ()
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One frame's worth."""

    wish: Wish
    opening: OpenLane
    segment: Segment

    def frame(self, epoch: Epoch, seq: Seq, *, alone: bool) -> Frame:
        return Frame(epoch, seq, (self.opening,), (self.segment,), alone=alone)

    @property
    def completes(self) -> bool:
        return self.segment.end == len(self.wish.tokens)


class Foresight:
    def __init__(
        self, ledger: Ledger, lanes: LaneTable, settings: SchedulerSettings, info: RingInfo
    ) -> None:
        self._ledger = ledger
        self._lanes = lanes
        self._settings = settings
        self._exact = info.exact
        self._fingerprint = info.model_fingerprint
        self._wishes: OrderedDict[SessionId, Wish] = OrderedDict()
        # Rows from the first on that whole chunks made, by session; of an exact ring all are as good.
        self._whole: OrderedDict[SessionId, int] = OrderedDict()

    def wish(self, wish: Wish) -> None:
        """Takes the place of the session's earlier one."""
        self.forget(wish.session)
        if not self._exact:
            # What is behind its last cut lies in a chunk that ends elsewhere in the real prompt.
            wish = replace(
                wish, tokens=wish.tokens[: self._last_cut(len(wish.tokens), wish.boundaries)]
            )
        if 0 < len(wish.tokens) <= self._ledger.max_rows:
            self._wishes[wish.session] = wish
        _keep_latest(self._wishes)

    def ended(self, request: Request, cached_prefix: int) -> None:
        """A job has ended that computed its prompt from `cached_prefix` on; wishes of before it are void."""
        session = request.session
        self.forget(session)
        if self._exact or session is None:
            return
        cuts = (0, *self._cuts(len(request.prompt), request.boundaries))
        before = self._whole.pop(session, cached_prefix)
        begun = max(cut for cut in cuts if cut <= cached_prefix)
        # A chunk that was begun in its middle is another shape than the whole one.
        went_on = cached_prefix <= before and begun == cached_prefix
        self._whole[session] = cuts[-2] if went_on else min(before, begun)
        _keep_latest(self._whole)

    def forget(self, session: SessionId | None) -> None:
        """The session's next request has come, or never will."""
        if session is not None:
            self._wishes.pop(session, None)

    def next_step(self) -> Step | None:
        """What an idle ring may compute now; None when there is nothing. Wishes that came true are forgotten."""
        for wish in tuple(self._wishes.values()):
            lane = self._lanes.lane_of(wish.session)
            root = root_of(self._fingerprint, wish.tenant)
            if lane is None or self._lanes.is_busy(lane) or self._ledger.root(lane) != root:
                self.forget(wish.session)
                continue
            depth = self._depth(wish, lane)
            if depth == len(wish.tokens):
                self.forget(wish.session)
                continue
            opening = OpenLane(lane, AHEAD, depth, digest_of(wish.tokens[:depth]), root)
            tokens = wish.tokens[
                depth : next_cut(self._cuts(len(wish.tokens), wish.boundaries), depth)
            ]
            if not self._exact:
                self._whole[wish.session] = depth + len(tokens)
            return Step(wish, opening, Segment(lane, AHEAD, depth, tokens, SegmentKind.PREFILL))
        return None

    def _depth(self, wish: Wish, lane: LaneId) -> int:
        """From where on rows are to be computed."""
        root = self._ledger.root(lane)
        held = self._ledger.restore_point(lane, wish.tokens, len(wish.tokens), root)
        whole = self._whole.get(wish.session, held)
        if whole >= held:
            return held
        # Recurrent layers may not be able to go back there: their rows stay as they are.
        return self._ledger.restore_point(lane, wish.tokens, whole, root) or (held if whole else 0)

    def refused(self, lane: LaneId) -> None:
        """Some stage does not hold what we believed. A job that has the lane by now is told by its own opening.

        Nothing is tried there again: what stages always refuse would be tried for ever.
        """
        if self._lanes.is_busy(lane):
            return
        self._ledger.truncate(lane, 0)
        for session in [s for s in self._wishes if self._lanes.lane_of(s) == lane]:
            self.forget(session)

    def _cuts(self, n_tokens: int, boundaries: Sequence[int]) -> tuple[int, ...]:
        """Where the cut plan has them, so that rows are those that the request itself would compute."""
        return planned_cuts(self._settings, n_tokens, boundaries)

    def _last_cut(self, n_tokens: int, boundaries: Sequence[int]) -> int:
        """Where the last chunk begins; each one before it is a chunk of every longer prompt too."""
        return (0, *self._cuts(n_tokens, boundaries))[-2]


def _keep_latest(known: OrderedDict[SessionId, _T]) -> None:
    while len(known) > _MOST_WISHES:
        known.popitem(last=False)
