"""The fake ring's synchronous core: stages, the legs between them, and virtual time.

It decides when a message arrives and which fault meets it, and heals as a real ring does: every stage rests, those that
are dead or do not rest in time are replaced, and an epoch begins with what all of them hold. It has no clock, no tasks
and no randomness: times come in with each call, so a pure scheduler can be driven with it step by step. Same calls,
same outcome.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from coordinator.errors import InvalidSetting, RingLost, RingTaken
from coordinator.frames import Epoch, Frame, Reply, StageTiming
from coordinator.held import Holding, held_by_all
from fakering.faults import (
    Delay,
    Drop,
    Duplicate,
    FailHeal,
    FaultScript,
    Linger,
    Lose,
    Pending,
    Reorder,
    StageFault,
    Stall,
    TakeAt,
)
from fakering.model import FakeModel
from fakering.stages import FakeStage, Parcel

# Each row of each stage takes 16 bytes, and a lane as much as this many rows beside its own.
_MAX_ROWS_IN_ALL = 100_000_000
_ROWS_OF_A_LANE = 32

# Seconds that a stage gets to finish its frame when an epoch ends.
_REST_S = 15.0


def check_sizes(stages: int, lanes: int, max_rows: int, rings: int = 1) -> None:
    """Raises InvalidSetting for what no machine has the memory to pretend, before anything is allocated."""
    sizes = {"stages": stages, "lanes": lanes, "max_rows": max_rows, "rings": rings}
    for name, size in sizes.items():
        if size < 1:
            raise InvalidSetting(name, f"must be at least 1, got {size}")
    if rings * stages * lanes * (max_rows + _ROWS_OF_A_LANE) > _MAX_ROWS_IN_ALL:
        worst = max(sizes, key=lambda name: sizes[name])
        raise InvalidSetting(
            worst,
            f"{rings} x {stages} stages x {lanes} lanes x {max_rows} rows are too many to pretend: "
            f"at most {_MAX_ROWS_IN_ALL} rows in all",
        )


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that a stage computes: per frame, and per row of it."""

    step_s: float = 0.0
    row_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Taken:
    """A parcel that waits for its stage to be free, and what befalls the stage with it."""

    parcel: Parcel
    faults: tuple[StageFault, ...]
    since: float


@dataclass(frozen=True, slots=True)
class _Wake:
    """The stage is free again."""

    stage: int


@dataclass(frozen=True, slots=True)
class _Notice:
    """The stage is found dead."""

    stage: int


@dataclass(frozen=True, slots=True, order=True)
class _Arrival:
    when: float
    order: int  # of sending: equal times arrive in this order
    leg: int = field(compare=False)
    message: Parcel | Reply | _Wake | _Notice = field(compare=False)


# Looks at the stages at rest and at what they are said to hold in common, before they are cut to it.
AtRest = Callable[[Sequence[FakeStage], Holding], None]


class Network:
    """Frames in by `send`, replies out by `advance`; lost until an epoch opens. Raises InvalidSetting."""

    def __init__(
        self,
        stages: int,
        lanes: int,
        max_rows: int,
        model: FakeModel,
        faults: FaultScript = (),
        pace: Pace | None = None,
        host_rows: int = 0,
        state_rows: int = 0,
        rest_s: float = _REST_S,
    ) -> None:
        """`host_rows`: rows that each stage's store takes; `state_rows`: as in RingInfo."""
        check_sizes(stages, lanes, max_rows)
        self.lost: RingLost | None = None  # as far as the ring knows
        self.replaced = 0  # stages, so far
        self.at_rest: AtRest | None = None
        self._shape = (stages, lanes, max_rows)
        self._host_rows = host_rows
        self._state_rows = state_rows
        self._rest_s = rest_s
        self._model = model
        self._faults = Pending(faults)
        self._pace = pace or Pace()
        self._sent = [0] * (stages + 1)
        self._reached = [0] * stages
        self._openings = 0
        self._order = 0
        self.rebuild()

    def rebuild(self) -> None:
        """New stages with nothing in them, at epoch 0. Faults that happened do not happen again."""
        self.lost = None
        self.stages = [self._new_stage(index) for index in range(self._shape[0])]
        self.dead: dict[int, float] = {}  # and the part of their nodes that is left of them
        self._arrivals: list[_Arrival] = []
        self._forget_messages(())

    def _new_stage(self, index: int) -> FakeStage:
        _, lanes, max_rows = self._shape
        return FakeStage(index, lanes, max_rows, self._model, self._host_rows, self._state_rows)

    @property
    def struck(self) -> Sequence[object]:
        """The faults that have happened, in their order."""
        return self._faults.struck

    # Epochs

    def open_epoch(self, epoch: Epoch, now: float = 0.0) -> Holding:
        """Lost stages are replaced, whatever is on its way is dropped, and what all hold stays. Raises RingLost."""
        self.advance(now)
        if isinstance(self.lost, RingTaken):
            raise self.give_away()
        faults = self._faults.of_opening(self._openings)
        fault = next((fault for fault in faults if isinstance(fault, FailHeal)), None)
        self._openings += 1
        if fault is not None and fault.opened is None:
            raise self._unhealed(fault)
        ghosts = self._replace(now)
        held = held_by_all([stage.holding() for stage in self.stages])
        if self.at_rest is not None:
            self.at_rest(self.stages, held)
        for stage in self.stages if fault is None else self.stages[: fault.opened]:
            stage.open_epoch(epoch, held)
        linger = any(isinstance(fault, Linger) for fault in faults)
        self._forget_messages(range(-1, len(self.stages)) if linger else ghosts)
        if fault is not None:
            raise self._unhealed(fault)
        self.lost = None
        return held

    def _replace(self, now: float) -> Collection[int]:
        """New stages for the dead, and for those that do not rest in time: these may still speak, and are returned."""
        stalled = [
            stage.index
            for stage in self.stages
            if self._free_at[stage.index] > now + self._rest_s and stage.index not in self.dead
        ]
        for index in (*self.dead, *stalled):
            old, self.stages[index] = self.stages[index], self._new_stage(index)
            self.stages[index].inherit(old, self.dead.get(index, self._stall_keeps[index]))
            self.replaced += 1
        self.dead.clear()
        return stalled

    def _unhealed(self, fault: FailHeal) -> RingLost:
        if fault.dies is not None:
            self.dead.setdefault(fault.dies, 0.0)
        self.lost = RingLost(fault.dies, "was not healed (scripted)")
        return RingLost(fault.dies, "was not healed (scripted)")

    def _forget_messages(self, ghosts: Collection[int]) -> None:
        """But for what these stages, which are none of the ring's any more, have said."""
        stages = len(self.stages)
        said = [a for a in self._arrivals if not isinstance(a.message, _Wake | _Notice)]
        self._arrivals = [arrival for arrival in said if arrival.leg - 1 in ghosts]
        heapq.heapify(self._arrivals)
        self._waiting: list[deque[_Taken]] = [deque() for _ in range(stages)]
        self._free_at = [-math.inf] * stages
        self._stall_keeps = [0.0] * stages
        self._last_arrival = [-math.inf] * (stages + 1)

    # Messages

    def send(self, frame: Frame, now: float) -> None:
        """Raises RingLost."""
        if self.lost is not None:
            raise self.lost
        self._post(0, Parcel(frame), now)

    def next_due(self) -> float | None:
        """When something will happen next; None: nothing will, unless a frame is sent."""
        arrival = self._arrivals[0].when if self._arrivals else math.inf
        strike = self._faults.next_at
        due = arrival if strike is None else min(arrival, strike)
        return due if math.isfinite(due) else None

    def advance(self, now: float) -> tuple[Reply | RingLost, ...]:
        """Lets everything happen that is due, and returns what reaches the coordinator."""
        outcomes: list[Reply | RingLost] = []
        while (due := self.next_due()) is not None and due <= now:
            if due == self._faults.next_at:
                strike = self._faults.pop_timed()
                if isinstance(strike, TakeAt):
                    outcomes.append(self.give_away())
                    continue
                for stage in strike.stages:
                    self._kill(stage, strike.keeps, due + strike.noticed_s)
                continue
            outcome = self._arrive(heapq.heappop(self._arrivals))
            if outcome is not None:
                outcomes.append(outcome)
        return tuple(outcomes)

    def _post(self, leg: int, message: Parcel | Reply, when: float) -> None:
        faults = self._faults.of_leg(leg, self._sent[leg])
        self._sent[leg] += 1
        if any(isinstance(fault, Drop) for fault in faults):
            return
        when += sum(fault.seconds for fault in faults if isinstance(fault, Delay))
        when = max(when, self._last_arrival[leg])
        late = sum(fault.seconds for fault in faults if isinstance(fault, Reorder))
        if not late:
            self._last_arrival[leg] = when
        for _ in range(1 + sum(isinstance(fault, Duplicate) for fault in faults)):
            self._push(leg, message, when + late)

    def _push(self, leg: int, message: Parcel | Reply | _Wake | _Notice, when: float) -> None:
        if math.isfinite(when):
            heapq.heappush(self._arrivals, _Arrival(when, self._order, leg, message))
            self._order += 1

    def _arrive(self, arrival: _Arrival) -> Reply | RingLost | None:
        match arrival.message:
            case Reply():
                return arrival.message if self.lost is None else None
            case _Notice(stage):
                return self._notice(stage)
            case _Wake(stage):
                self._wake(stage, arrival.when)
            case Parcel():
                if arrival.leg not in self.dead:
                    faults = self._stage_faults(arrival.leg, arrival.message.frame)
                    self._take(arrival.leg, _Taken(arrival.message, faults, arrival.when))
        return None

    def _stage_faults(self, stage: int, frame: Frame) -> tuple[StageFault, ...]:
        nth = self._reached[stage]
        self._reached[stage] += 1
        return self._faults.of_stage(stage, nth, frame)

    def kill(self, stage: int, now: float) -> None:
        """The stage dies, with all that it kept, and it is known at once."""
        self._kill(stage, 0.0, now)

    def give_away(self) -> RingLost:
        """Somebody else has the ring from now on."""
        self.lost = RingTaken(None, "another gateway has it (scripted)")
        return RingTaken(None, self.lost.reason)

    def hold_up(self, stage: int, until: float) -> None:
        """What reaches the stage before then waits."""
        self._free_at[stage] = max(self._free_at[stage], until)

    def _kill(self, stage: int, keeps: float, noticed_at: float) -> None:
        if stage not in self.dead:
            self.dead[stage] = keeps
            self._push(stage, _Notice(stage), noticed_at)

    def _notice(self, stage: int) -> RingLost | None:
        if self.lost is not None:
            return None
        self.lost = RingLost(stage, "died (scripted)")
        return RingLost(stage, "died (scripted)")

    # Stages

    def _take(self, stage: int, taken: _Taken) -> None:
        """Now, or behind those that wait."""
        queue = self._waiting[stage]
        if not queue and self._free_at[stage] <= taken.since:
            self._serve(stage, taken, taken.since)
            return
        queue.append(taken)
        if len(queue) == 1:
            self._push(stage, _Wake(stage), self._free_at[stage])

    def _wake(self, stage: int, now: float) -> None:
        queue = self._waiting[stage]
        if stage in self.dead or not queue:
            return
        self._serve(stage, queue.popleft(), now)
        if queue:
            self._push(stage, _Wake(stage), self._free_at[stage])

    def _serve(self, index: int, taken: _Taken, now: float) -> None:
        lose = next((fault for fault in taken.faults if isinstance(fault, Lose)), None)
        if lose is None or lose.passes_on:
            self._compute(index, taken, now)
        if lose is not None:
            self._kill(index, lose.keeps, now + lose.noticed_s)

    def _compute(self, index: int, taken: _Taken, now: float) -> None:
        """Rows change at once: nothing can look at them before they are done, but at rest."""
        stage, stalls = self.stages[index], [f for f in taken.faults if isinstance(f, Stall)]
        done = stage.handle(taken.parcel, taken.faults)
        stalled = sum(fault.seconds for fault in stalls)
        self._stall_keeps[index] = max((fault.keeps for fault in stalls), default=0.0)
        self._free_at[index] = now + stalled
        if done is None:
            return
        compute = self._pace.step_s + self._pace.row_s * taken.parcel.frame.rows
        self._free_at[index] += compute
        timing = StageTiming(index, queue_s=now - taken.since + stalled, compute_s=compute)
        done = replace(done, timings=(*done.timings, timing))
        is_tail = index == len(self.stages) - 1
        self._post(index + 1, stage.reply(done) if is_tail else done, self._free_at[index])
