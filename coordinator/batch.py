"""What the next frame carries: segments and the ops that go before them, under a row budget.

Decides how a frame's room is shared between jobs. It neither sends nor admits: whoever has a lane is asked in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from coordinator.config import SchedulerSettings
from coordinator.costs import Costs
from coordinator.errors import ConstraintFailed
from coordinator.frames import Epoch, Frame, JobId, Op, Segment, SegmentKind, Seq, StoreNodes
from coordinator.jobs import Job, Phase
from coordinator.memos import MemoSlots
from coordinator.ring import RingInfo
from coordinator.speculation import plan_speculation


class Batch:
    """`whole_chunks`: a chunk is taken as the cut plan made it or not at all, for rings whose rows
    depend on the cuts; else it is cut to the room that is left.
    """

    def __init__(self, rows: int, memos: MemoSlots, *, whole_chunks: bool) -> None:
        self.room = rows
        self._memos = memos
        self.segments: list[Segment] = []
        self.failed: list[tuple[JobId, ConstraintFailed]] = []
        self._rows = 0
        self.ops: list[Op] = []
        self._whole_chunks = whole_chunks

    def limit(self, rows: int) -> None:
        """Leaves room for at most so many rows in all, and for one in any case: nobody may wait for
        ever.
        """
        self.room = min(self.room, max(rows - self._rows, 1))

    def add(self, job: Job, segment: Segment) -> None:
        self.ops.extend(job.ops)
        self.segments.append(segment)
        self._rows += segment.width
        self.room -= segment.width

    @contextmanager
    def sparing(self, job: Job) -> Iterator[None]:
        """A constraint that fails costs its job; the frame goes without."""
        try:
            yield
        except ConstraintFailed as failed:
            self.failed.append((job.id, failed))

    def add_prefill(self, job: Job, rows: int) -> None:
        """The job's next chunk, cut to `rows` or what room there is."""
        budget = None if self._whole_chunks else min(rows, self.room)
        segment = job.prefill_segment(budget)
        if segment.kind is SegmentKind.PREFILL and segment.sampling is not None:
            segment = replace(segment, memo=self._memos.choose(job.context, job.root))
        self.add(job, segment)

    def frame(
        self,
        epoch: Epoch,
        seq: Seq,
        first: tuple[Op, ...],
        after: Sequence[StoreNodes],
        *,
        alone: bool,
    ) -> Frame:
        """`first`: ops that go before the jobs' own; `after`: behind the segments."""
        ops = (*first, *self.ops)
        return Frame(epoch, seq, ops, tuple(self.segments), alone, tuple(after))


class Filler:
    def __init__(
        self, info: RingInfo, settings: SchedulerSettings, costs: Costs, memos: MemoSlots
    ) -> None:
        self._info = info
        self._memos = memos
        self._settings = settings
        self._costs = costs

    def fill(self, jobs: Collection[Job], admit: Callable[[], Job | None], now: float) -> Batch:
        """Decoding first, then prefill chunks of whoever was served longest ago, then at most one newcomer.

        One newcomer a frame: its lane is chosen by the replica, which knows only frames that were sent.
        """
        rows, whole_chunks = self._settings.frame_rows, not self._info.exact
        jobs = [job for job in jobs if not job.rests]
        batch = Batch(rows, self._memos, whole_chunks=whole_chunks)
        decoding = [job for job in jobs if job.phase is Phase.DECODE]
        self._add_verifies(batch, decoding, len(jobs), now)
        if decoding:
            stretch = self._settings.max_stretch
            batch.limit(self._costs.stretched_rows(stretch, len(decoding)))
        if batch.room > 0:
            prefilling = [job for job in jobs if job.wants_prefill]
            self._add_prefills(batch, prefilling, admit())
        return batch

    def _add_prefills(self, batch: Batch, prefilling: Sequence[Job], newcomer: Job | None) -> None:
        """Equal shares of the room; where that is too little to share, whoever was served longest ago."""
        waiting = sorted(prefilling, key=lambda job: job.served)
        if newcomer is not None:
            waiting.insert(0, newcomer)
        for place, job in enumerate(waiting):
            if batch.room < 1:
                return
            share = batch.room // (len(waiting) - place)
            with batch.sparing(job):
                batch.add_prefill(job, max(share, self._settings.min_chunk_rows))

    def _add_verifies(self, batch: Batch, decoding: Sequence[Job], n_jobs: int, now: float) -> None:
        # Not all in one frame: while one stage computes these, the other needs some too.
        share = math.ceil(len(decoding) / self._info.stages)
        widest = max(1, self._settings.frame_rows // max(share, 1))
        for job in decoding:
            if len(batch.segments) >= share:
                return
            plan = plan_speculation(
                job.drafts_right.rate,
                call_rows=self._costs.frames.call_rows,
                jobs=n_jobs,
                stages=self._info.stages,
                max_width=min(self._settings.max_drafts + 1, widest),
                draft_rows=self._costs.frames.rows_in(job.draft_time.per_token_s),
            )
            with batch.sparing(job):
                segment = job.verify_segment(plan, now)
                if segment is not None:
                    batch.add(job, segment)
