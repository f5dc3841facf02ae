"""The fake ring's synchronous core: stages, the legs between them, and virtual time.

It decides when a message arrives and which fault meets it. It has no clock, no tasks and no randomness: times
come in with each call, so a pure scheduler can be driven with it step by step. Same calls, same outcome.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coordinator.errors import InvalidSetting, RingLost
from coordinator.frames import Epoch, Frame, Reply, StageTiming
from fakering.faults import (
    Delay,
    Drop,
    Duplicate,
    FaultScript,
    Lose,
    Pending,
    Reorder,
    StageFault,
    Stall,
)
from fakering.model import FakeModel
from fakering.stages import FakeStage, Parcel

# Each row of each stage takes 16 bytes, and a lane as much as this many rows beside its own.
_MAX_ROWS_IN_ALL = 100_000_000
_ROWS_OF_A_LANE = 32


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


@dataclass(frozen=True, slots=True, order=True)
class _Arrival:
    when: float
    order: int  # of sending: equal times arrive in this order
    leg: int = field(compare=False)
    message: Parcel | Reply = field(compare=False)


class Network:
    """Frames in by `send`, replies out by `advance`. A lost ring stays lost until `rebuild`. Raises InvalidSetting."""

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
    ) -> None:
        """`host_rows`: rows that each stage's store takes; `state_rows`: as in RingInfo."""
        check_sizes(stages, lanes, max_rows)
        self.lost: RingLost | None = None
        self._shape = (stages, lanes, max_rows)
        self._host_rows = host_rows
        self._state_rows = state_rows
        self._model = model
        self._faults = Pending(faults)
        self._pace = pace or Pace()
        self._sent = [0] * (stages + 1)
        self._reached = [0] * stages
        self._order = 0
        self.rebuild()

    def rebuild(self) -> None:
        """New stages with nothing in them, at epoch 0. Faults that happened do not happen again."""
        stages, lanes, max_rows = self._shape
        self.lost = None
        self.stages = [
            FakeStage(index, lanes, max_rows, self._model, self._host_rows, self._state_rows)
            for index in range(stages)
        ]
        self._forget_messages()

    def open_epoch(self, epoch: Epoch) -> None:
        """All rows are void, and whatever is on its way is dropped. Raises RingLost."""
        if self.lost is not None:
            raise self.lost
        for stage in self.stages:
            stage.open_epoch(epoch)
        self._forget_messages()

    def send(self, frame: Frame, now: float) -> None:
        """Raises RingLost."""
        if self.lost is not None:
            raise self.lost
        self._post(0, Parcel(frame), now)

    def next_due(self) -> float | None:
        """When something will happen next; None: nothing will, unless a frame is sent."""
        return self._arrivals[0].when if self._arrivals else None

    def advance(self, now: float) -> tuple[Reply | RingLost, ...]:
        """Lets everything happen that is due, and returns what reaches the coordinator."""
        outcomes: list[Reply | RingLost] = []
        while self._arrivals and self._arrivals[0].when <= now:
            arrival = heapq.heappop(self._arrivals)
            outcome = self._arrive(arrival)
            if outcome is not None:
                outcomes.append(outcome)
        return tuple(outcomes)

    def _forget_messages(self) -> None:
        self._arrivals: list[_Arrival] = []
        self._free_at = [-math.inf] * len(self.stages)
        self._last_arrival = [-math.inf] * (len(self.stages) + 1)

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

    def _push(self, leg: int, message: Parcel | Reply, when: float) -> None:
        if math.isfinite(when):
            heapq.heappush(self._arrivals, _Arrival(when, self._order, leg, message))
            self._order += 1

    def _arrive(self, arrival: _Arrival) -> Reply | RingLost | None:
        if isinstance(arrival.message, Reply):
            return arrival.message
        faults = self._stage_faults(arrival.leg, arrival.message.frame)
        if any(isinstance(fault, Lose) for fault in faults):
            return self._lose(arrival.leg)
        self._serve(self.stages[arrival.leg], arrival.message, arrival.when, faults)
        return None

    def _stage_faults(self, stage: int, frame: Frame) -> tuple[StageFault, ...]:
        nth = self._reached[stage]
        self._reached[stage] += 1
        return self._faults.of_stage(stage, nth, frame)

    def _lose(self, stage: int) -> RingLost:
        self.lost = RingLost(stage, "died (scripted)")
        self._forget_messages()
        return self.lost

    def _serve(
        self, stage: FakeStage, parcel: Parcel, now: float, faults: Sequence[StageFault]
    ) -> None:
        # A stage takes frames in the order of their arrival, so its rows may change now although
        # it computes later: nothing can look at them in between.
        done = stage.handle(parcel, faults)
        stalled = sum(fault.seconds for fault in faults if isinstance(fault, Stall))
        begin = max(now, self._free_at[stage.index]) + stalled
        self._free_at[stage.index] = begin
        if done is None:
            return
        compute = self._pace.step_s + self._pace.row_s * parcel.frame.rows
        self._free_at[stage.index] = begin + compute
        timing = StageTiming(stage.index, queue_s=begin - now, compute_s=compute)
        done = replace(done, timings=(*done.timings, timing))
        is_tail = stage.index == len(self.stages) - 1
        message = stage.reply(done) if is_tail else done
        self._post(stage.index + 1, message, begin + compute)
