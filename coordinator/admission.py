"""Gives jobs their lanes and takes them back: where a job starts, what opens its lane, how its prompt is cut.

Decides by the ledger replica and changes nothing in it: the frame that carries the opening does. A prefix is taken
when the job really gets its lane, so a job that waits holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.config import SchedulerSettings
from coordinator.cuts import cut_plan, even_cuts
from coordinator.frames import CopyRows, Op, OpenLane
from coordinator.jobs import Job
from coordinator.lanes import LaneChoice, LaneTable
from coordinator.ledger import Ledger, digest_of
from coordinator.misses import SessionLengths
from coordinator.requests import Miss, MissKind, SessionId
from coordinator.ring import RingInfo


class Admission:
    def __init__(self, info: RingInfo, settings: SchedulerSettings, ledger: Ledger) -> None:
        self._info = info
        self._settings = settings
        self._ledger = ledger
        self.lanes = LaneTable(ledger, settings.min_copy_rows)
        self.lengths = SessionLengths(settings.session_limit)

    def seat(self, job: Job, running: Iterable[Job], now: float, *, alone: bool) -> bool:
        """Gives a waiting job a lane; False while none is idle, or while it does better to wait.

        `alone`: no other job runs or waits.
        """
        if job.request.reuse and self._should_wait(job, running):
            return False
        session = job.request.session
        choice = self.lanes.choose(job.context, session, reuse=job.request.reuse)
        if choice is None:
            return False
        if not job.announced:
            job.miss = self._miss(job, choice)
        self.lanes.take(choice, job.id, session)
        job.lane = choice.lane
        job.admitted_at = job.admitted_at if job.admitted_at is not None else now
        self._open(job, choice, alone=alone)
        return True

    def _should_wait(self, job: Job, running: Iterable[Job]) -> bool:
        """Another job is prefilling rows that this one could copy: to prefill them twice helps neither.

        Sessions that start together share the head of tools and system prompt, which is most of them.
        """
        last = len(job.context) - 1
        coming = [
            min(job.shared_prefix(other), last)
            for other in running
            if other.wants_prefill and min(job.shared_prefix(other), last) > other.cursor
        ]
        longest = max(coming, default=0)
        if longest < self._settings.min_copy_rows:
            return False
        return longest > self.lanes.usable_prefix(job.context)

    def reopen(self, job: Job) -> None:
        """The job's lane was refused: start over from what the replica still believes of it."""
        assert job.lane is not None
        # One token is always computed, to go on decoding.
        depth = self._ledger.usable_prefix(job.lane, job.context[:-1])
        if not job.announced and depth < job.cached_prefix:
            job.miss = Miss(MissKind.RING_LOST)
        self._open(job, LaneChoice(job.lane, depth))

    def leave(self, job: Job) -> None:
        """The job has ended; what it wrote stays in its lane and stays true."""
        assert job.lane is not None
        self.lanes.release(job.lane)
        if job.request.session is not None:
            self.lengths.ended(job.request.session, job.true_rows, self._ledger.epoch)

    def close_session(self, session: SessionId) -> None:
        self.lanes.disown(session)
        self.lengths.forget(session)

    def _open(self, job: Job, choice: LaneChoice, *, alone: bool = False) -> None:
        depth = choice.cached_prefix
        opening: tuple[Op, ...] = (
            OpenLane(choice.lane, job.id, depth, digest_of(job.context[:depth])),
        )
        if choice.copy_from is not None:
            opening = (CopyRows(choice.copy_from, choice.lane, depth), *opening)
        job.open(depth, opening, self._cuts(job, depth, alone))

    def _cuts(self, job: Job, start: int, alone: bool) -> tuple[int, ...]:
        settings, end = self._settings, len(job.context)
        if alone and self._info.lends_cores and end - start <= settings.frame_rows:
            # One chunk on all cores, stage after stage, beats chunks on a core each that fill and drain the ring.
            return (end,)
        if self._info.exact:
            return even_cuts(start, end, stages=self._info.stages, chunk_rows=settings.chunk_rows)
        return cut_plan(
            end,
            job.request.boundaries,
            chunk_rows=settings.chunk_rows,
            min_chunk_rows=settings.min_chunk_rows,
        )

    def _miss(self, job: Job, choice: LaneChoice) -> Miss | None:
        request, session = job.request, job.request.session
        if not request.reuse:
            return None
        return self.lengths.miss(
            request,
            cached_prefix=choice.cached_prefix,
            epoch=self._ledger.epoch,
            has_lane=session is not None and self.lanes.lane_of(session) is not None,
        )
