"""Which lane a job gets, how much of its prompt lies there, and which lane is given up for it.

Decides by the ledger replica alone: the longest usable prefix wins, a session continues in place,
another session's rows are copied rather than taken while it may still need its tail, and else the
idle lane that was used longest ago is overwritten. A lane with a running job is never given away.
Pure bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import nlargest

from coordinator.frames import NO_ROOT, JobId, LaneId, NodeId
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


class LaneState(StrEnum):
    EMPTY = "empty"
    RESTING = "resting"  # holds rows; no job runs
    PREFILL = "prefill"  # its job has no token yet
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """A lane for whoever looks; valid rows count those of frames in flight."""

    lane: LaneId
    state: LaneState
    session: SessionId | None
    valid_rows: int
    reused_rows: int  # of these: not computed by its last job


@dataclass(slots=True)
class _Seat:
    job: JobId | None = None
    session: SessionId | None = None
    used: int = 0  # the tick of its last use; 0: never
    reused: int = 0


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

    @property
    def rows(self) -> int:
        """Valid ones of all lanes."""
        return sum(map(self._ledger.valid_rows, self._all()))

    def statuses(self, most: int, decodes: Callable[[JobId], bool]) -> tuple[LaneStatus, ...]:
        """The lanes by their numbers; where there are more than `most`, those used last."""
        lanes = self._all()
        if len(lanes) > most:
            lanes = sorted(nlargest(most, lanes, key=lambda lane: self._seats[lane].used))
        return tuple(self._status(lane, decodes) for lane in lanes)

    def _status(self, lane: LaneId, decodes: Callable[[JobId], bool]) -> LaneStatus:
        seat, valid = self._seats[lane], self._ledger.valid_rows(lane)
        if seat.job is not None:
            state = LaneState.DECODE if decodes(seat.job) else LaneState.PREFILL
        else:
            state = LaneState.RESTING if valid else LaneState.EMPTY
        return LaneStatus(lane, state, seat.session, valid, min(seat.reused, valid))

    def is_busy(self, lane: LaneId) -> bool:
        return self._seats[lane].job is not None

    def lane_of(self, session: SessionId) -> LaneId | None:
        """The session's lane used last, while its rows lie there."""
        owned = [lane for lane in self._all() if self._seats[lane].session == session]
        return max(owned, key=lambda lane: self._seats[lane].used, default=None)

    def usable_prefix(self, prompt: Sequence[int], root: NodeId = NO_ROOT) -> int:
        """The deepest depth that a lane holds; at least one token is always computed."""
        return max(self._depths(prompt, len(prompt) - 1, root).values())

    def _depths(self, prompt: Sequence[int], most: int, root: NodeId) -> dict[LaneId, int]:
        return {lane: self._ledger.restore_point(lane, prompt, most, root) for lane in self._all()}

    def choose(
        self,
        prompt: Sequence[int],
        session: SessionId | None,
        *,
        reuse: bool,
        most: int,
        root: NodeId = NO_ROOT,
    ) -> LaneChoice | None:
        """None while every lane has a running job. `most`: how many rows may be reused; `root`: of which chain they
        must be. Changes nothing: `take` does.
        """
        idle = [lane for lane in self._all() if self._seats[lane].job is None]
        if not idle:
            return None
        victim = min(idle, key=lambda lane: self._worth(lane, session))
        if not reuse:
            return LaneChoice(victim, 0)
        depths = self._depths(prompt, most, root)
        donor = max(self._all(), key=lambda lane: (depths[lane], lane in idle))
        own = self.lane_of(session) if session is not None else None
        if own in idle and depths[own] + self._min_copy_rows > depths[donor]:
            # Where most of its rows would go it is a side call (a title, a probe), which gets a lane of its own.
            if self._stays(own, depths[own]):
                return LaneChoice(own, depths[own])
        if donor in idle and self._may_take(donor, depths[donor], session):
            return LaneChoice(donor, depths[donor])
        if depths[donor] - depths[victim] < self._min_copy_rows or donor == victim:
            return LaneChoice(victim, depths[victim])
        return LaneChoice(victim, depths[donor], copy_from=donor)

    def take(self, choice: LaneChoice, job: JobId, session: SessionId | None) -> None:
        self._tick += 1
        self._seats[choice.lane] = _Seat(job, session, self._tick, choice.cached_prefix)

    def reopened(self, lane: LaneId, reused: int) -> None:
        """The lane's job starts over, from less than was believed."""
        self._seats[lane].reused = reused

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

    def vacate(self) -> None:
        """No job runs (the epoch is over)."""
        for seat in self._seats:
            seat.job = None

    def forget_empty(self) -> list[LaneId]:
        """Lanes whose rows did not last are nobody's; returns the others."""
        kept = [lane for lane in self._all() if self._ledger.valid_rows(lane)]
        self._seats = [self._seats[lane] if lane in kept else _Seat() for lane in self._all()]
        return kept

    def _all(self) -> list[LaneId]:
        return [LaneId(lane) for lane in range(len(self._seats))]

    def _worth(self, lane: LaneId, session: SessionId | None) -> tuple[bool, int, float]:
        """The lane with the least worth is overwritten first: empty, then unowned, then the session's own, then
        another's. Of its own, a short branch goes before the conversation that it left; else the oldest goes.
        """
        seat, rows = self._seats[lane], self._ledger.valid_rows(lane)
        if seat.session is not None and seat.session == session:
            return (rows > 0, 1, rows / (1 + self._tick - seat.used))
        return (rows > 0, 0 if seat.session is None else 2, seat.used)

    def _stays(self, lane: LaneId, depth: int) -> bool:
        """Whether most of the lane's rows are kept when a job goes on from `depth`."""
        return 2 * depth >= self._ledger.valid_rows(lane)

    def _may_take(self, lane: LaneId, depth: int, session: SessionId | None) -> bool:
        """In place costs nobody much where no other session would lose rows behind `depth`, and its own few."""
        seat = self._seats[lane]
        nobody_else = seat.session is None or seat.session == session
        kept_whole = depth == self._ledger.valid_rows(lane)
        return depth > 0 and (kept_whole or (nobody_else and self._stays(lane, depth)))
