"""Which lane a job gets, how much of its prompt lies there, and which lane is given up for it.

Decides by the ledger replica alone: the longest usable prefix wins, a session continues in place,
another session's rows are copied rather than taken while it may still need its tail, and else the
idle lane that was used longest ago is overwritten. A lane with a running job is never given away.
Pure bookkeeping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.frames import JobId, LaneId, NodeId
from coordinator.ledger import Ledger
from coordinator.requests import SessionId


@dataclass(frozen=True, slots=True)
class LaneChoice:
    """`copy_from`: the lane whose first `cached_prefix` rows are copied here before the lane is
    opened.
    """

    lane: LaneId
    cached_prefix: int
    copy_from: LaneId | None = None
    nodes: tuple[NodeId, ...] = ()  # chain nodes that hold the first `cached_prefix` rows, in order


@dataclass(slots=True)
class _Seat:
    job: JobId | None = None
    session: SessionId | None = None
    used: int = 0  # the tick of its last use; 0: never


class LaneTable:
    def __init__(self, ledger: Ledger, min_copy_rows: int) -> None:
        self._ledger = ledger
        self._min_copy_rows = min_copy_rows
        self._seats = [_Seat() for _ in range(ledger.lanes)]
        self._tick = 0

    @property
    def busy(self) -> int:
        return sum(seat.job is not None for seat in self._seats)

    @property
    def free(self) -> int:
        """Lanes that no job runs in and no session owns: a newcomer there costs nobody anything."""
        return sum(seat.job is None and seat.session is None for seat in self._seats)

    def is_busy(self, lane: LaneId) -> bool:
        return self._seats[lane].job is not None

    def lane_of(self, session: SessionId) -> LaneId | None:
        """The session's lane used last, while its rows lie there."""
        owned = [lane for lane in self._all() if self._seats[lane].session == session]
        return max(owned, key=lambda lane: self._seats[lane].used, default=None)

    def usable_prefix(self, prompt: Sequence[int]) -> int:
        """The deepest depth that a lane holds; at least one token is always computed."""
        most = len(prompt) - 1
        return max(self._ledger.restore_point(lane, prompt, most) for lane in self._all())

    def choose(
        self, prompt: Sequence[int], session: SessionId | None, *, reuse: bool, most: int
    ) -> LaneChoice | None:
        """None while every lane has a running job. `most`: how many rows may be reused. Changes nothing: `take`
        does.
        """
        idle = [lane for lane in self._all() if self._seats[lane].job is None]
        if not idle:
            return None
        victim = min(idle, key=lambda lane: self._worth(lane, session))
        if not reuse:
            return LaneChoice(victim, 0)
        depths = {lane: self._ledger.restore_point(lane, prompt, most) for lane in self._all()}
        donor = max(self._all(), key=lambda lane: (depths[lane], lane in idle))
        own = self.lane_of(session) if session is not None else None
        if own in idle and depths[own] + self._min_copy_rows > depths[donor]:
            return LaneChoice(own, depths[own])
        if donor in idle and self._may_take(donor, depths[donor], session):
            return LaneChoice(donor, depths[donor])
        if depths[donor] - depths[victim] < self._min_copy_rows or donor == victim:
            return LaneChoice(victim, depths[victim])
        return LaneChoice(victim, depths[donor], copy_from=donor)

    def take(self, choice: LaneChoice, job: JobId, session: SessionId | None) -> None:
        self._tick += 1
        self._seats[choice.lane] = _Seat(job, session, self._tick)

    def release(self, lane: LaneId) -> None:
        """The job has ended; its rows stay, and stay its session's, until the lane is chosen for
        another.
        """
        self._tick += 1
        self._seats[lane].job = None
        self._seats[lane].used = self._tick

    def disown(self, session: SessionId) -> None:
        """The session is closed: its lanes are the first to be overwritten."""
        for seat in self._seats:
            if seat.session == session:
                seat.session, seat.used = None, 0

    def clear(self) -> None:
        """Every row is void (a new epoch)."""
        self._seats = [_Seat() for _ in self._seats]

    def _all(self) -> list[LaneId]:
        return [LaneId(lane) for lane in range(len(self._seats))]

    def _worth(self, lane: LaneId, session: SessionId | None) -> tuple[bool, bool, int]:
        """The lane with the least worth is overwritten first: empty, then unowned, then oldest."""
        seat = self._seats[lane]
        owned_by_another = seat.session is not None and seat.session != session
        return (self._ledger.valid_rows(lane) > 0, owned_by_another, seat.used)

    def _may_take(self, lane: LaneId, depth: int, session: SessionId | None) -> bool:
        """In place costs nobody anything where no other session would lose rows behind `depth`."""
        seat = self._seats[lane]
        nobody_else = seat.session is None or seat.session == session
        return depth > 0 and (nobody_else or depth == self._ledger.valid_rows(lane))
