"""One frame being filled: segments and the ops that go before them, under a row budget."""

from __future__ import annotations

from coordinator.frames import Epoch, Frame, Op, Segment, Seq
from coordinator.jobs import Job


class Batch:
    """`whole_chunks`: a chunk is taken as the cut plan made it or not at all, for rings whose rows
    depend on the cuts; else it is cut to the room that is left.
    """

    def __init__(self, rows: int, *, whole_chunks: bool) -> None:
        self.room = rows
        self.segments: list[Segment] = []
        self._rows = 0
        self._ops: list[Op] = []
        self._whole_chunks = whole_chunks

    def limit(self, rows: int) -> None:
        """Leaves room for at most so many rows in all, and for one in any case: nobody may wait for
        ever.
        """
        self.room = min(self.room, max(rows - self._rows, 1))

    def add(self, job: Job, segment: Segment) -> None:
        self._ops.extend(job.ops)
        self.segments.append(segment)
        self._rows += segment.width
        self.room -= segment.width

    def add_prefill(self, job: Job, rows: int) -> None:
        """The job's next chunk, cut to `rows` or what room there is."""
        budget = None if self._whole_chunks else min(rows, self.room)
        self.add(job, job.prefill_segment(budget))

    def frame(self, epoch: Epoch, seq: Seq, *, alone: bool) -> Frame:
        return Frame(epoch, seq, tuple(self._ops), tuple(self.segments), alone)
