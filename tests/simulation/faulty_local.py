"""A ring of threads that suffers a script of faults: messages between its stages are lost, doubled, late or overtaken,
and stages die or stall. For tests.

Decides when a fault strikes; what follows is the ring's own business. It also looks on when an epoch opens.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from coordinator.frames import Epoch, LaneId
from coordinator.held import NOTHING, Holding
from coordinator.ring import ProgressSink, RingInfo
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
from stage.local_ring import LocalRing
from stage.messages import FrameMessage, ReplyMessage
from stage.stage import Stage, Waited

Message = FrameMessage | ReplyMessage
Send = Callable[[Message], None]


class Died(Exception):
    """What a stage raises that is told to."""


class _Leg:
    """One leg's messages, on their way through the faults that meet them. Any thread may send."""

    def __init__(self, ring: FaultyRing, leg: int, send: Send) -> None:
        self._ring = ring
        self._leg = leg
        self._send = send
        self._lock = threading.Lock()
        self._held: list[Message] | None = None

    def send(self, message: Message) -> None:
        faults = self._ring.meets(self._leg)
        if any(isinstance(fault, Drop) for fault in faults):
            return
        with self._lock:
            for fault in faults:
                if isinstance(fault, Reorder):
                    self._ring.later(fault.seconds, lambda: self._send(message))
                    return
                if isinstance(fault, Delay) and self._held is None:
                    self._held = []
                    self._ring.later(fault.seconds, self._let_go)
            for _ in range(1 + sum(isinstance(fault, Duplicate) for fault in faults)):
                if self._held is None:
                    self._send(message)
                else:
                    self._held.append(message)

    def _let_go(self) -> None:
        with self._lock:
            held, self._held = self._held, None
            for message in held or ():
                self._send(message)


class FaultyRing(LocalRing):
    """Stays when its driver stops; the next driver's start takes it over as it is."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.struck: list[str] = []
        self.breaches: list[str] = []
        self.opened = 0
        self._epoch = Epoch(0)
        self._lock = threading.Lock()
        self._timers: list[threading.Timer] = []
        self._had: dict[int, Holding] = {}  # each stage, when the last epoch ended
        self.suffer(())

    @property
    def stages(self) -> int:
        return self._config.stages

    def whole_stages(self) -> list[Stage]:
        return [stage for stage in self._stages if stage is not None]

    def suffer(self, faults: FaultScript) -> None:
        """From now on, in place of what was to come: messages and frames are counted anew."""
        stages = self._config.stages
        with self._lock:
            self._faults = Pending(faults)
            self._sent, self._reached = [0] * (stages + 1), [0] * stages

    async def start(self, progress: ProgressSink) -> RingInfo:
        if self._info is None:
            return await super().start(progress)
        held = await self.open_epoch(Epoch(self._epoch + 1))
        return replace(self.capacity(), epoch=self._epoch, held=held)

    async def stop(self) -> None:
        """Its driver is gone."""
        if self._info is None:
            await super().stop()

    async def end(self) -> None:
        self.settle()
        await super().stop()

    async def empty(self) -> None:
        """Nothing is held by any stage any more."""
        self.suffer(())
        self.settle()
        await self.open_epoch(Epoch(self._epoch + 1))
        await self._rest()
        for stage in self.whole_stages():
            stage.open_epoch(self._epoch, NOTHING)
            assert len(stage.store) == 0
        held = await self.open_epoch(Epoch(self._epoch + 1))
        assert not any(len(lane.tokens) for lane in held.lanes)
        assert held.nodes == ()

    def settle(self) -> None:
        """Whatever was to come late has come."""
        timers, self._timers = self._timers, []
        for timer in timers:
            timer.join()

    async def open_epoch(self, epoch: Epoch) -> Holding:
        self._had.clear()
        held = await super().open_epoch(epoch)
        self._epoch = epoch
        self.opened += 1
        try:
            _check_agreed(list(self._had.values()), held)
            for stage in self.whole_stages():
                _check_opened(stage, held)
        except AssertionError as breach:
            # A driver's task that dies of it would be missed by nobody.
            self.breaches.append(f"epoch {epoch}: {breach}")
        return held

    # Called by legs and stages

    def meets(self, leg: int) -> Sequence[Any]:
        with self._lock:
            nth = self._sent[leg]
            self._sent[leg] += 1
            return self._noted(self._faults.of_leg(leg, nth))

    def befalls(self, stage: int, message: FrameMessage) -> Sequence[StageFault]:
        with self._lock:
            nth = self._reached[stage]
            self._reached[stage] += 1
            return self._noted(self._faults.of_stage(stage, nth, message.frame))

    def _noted(self, faults: Any) -> Any:
        self.struck.extend(f"epoch {self._epoch}: {fault}" for fault in faults)
        return faults

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _run(self, stages: Sequence[Stage]) -> None:
        super()._run(stages)
        # Threads wait for their first message by now: none has been sent.
        outlet = self._threads[-1]._outlet
        outlet.send = _Leg(self, len(stages), outlet.send).send
        for leg, thread in enumerate(self._threads):
            thread.inlet.send = _Leg(self, leg, thread.inlet.send).send
        for stage in stages:
            if "process" not in vars(stage):
                stage.process = self._mortal(stage)

    async def _whole(self, index: int) -> Stage:
        stage = await super()._whole(index)
        if "holding" not in vars(stage):
            stage.holding = self._heard(stage)
        return stage

    def _heard(self, stage: Stage) -> Callable[[], Holding]:
        holding = stage.holding

        def heard() -> Holding:
            self._had[stage.index] = holding()
            return self._had[stage.index]

        return heard

    def _mortal(self, stage: Stage) -> Callable[..., Any]:
        process = stage.process

        def mortal(message: Any, *waited: Waited) -> Any:
            faults = self.befalls(stage.index, message) if isinstance(message, FrameMessage) else ()
            for fault in faults:
                if isinstance(fault, Stall):
                    time.sleep(fault.seconds)
                elif isinstance(fault, Lose) and not fault.passes_on:
                    _die(stage)
            outcome = process(message, *waited)
            if any(isinstance(fault, Lose) for fault in faults):
                _die(stage)
            return outcome

        return mortal


def _die(stage: Stage) -> None:
    """In the middle of a frame: its rows are not what its ledger says."""
    for lane in range(stage.ledger.lanes):
        stage.model.rows.clear(lane, 0)
    raise Died(f"stage {stage.index}")


def _check_agreed(had: Sequence[Holding], held: Holding) -> None:
    """Of each lane the first rows that all have: all of them, unless the states to go on from are missing."""
    for number, lane in enumerate(held.lanes):
        where = f"lane {number}: not what all stages have"
        lanes = [each.lane(number) for each in had]
        columns = zip(*(each.tokens for each in lanes), strict=False)
        shared = len(list(itertools.takewhile(lambda column: len(set(column)) == 1, columns)))
        if len({each.root for each in lanes}) > 1 or shared < max(each.first for each in lanes):
            shared = 0
        assert list(lane.tokens) == list(lanes[0].tokens[:shared]), where
    everywhere = set.intersection(*({node.id for node in each.nodes} for each in had))
    assert {node.id for node in held.nodes} <= everywhere, "nodes that not all stages have"


def _check_opened(stage: Stage, held: Holding) -> None:
    """The stage begins the epoch with just this, and has the bytes of all of it."""
    ledger = stage.ledger
    has = ledger.holding()
    for lane in map(LaneId, range(ledger.lanes)):
        assert has.lane(lane) == held.lane(lane), (
            f"stage {stage.index} begins with another lane {lane}"
        )
    assert set(ledger.nodes.ids()) == {node.id for node in held.nodes}, "other nodes"
    assert has.checkpoints == held.checkpoints, "other checkpoints"
    assert not stage.store.missing(ledger.nodes.ids()), "bytes are missing"
    assert len(stage.store) == len(held.nodes), "bytes of other nodes"
    assert len(stage._ops._checkpoints) == len(held.checkpoints), "states of other nodes"
