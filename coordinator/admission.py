"""Gives jobs their lanes and takes them back: where a job starts, what opens its lane, how its prompt is cut.

Decides by the ledger replica and changes nothing in it: the frame that carries the opening does. A prefix is taken
when the job really gets its lane, so a job that waits holds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from coordinator.config import SchedulerSettings
from coordinator.cuts import even_cuts, planned_cuts
from coordinator.errors import ContextTooLong, InvalidValue
from coordinator.events import Submitted
from coordinator.foresight import Wish
from coordinator.frames import CopyRows, LaneId, LoadNodes, NodeId, Op, OpenLane, StoreNodes
from coordinator.jobs import Job
from coordinator.lanes import LaneChoice, LaneTable
from coordinator.ledger import Ledger
from coordinator.memos import MemoSlots
from coordinator.misses import SessionPasts
from coordinator.prefixes import digest_of
from coordinator.requests import Miss, MissKind, Request, SessionId
from coordinator.retention import Retention
from coordinator.ring import RingInfo

Store = Callable[[StoreNodes], None]


class Admission:
    def __init__(
        self, info: RingInfo, settings: SchedulerSettings, ledger: Ledger, retention: Retention
    ) -> None:
        self._info = info
        self._settings = settings
        self._ledger = ledger
        self._retention = retention
        self.lanes = LaneTable(ledger, settings.min_copy_rows)
        self.pasts = SessionPasts(settings.session_limit)
        self.memos = MemoSlots(ledger.memos, info.memos, info.lanes)

    def check(self, request: Request) -> None:
        """Raises what no waiting would change."""
        if len(request.prompt) >= self._info.max_rows:
            raise ContextTooLong(prompt_tokens=len(request.prompt), limit=self._info.max_rows)
        if min(request.prompt) < 0 or max(request.prompt) >= self._info.vocab_size:
            raise InvalidValue("prompt", f"token ids must be in [0, {self._info.vocab_size})")

    def job_of(self, submitted: Submitted) -> Job:
        """The job that waits for a lane from now on."""
        request = submitted.request
        return Job(
            submitted.job,
            request,
            submitted.now,
            self._info.max_rows,
            submitted.drafter,
            self._info.state_rows,
            self._retention.root(request.tenant),
        )

    def seat(
        self, job: Job, running: Iterable[Job], now: float, *, alone: bool, store: Store
    ) -> bool:
        """Gives a waiting job a lane; False while none is idle, or while it does better to wait.

        `alone`: no other job runs or waits. `store` sends what is to be kept of the rows that the lane loses.
        """
        if job.request.reuse and self._should_wait(job, running):
            return False
        session = job.request.session
        reuse, most = job.request.reuse, self._most(job)
        choice = self.lanes.choose(job.context, session, reuse=reuse, most=most, root=job.root)
        if choice is None:
            return False
        self._rescue(choice, store)
        choice = self._deepen(job, choice, most)
        if not job.announced and job.request.reuse:
            job.miss = self.pasts.miss(
                job.request,
                cached_prefix=choice.cached_prefix,
                epoch=self._ledger.epoch,
                root=job.root,
                held=self._held_without_state(job),
            )
        self.lanes.take(choice, job.id, session)
        self._retention.taken(choice.lane, job)
        job.lane = choice.lane
        job.admitted_at = job.admitted_at if job.admitted_at is not None else now
        self._open(job, choice, alone=alone)
        return True

    def _held_without_state(self, job: Job) -> int:
        """Rows of the prompt that lack a state to go on from: only recurrent layers know such."""
        if not self._info.state_rows:
            return 0
        return self._retention.held_in_lanes(job.context, job.root)

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
        return longest > self._usable_prefix(job.context, job.root)

    def reopen(self, job: Job) -> None:
        """The job's lane was refused: start over from what the replica still believes of it."""
        assert job.lane is not None
        most = self._most(job) if job.request.reuse else 0
        depth = self._ledger.restore_point(job.lane, job.context, most, job.root)
        choice = self._deepen(job, LaneChoice(job.lane, depth), most)
        self.lanes.reopened(choice.lane, choice.cached_prefix)
        # A memo that is gone costs a row, which is none of the session's.
        promised = min(job.cached_prefix, len(job.context) - 1)
        if not job.announced and choice.cached_prefix < promised:
            # Of what came from the store a node was gone; else a stage did not hold what it should.
            job.miss = Miss(MissKind.EVICTED if job.restored_rows else MissKind.RING_LOST)
        self._open(job, choice)

    def _most(self, job: Job) -> int:
        """How many rows may be reused: all but one, whose logits seed decoding, unless those were kept."""
        known = job.request.reuse and self.memos.recall(job.context, job.root) is not None
        return len(job.context) - (0 if known else 1)

    def usable_prefix(self, prompt: Sequence[int], tenant: str) -> int:
        """The deepest depth of a tenant's prompt that a lane or a chain of nodes holds. Changes nothing."""
        return self._usable_prefix(prompt, self._retention.root(tenant))

    def unheld(self, request: Request, context: Sequence[int]) -> int:
        """How many of the context's tokens would have to be computed for the request now."""
        if not request.reuse:
            return len(context)
        return len(context) - self.usable_prefix(context, request.tenant)

    def _usable_prefix(self, prompt: Sequence[int], root: NodeId) -> int:
        held = self._retention.index.match(prompt, root).rows
        return max(self.lanes.usable_prefix(prompt, root), min(held, len(prompt) - 1))

    def _rescue(self, choice: LaneChoice, store: Store) -> None:
        kept = 0 if choice.copy_from is not None else choice.cached_prefix
        op = self._retention.rescue(choice.lane, kept)
        if op is not None:
            store(op)

    def _deepen(self, job: Job, choice: LaneChoice, most: int) -> LaneChoice:
        """Chain nodes instead, where they hold enough more of the context's first `most` rows than lanes do."""
        if not job.request.reuse:
            return choice
        match = self._retention.index.match(job.context[:most], job.root)
        if match.rows - choice.cached_prefix < self._settings.min_copy_rows:
            return choice
        self._retention.index.use(match.nodes)
        return LaneChoice(choice.lane, match.rows, nodes=match.nodes)

    def leave(self, job: Job) -> None:
        """The job has ended; what it wrote stays in its lane and stays true."""
        assert job.lane is not None
        self.lanes.release(job.lane)
        self._retention.left(job.lane)
        if job.request.session is not None:
            context = job.context[: job.true_rows]
            self.pasts.ended(job.request.session, context, self._ledger.epoch, job.root)

    def refresh(self, jobs: Iterable[Job]) -> None:
        """What a job was to be opened from may be gone before its frame is sent."""
        for job in jobs:
            known = self.memos.recall(job.context, job.root) if job.recall is not None else None
            if known != job.recall or self._retention.is_stale(job.ops):
                self.reopen(job)

    def foreseen(self, wish: Wish, lane: LaneId) -> None:
        """The lane holds what the session's next prompt begins with: that is what it may expect to reuse."""
        self.pasts.ended(wish.session, wish.tokens, self._ledger.epoch, self._ledger.root(lane))
        self._retention.left(lane)

    def close_session(self, session: SessionId) -> None:
        self.lanes.disown(session)
        self.pasts.forget(session)

    def _open(self, job: Job, choice: LaneChoice, *, alone: bool = False) -> None:
        depth = choice.cached_prefix
        opening: tuple[Op, ...] = (
            OpenLane(choice.lane, job.id, depth, digest_of(job.context[:depth]), job.root),
        )
        if choice.copy_from is not None:
            opening = (CopyRows(choice.copy_from, choice.lane, depth), *opening)
        elif choice.nodes:
            opening = (self._load(choice, job.context[:depth], job.root), *opening)
        job.restore_points = self._restore_points(job, depth)
        whole = depth == len(job.context)
        recall = self.memos.recall(job.context, job.root) if whole else None
        job.open(depth, opening, self._cuts(job, depth, alone), recall)

    def _restore_points(self, job: Job, start: int) -> tuple[int, ...]:
        """Where a later prompt may part from this one: behind the head, before the last message, at the very end."""
        if not self._info.state_rows:
            return ()
        request = job.request
        last_message = request.boundaries[-2:-1]
        # A row before the end: to go on from there, one row has to be computed.
        points = {request.anchor, *last_message, len(request.prompt) - 1}
        return tuple(sorted(point for point in points if start < point < len(job.context)))

    def _load(self, choice: LaneChoice, context: Sequence[int], root: NodeId) -> LoadNodes:
        """Only the rows that the lane does not hold by chance."""
        start = min(self._ledger.usable_prefix(choice.lane, context, root), len(context) - 1)
        nodes = [n for n in choice.nodes if self._retention.index.node(n).end > start]
        return LoadNodes(choice.lane, start, len(context), tuple(nodes))

    def _cuts(self, job: Job, start: int, alone: bool) -> tuple[int, ...]:
        settings, end = self._settings, len(job.context)
        if not self._info.exact:
            return planned_cuts(settings, end, job.request.boundaries)
        if alone and self._info.lends_cores and end - start <= settings.frame_rows:
            # One chunk on all cores, stage after stage, beats chunks on a core each that fill and drain the ring.
            cuts: tuple[int, ...] = (end,)
        else:
            cuts = even_cuts(start, end, stages=self._info.stages, chunk_rows=settings.chunk_rows)
        # The last restore point is near enough to the end to be reached from there.
        return tuple(sorted({*cuts, *(p for p in job.restore_points if p < end - 1)}))
