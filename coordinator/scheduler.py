"""The scheduler: a pure state machine, events in, actions out. No awaits, no clock, no randomness.

Decides which segments the next frame carries, what a reply means, and what follows a refusal. It
keeps the ledger replica: a frame is applied here when it is sent, so the replica is ahead of the
stages by exactly the frames in flight. Invariant: a frame that the replica refuses is never sent.
"""

from __future__ import annotations

import math
from collections import deque

from coordinator.batch import Batch
from coordinator.config import SchedulerSettings
from coordinator.cuts import cut_plan, even_cuts
from coordinator.errors import (
    BrokenInvariant,
    ContextTooLong,
    InvalidValue,
    QueueFull,
    RingserveError,
    RingUnavailable,
    StageLost,
)
from coordinator.events import (
    Action,
    Emit,
    EpochOpened,
    Event,
    Fail,
    JobEnded,
    OpenEpoch,
    ReplyArrived,
    ReplyOverdue,
    RingDown,
    Send,
    SessionClosed,
    Submitted,
)
from coordinator.frames import (
    CopyRows,
    Epoch,
    Frame,
    JobId,
    LaneId,
    Op,
    OpenLane,
    Refusal,
    RefusalCode,
    Reply,
    Segment,
    SegmentReply,
    Seq,
)
from coordinator.jobs import Job, Phase
from coordinator.lanes import LaneChoice, LaneTable
from coordinator.ledger import Ledger, Standing, digest_of
from coordinator.misses import SessionLengths
from coordinator.requests import Finished, Miss, Request, Started
from coordinator.ring import RingInfo

# Frames in flight beyond one a stage, so that no stage waits for the coordinator's turn-around.
_SPARE_FRAMES = 1

# A job whose lane is refused again and again, or a ring that ends epoch after epoch without one
# good reply, is broken in a way that starting over does not mend.
_MAX_REFUSALS = 8
_MAX_BARREN_EPOCHS = 3

_STORY_EVENTS = 30


class Scheduler:
    """Drives one ring. `on` is the only way in; what it returns must be carried out in order."""

    def __init__(self, ring: str, info: RingInfo, settings: SchedulerSettings) -> None:
        self._ring = ring
        self._info = info
        self._settings = settings
        self.ledger = Ledger(info.lanes, info.max_rows)
        self.lanes = LaneTable(self.ledger, settings.min_copy_rows)
        self._lengths = SessionLengths(settings.session_limit)
        self._jobs: dict[JobId, Job] = {}  # with a lane, in the order of their admission
        self._queue: deque[Job] = deque()
        self._in_flight: dict[Seq, Frame] = {}  # oldest first
        self._epoch_open = True
        self._down: str | None = None
        self._barren_epochs = 0
        self._story: deque[str] = deque(maxlen=_STORY_EVENTS)
        self._actions: list[Action] = []

    # What a caller may ask

    @property
    def running(self) -> int:
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def sessions(self) -> int:
        return len(self._lengths)

    @property
    def down(self) -> str | None:
        """Why the ring takes no jobs, if it takes none."""
        return self._down

    @property
    def oldest_in_flight(self) -> Seq | None:
        return next(iter(self._in_flight), None)

    def admissible(self, request: Request) -> None:
        """Raises what a submission of this request would be refused with; capacity decides, not
        load.
        """
        if self._down is not None:
            raise RingUnavailable(self._down)
        if len(request.prompt) >= self._info.max_rows:
            raise ContextTooLong(prompt_tokens=len(request.prompt), limit=self._info.max_rows)
        beyond = max(request.prompt)
        if min(request.prompt) < 0 or beyond >= self._info.vocab_size:
            raise InvalidValue("prompt", f"token ids must be in [0, {self._info.vocab_size})")
        if self.waiting >= self._settings.queue_limit:
            raise QueueFull(waiting=self.waiting, retry_after_s=1.0)

    # Events

    def on(self, event: Event) -> list[Action]:
        self._story.append(_line(event))
        self._actions = []
        match event:
            case Submitted():
                self._submit(event)
            case JobEnded(job, error):
                self._end_job(job, error)
            case ReplyArrived(reply, now):
                self._reply(reply, now)
            case ReplyOverdue(epoch, seq):
                if epoch == self.ledger.epoch and seq == self.oldest_in_flight:
                    self._end_epoch(f"no reply to frame {seq}", event.now)
            case EpochOpened(epoch):
                self._epoch_open = epoch == self.ledger.epoch
            case RingDown(reason):
                self._ring_down(reason)
            case SessionClosed(session):
                self.lanes.disown(session)
                self._lengths.forget(session)
        self._pump(event.now)
        return self._actions

    def _submit(self, event: Submitted) -> None:
        self.admissible(event.request)
        job = Job(event.job, event.request, event.now, self._info.max_rows)
        self._queue.append(job)

    def _end_job(self, job_id: JobId, error: RingserveError) -> None:
        job = self._jobs.get(job_id)
        if job is not None:
            self._release(job)
            self._actions.append(Fail(job_id, error))
            return
        for waiting in self._queue:
            if waiting.id == job_id:
                self._queue.remove(waiting)
                self._actions.append(Fail(job_id, error))
                return

    def _ring_down(self, reason: str) -> None:
        self._down, self._epoch_open = reason, False
        for job in (*self._jobs.values(), *self._queue):
            self._actions.append(Fail(job.id, StageLost(reason)))
        self._jobs.clear()
        self._queue.clear()
        self._in_flight.clear()
        self.lanes.clear()

    # Replies

    def _reply(self, reply: Reply, now: float) -> None:
        if reply.epoch != self.ledger.epoch or reply.seq not in self._in_flight:
            return
        if reply.seq != self.oldest_in_flight:
            self._end_epoch(f"reply {reply.seq} came before {self.oldest_in_flight}", now)
            return
        frame = self._in_flight.pop(reply.seq)
        for refusal in reply.refusals:
            if refusal.lane is None:
                self._end_epoch(
                    f"frame {reply.seq} was refused: {refusal.code} {refusal.detail}", now
                )
                return
        self._barren_epochs = 0
        answers = {answer.lane: answer for answer in reply.segments}
        for segment in frame.segments:
            job = self._jobs.get(segment.job)
            if job is not None and job.expects(reply.seq):
                self._answer(job, segment, answers.get(segment.lane), reply, now)

    def _answer(
        self, job: Job, segment: Segment, answer: SegmentReply | None, reply: Reply, now: float
    ) -> None:
        refusal = _refusal_of(segment.lane, reply)
        if refusal is not None:
            self._refused(job, refusal, reply)
            return
        if answer is None or len(answer.tokens) != len(segment.sampled_rows):
            self._end_epoch(f"reply {reply.seq} lacks tokens of lane {segment.lane}", now)
            return
        self._announce(job)
        delta = job.answer(segment, answer, now)
        if delta is not None:
            self._actions.append(Emit(job.id, delta))
        reason = job.finish_reason
        if delta is not None and reason is not None:
            self._release(job)
            finished = Finished(reason, job.usage(), job.timings(now))
            self._actions.append(Emit(job.id, finished))

    def _announce(self, job: Job) -> None:
        """Tells the client what is reused, once the stages have accepted the lane's opening."""
        if job.announced:
            return
        job.announced = True
        assert job.lane is not None
        started = Started(self._ring, job.lane, job.prompt_tokens, job.cached_prefix, job.miss)
        self._actions.append(Emit(job.id, started))

    def _refused(self, job: Job, refusal: Refusal, reply: Reply) -> None:
        """A stage lacks what we believed: fall back to what all stages hold, and go on."""
        assert job.lane is not None
        job.refusals += 1
        if job.refusals > _MAX_REFUSALS:
            lane = job.lane
            self._release(job)
            message = f"lane {lane} was refused {job.refusals} times: {refusal.detail}"
            self._actions.append(Fail(job.id, BrokenInvariant(message, tuple(self._story))))
            return
        held = next((rows.valid_rows for rows in reply.lanes if rows.lane == job.lane), 0)
        trusted = refusal.code is RefusalCode.KV_GAP and job.refusals == 1
        self.ledger.truncate(job.lane, held if trusted else 0)
        depth = self.ledger.usable_prefix(job.lane, job.context[:-1])
        job.open(depth, (self._opening(job, job.lane, depth),), self._cuts(job, depth))

    def _end_epoch(self, reason: str, now: float) -> None:
        """Voids every row. Jobs keep their tokens and are prefilled again, oldest first."""
        self._barren_epochs += 1
        if self._barren_epochs > _MAX_BARREN_EPOCHS:
            self._ring_down(
                f"{self._barren_epochs} epochs without a good reply; the last: {reason}"
            )
            return
        for job in reversed(self._jobs.values()):
            job.requeue()
            self._queue.appendleft(job)
        self._jobs.clear()
        self._in_flight.clear()
        self.lanes.clear()
        self._epoch_open = False
        self.ledger.reset(Epoch(self.ledger.epoch + 1))
        self._actions.append(OpenEpoch(self.ledger.epoch, reason))

    def _release(self, job: Job) -> None:
        """The job leaves its lane; what it wrote stays there and stays true."""
        assert job.lane is not None
        del self._jobs[job.id]
        self.lanes.release(job.lane)
        if job.request.session is not None:
            self._lengths.ended(job.request.session, job.true_rows, self.ledger.epoch)

    # Frames

    def _pump(self, now: float) -> None:
        limit = self._info.stages + _SPARE_FRAMES
        while self._epoch_open and len(self._in_flight) < limit:
            batch = self._next_batch(now)
            if not batch.segments:
                return
            self._send(batch)

    def _next_batch(self, now: float) -> Batch:
        """Decoding first, then prefill chunks in the order of admission, then at most one newcomer.

        One newcomer a frame: its lane is chosen by the replica, which knows only frames that were
        sent.
        """
        batch = Batch(self._settings.frame_rows)
        decoding = [job for job in self._jobs.values() if job.phase is Phase.DECODE]
        ready = [job for job in decoding if job.wants_verify]
        # Not all in one frame: while one stage computes these, the other needs some too.
        for job in ready[: math.ceil(len(decoding) / self._info.stages)]:
            batch.add(job, job.verify_segment(self._settings.max_drafts))
        for job in self._jobs.values():
            if job.wants_prefill and batch.room > 0:
                batch.add(job, job.prefill_segment(batch.room))
        if batch.room > 0 and self._queue:
            newcomer = self._admit(now)
            if newcomer is not None:
                batch.add(newcomer, newcomer.prefill_segment(batch.room))
        return batch

    def _admit(self, now: float) -> Job | None:
        """Gives the first waiting job a lane, if one is free."""
        job = self._queue[0]
        session = job.request.session
        choice = self.lanes.choose(job.context, session, reuse=job.request.reuse)
        if choice is None:
            return None
        self._queue.popleft()
        if not job.announced:
            job.miss = self._miss(job, choice)
        self.lanes.take(choice, job.id, session)
        job.lane = choice.lane
        job.admitted_at = job.admitted_at if job.admitted_at is not None else now
        cuts = self._cuts(job, choice.cached_prefix)
        job.open(choice.cached_prefix, self._openings(job, choice), cuts)
        self._jobs[job.id] = job
        return job

    def _cuts(self, job: Job, start: int) -> tuple[int, ...]:
        settings, end = self._settings, len(job.context)
        if self._info.exact:
            return even_cuts(start, end, stages=self._info.stages, chunk_rows=settings.chunk_rows)
        return cut_plan(
            end,
            job.request.boundaries,
            chunk_rows=settings.chunk_rows,
            min_chunk_rows=settings.min_chunk_rows,
        )

    def _openings(self, job: Job, choice: LaneChoice) -> tuple[Op, ...]:
        if choice.copy_from is None:
            return (self._opening(job, choice.lane, choice.cached_prefix),)
        copy = CopyRows(choice.copy_from, choice.lane, choice.cached_prefix)
        return (copy, self._opening(job, choice.lane, choice.cached_prefix))

    def _opening(self, job: Job, lane: LaneId, cached_prefix: int) -> OpenLane:
        return OpenLane(lane, job.id, cached_prefix, digest_of(job.context[:cached_prefix]))

    def _miss(self, job: Job, choice: LaneChoice) -> Miss | None:
        request = job.request
        if not request.reuse:
            return None
        return self._lengths.miss(
            request,
            cached_prefix=choice.cached_prefix,
            epoch=self.ledger.epoch,
            has_lane=request.session is not None
            and self.lanes.lane_of(request.session) is not None,
        )

    def _send(self, batch: Batch) -> None:
        frame = batch.frame(self.ledger.epoch, self.ledger.next_seq)
        applied = self.ledger.apply(frame)
        if applied.standing is not Standing.NEW or applied.refusals:
            raise BrokenInvariant(
                f"the replica refuses its own frame: {applied}", tuple(self._story)
            )
        for segment in frame.segments:
            self._jobs[segment.job].sent(segment, frame.seq)
        self._in_flight[frame.seq] = frame
        self._actions.append(Send(frame))


def _refusal_of(lane: LaneId, reply: Reply) -> Refusal | None:
    return next((refusal for refusal in reply.refusals if refusal.lane == lane), None)


def _line(event: Event) -> str:
    """One line of the story: what happened, without a prompt's tokens."""
    match event:
        case Submitted(job, request, now):
            return f"{now:.3f} submitted job={job} tokens={len(request.prompt)}"
        case ReplyArrived(reply, now):
            refused = ",".join(refusal.code for refusal in reply.refusals) or "-"
            return f"{now:.3f} reply epoch={reply.epoch} seq={reply.seq} refused={refused}"
    return f"{event.now:.3f} {event}"
