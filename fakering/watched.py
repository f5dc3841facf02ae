"""A fake ring under observation: it awaits wherever the port lets a ring await, and sees what its stages keep and load.

It changes nothing that a coordinator could tell. Whoever watches decides what it means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coordinator.clock import Clock
from coordinator.frames import DropNodes, Epoch, LaneId, LoadNodes, NodeId, Seq
from coordinator.held import Holding
from coordinator.ring import ProgressSink, RingInfo
from fakering.faults import Fault, Pending, StageFault
from fakering.model import FakeModel
from fakering.ring import FakeRing
from fakering.stages import FakeStage, Parcel


class WatchedRing(FakeRing):
    def __init__(
        self,
        stages: int,
        lanes: int,
        max_rows: int,
        *,
        clock: Clock,
        language: FakeModel,
        host_rows: int,
        step_s: float,
        row_s: float,
    ) -> None:
        super().__init__(
            stages,
            lanes,
            max_rows,
            vocab_size=language.vocab_size,
            clock=clock,
            step_s=step_s,
            row_s=row_s,
            language=language,
            host_rows=host_rows,
        )
        self.loads = 0  # that all stages served
        self.breaches: list[str] = []
        self.harmed: set[NodeId] = set()  # what a stage lost unasked, since it was emptied last
        self._served: dict[tuple[Epoch, Seq, LaneId], int] = {}  # by how many stages

    async def start(self, progress: ProgressSink) -> RingInfo:
        await asyncio.sleep(0)
        info = await super().start(progress)
        for stage in self.network.stages:
            self._watch(stage)
        await asyncio.sleep(0)
        return info

    async def open_epoch(self, epoch: Epoch) -> Holding:
        await asyncio.sleep(0)
        before = tuple(self.network.stages)
        held = await super().open_epoch(epoch)
        for stage in self.network.stages:
            if stage not in before:
                self._watch(stage)
        await asyncio.sleep(0)
        return held

    async def stop(self) -> None:
        await asyncio.sleep(0)
        await super().stop()

    def suffer(self, faults: Sequence[Fault]) -> None:
        """From now on, in place of what was to come: messages and frames are counted anew."""
        network, stages = self.network, len(self.network.stages)
        network._faults = Pending(tuple(faults))
        network._sent, network._reached = [0] * (stages + 1), [0] * stages

    def kept_somewhere(self) -> set[NodeId]:
        return set().union(*(stage.kept for stage in self.network.stages))

    def kept_everywhere(self) -> set[NodeId]:
        return set.intersection(*(set(stage.kept) for stage in self.network.stages))

    def _watch(self, stage: FakeStage) -> None:
        handle = stage.handle

        def watched(parcel: Parcel, faults: Sequence[StageFault] = ()) -> Parcel | None:
            before = set(stage.kept)
            passed = handle(parcel, faults)
            drops = [op for op in parcel.frame.ops if isinstance(op, DropNodes)]
            self.harmed |= before - stage.kept.keys() - {n for op in drops for n in op.nodes}
            if passed is not None:
                self._see_loads(stage.index, passed)
            return passed

        stage.handle = watched  # type: ignore[method-assign]

    def _see_loads(self, stage: int, parcel: Parcel) -> None:
        frame = parcel.frame
        refused = {refusal.lane for refusal in parcel.refusals}
        for op in frame.ops:
            if not isinstance(op, LoadNodes) or refused & {None, op.lane}:
                continue
            key = (frame.epoch, frame.seq, op.lane)
            self._served[key] = self._served.get(key, 0) + 1
            if stage + 1 < len(self.network.stages):
                continue
            self.loads += 1
            if self._served[key] <= stage:
                self.breaches.append(f"{self._served[key]} stages served the load of {key}")
