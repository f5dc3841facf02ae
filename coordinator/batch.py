"""One frame being filled: segments and the ops that go before them, under a row budget."""

from __future__ import annotations

from coordinator.frames import Epoch, Frame, Op, Segment, Seq
from coordinator.jobs import Job


class Batch:
    def __init__(self, rows: int) -> None:
        self.room = rows
        self.segments: list[Segment] = []
        self._ops: list[Op] = []

    def add(self, job: Job, segment: Segment) -> None:
        self._ops.extend(job.ops)
        self.segments.append(segment)
        self.room -= segment.width

    def frame(self, epoch: Epoch, seq: Seq) -> Frame:
        return Frame(epoch, seq, tuple(self._ops), tuple(self.segments))
