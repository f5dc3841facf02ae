"""The scheduler: a pure state machine, events in, actions out. No awaits, no clock, no randomness.

Decides which segments the next frame carries, what a reply means, and what follows a refusal. It
keeps the ledger replica: a frame is applied here when it is sent, so the replica is ahead of the
stages by exactly the frames in flight. Invariant: a frame that the replica refuses is never sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from coordinator.admission import Admission
from coordinator.batch import Batch, Filler
from coordinator.config import SchedulerSettings
from coordinator.costs import Costs
from coordinator.counts import Counter, RingCounts
from coordinator.errors import (
    BrokenInvariant,
    QueueFull,
    RingserveError,
    RingUnavailable,
    StageLost,
)
from coordinator.events import (
    Action,
    Drafted,
    Emit,
    EpochOpened,
    Event,
    Fail,
    JobEnded,
    JobSatisfied,
    NextKnown,
    NodeDropped,
    OpenEpoch,
    PrefixPinned,
    ReplyArrived,
    ReplyOverdue,
    RingDown,
    Send,
    SessionClosed,
    Submitted,
    story_line,
)
from coordinator.fairness import FairQueue
from coordinator.foresight import Foresight
from coordinator.frames import (
    Epoch,
    Frame,
    JobId,
    Refusal,
    RefusalCode,
    Reply,
    Segment,
    SegmentKind,
    SegmentReply,
    Seq,
    StoreNodes,
)
from coordinator.jobs import Job, Phase
from coordinator.ledger import Ledger, Standing
from coordinator.requests import Finished, FinishReason, Request, Started
from coordinator.retention import Retention
from coordinator.ring import RingInfo

# Frames in flight beyond one a stage, so that no stage waits for the coordinator's turn-around.
_SPARE_FRAMES = 1

# Refused again and again, or epoch after epoch without a good reply: starting over does not mend that.
_MAX_REFUSALS = 8
_MAX_BARREN_EPOCHS = 3

_STORY_EVENTS = 30


class Scheduler:
    """Drives one ring. `on` is the only way in; what it returns must be carried out in order."""

    def __init__(self, ring: str, info: RingInfo, settings: SchedulerSettings) -> None:
        self._ring = ring
        self._info = info
        self._settings = settings
        self.ledger = Ledger(info.lanes, info.max_rows, state_rows=info.state_rows)
        self.retention = Retention(info, settings, self.ledger)
        self._admission = Admission(info, settings, self.ledger, self.retention)
        self.lanes = self._admission.lanes
        self._jobs: dict[JobId, Job] = {}  # with a lane, in the order of their admission
        self._queue = FairQueue()
        self._in_flight: dict[Seq, Frame] = {}  # oldest first
        self._epoch_open = True
        self._down: str | None = None
        self._barren_epochs = 0
        self._costs = Costs(info.stages)
        self._foresight = Foresight(self.ledger, self.lanes, settings, info)
        self._filler = Filler(info, settings, self._costs, self._admission.memos)
        self._counter = Counter(info.stages)
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
        return len(self._admission.pasts)

    @property
    def down(self) -> str | None:
        """Why the ring takes no jobs, if it takes none."""
        return self._down

    @property
    def counts(self) -> RingCounts:
        return self._counter.totals

    def usable_prefix(self, prompt: Sequence[int], tenant: str = "") -> int:
        """How many of the prompt's first tokens need no computing here. Changes nothing."""
        return self._admission.usable_prefix(prompt, tenant)

    @property
    def oldest_in_flight(self) -> Seq | None:
        return next(iter(self._in_flight), None)

    def admissible(self, request: Request) -> None:
        """Raises what a submission of this request would be refused with; capacity decides, not load."""
        if self._down is not None:
            raise RingUnavailable(self._down)
        self._admission.check(request)
        if self.waiting >= self._settings.queue_limit:
            raise QueueFull(waiting=self.waiting, retry_after_s=1.0)

    # Events

    def on(self, event: Event) -> list[Action]:
        self._story.append(story_line(event))
        self._actions = []
        match event:
            case Submitted():
                self._submit(event)
            case JobEnded(job, error):
                self._end_job(job, error)
            case JobSatisfied(job, now):
                self._satisfy(job, now)
            case ReplyArrived(reply, now):
                self._reply(reply, now)
            case ReplyOverdue(epoch, seq):
                if epoch == self.ledger.epoch and seq == self.oldest_in_flight:
                    self._end_epoch(f"no reply to frame {seq}", event.now)
            case EpochOpened(epoch):
                self._epoch_open = epoch == self.ledger.epoch
            case RingDown(reason):
                self._ring_down(reason)
            case Drafted():
                pass  # the frame that waited for it is made below
            case SessionClosed(session):
                self._admission.close_session(session)
                self._foresight.forget(session)
            case NextKnown(wish):
                self._foresight.wish(wish)
            case PrefixPinned(prefix, tenant):
                self._store(self.retention.pin(prefix, tenant) if self._epoch_open else None)
            case NodeDropped(node):
                self.retention.index.lose([node])
        self._pump(event.now)
        return self._actions

    def _submit(self, event: Submitted) -> None:
        self.admissible(event.request)
        self._queue.push(self._admission.job_of(event))
        self._foresight.forget(event.request.session)

    def _end_job(self, job_id: JobId, error: RingserveError) -> None:
        job = self._jobs.get(job_id)
        if job is not None:
            self._release(job)
            self._actions.append(Fail(job_id, error))
            return
        if self._queue.remove(job_id) is not None:
            self._actions.append(Fail(job_id, error))

    def _satisfy(self, job_id: JobId, now: float) -> None:
        job = self._jobs.get(job_id)
        if job is not None:
            self._finish(job, FinishReason.STOP, now)
        elif (waiting := self._queue.remove(job_id)) is not None:
            self._tell_end(waiting, FinishReason.STOP, now)

    def _finish(self, job: Job, reason: FinishReason, now: float) -> None:
        self._release(job)
        self._tell_end(job, reason, now)

    def _tell_end(self, job: Job, reason: FinishReason, now: float) -> None:
        self._actions.append(Emit(job.id, Finished(reason, job.usage(), job.timings(now))))

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
        self.retention.answered(frame, reply)
        self._counter.answered(frame, reply)
        self._costs.learn(frame, reply, {job.phase for job in self._jobs.values()})
        answers = {answer.lane: answer for answer in reply.segments}
        for segment in frame.segments:
            job = self._jobs.get(segment.job)
            if job is None and reply.refusal_of(segment.lane) is not None:
                self._foresight.refused(segment.lane)
            if job is not None and job.expects(reply.seq):
                self._answer(job, segment, answers.get(segment.lane), reply, now)

    def _answer(
        self, job: Job, segment: Segment, answer: SegmentReply | None, reply: Reply, now: float
    ) -> None:
        refusal = reply.refusal_of(segment.lane)
        if refusal is not None:
            if segment.memo is not None:
                self.ledger.memos.drop(segment.memo)
            self._refused(job, refusal, reply)
            return
        if answer is None or len(answer.tokens) != len(segment.sampled_rows):
            self._end_epoch(f"reply {reply.seq} lacks tokens of lane {segment.lane}", now)
            return
        self._announce(job)
        delta = job.answer(answer, self.ledger.next_seq, now)
        if delta is not None:
            self._actions.append(Emit(job.id, delta))
        reason = job.finish_reason
        if delta is not None and reason is not None:
            self._finish(job, reason, now)

    def _announce(self, job: Job) -> None:
        """Tells the client what is reused, once the stages have accepted the lane's opening."""
        if job.announced:
            return
        job.announced = True
        self._counter.admitted(job)
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
        self._admission.reopen(job)

    def _end_epoch(self, reason: str, now: float) -> None:
        """Voids every row. Jobs keep their tokens and are prefilled again, oldest first."""
        self._barren_epochs += 1
        if self._barren_epochs > _MAX_BARREN_EPOCHS:
            self._ring_down(
                f"{self._barren_epochs} epochs without a good reply; the last: {reason}"
            )
            return
        self.retention.voided(self._in_flight.values())
        for job in reversed(self._jobs.values()):
            job.requeue()
            self._queue.push_front(job)
        self._jobs.clear()
        self._in_flight.clear()
        self.lanes.clear()
        self._epoch_open = False
        self.ledger.reset(Epoch(self.ledger.epoch + 1))
        self._actions.append(OpenEpoch(self.ledger.epoch, reason))

    def _release(self, job: Job) -> None:
        del self._jobs[job.id]
        # Frames that still speculate for a job that has ended are as void as those of a failed guess.
        still_out = job.in_flight if job.phase is Phase.DECODE else 0
        self._counter.ended(job, discarded_frames=job.discarded + still_out)
        self._foresight.ended(job.request, job.cached_prefix)
        self._admission.leave(job)

    def _pump(self, now: float) -> None:
        while self._epoch_open and self._computing < self._flight_limit():
            jobs = tuple(self._jobs.values())
            self._admission.refresh(jobs)
            with self.retention.held(op for job in jobs for op in job.ops):
                batch = self._filler.fill(jobs, partial(self._admit, now), now)
            if batch.segments:
                self._send(batch)
            elif not batch.failed:
                break
            for job, error in batch.failed:
                self._end_job(job, error)
        if self._epoch_open and not self._jobs and not self._queue and not self._in_flight:
            self._work_ahead()

    @property
    def _computing(self) -> int:
        """Frames in flight that stages compute rows for; others cost no time to speak of."""
        return sum(bool(frame.segments) for frame in self._in_flight.values())

    def _flight_limit(self) -> int:
        """A spare frame hides the turn-around; beside a decoding job it would be one more to wait for."""
        phases = {job.phase for job in self._jobs.values()}
        mixed = len(phases) > 1 or (Phase.DECODE in phases and len(self._queue) > 0)
        return self._info.stages + (0 if mixed else _SPARE_FRAMES)

    def _admit(self, now: float) -> Job | None:
        """Gives the next waiting job a lane, if one is free."""
        if self.lanes.busy == self._info.lanes:
            return None
        for job in self._queue.heads():
            alone = not self._jobs and len(self._queue) == 1
            running = self._jobs.values()
            if self._admission.seat(job, running, now, alone=alone, store=self._store):
                self._queue.take(job)
                self._jobs[job.id] = job
                return job
        return None

    def _work_ahead(self) -> None:
        """What is worth doing while nobody waits: one frame at a time, since somebody may come."""
        step = self._foresight.next_step()
        if step is not None and not self._info.exact:
            self.retention.forget_behind(step.segment.lane, step.segment.start)
        else:
            self._store(self.retention.at_leisure())
        if step is not None and not self._in_flight:
            epoch, seq = self.ledger.epoch, self.ledger.next_seq
            self._dispatch(step.frame(epoch, seq, alone=self._info.lends_cores))
            self._counter.computed_ahead(step.segment.width)
            if step.completes:
                self._admission.foreseen(step.wish, step.segment.lane)

    def _is_alone(self, batch: Batch) -> bool:
        """Whether the whole ring waits for this frame: the last chunk of the only job's prompt."""
        segment = batch.segments[0]
        ends_prompt = segment.kind is SegmentKind.PREFILL and segment.sampling is not None
        only = len(self._jobs) == 1 and not self._in_flight and not self._queue
        return self._info.lends_cores and only and ends_prompt

    def _send(self, batch: Batch) -> None:
        jobs = [(self._jobs[segment.job], segment) for segment in batch.segments]
        with self.retention.held(batch.ops):
            after = self.retention.passing_all(jobs)
        drops, alone = self.retention.drops(), self._is_alone(batch)
        frame = batch.frame(self.ledger.epoch, self.ledger.next_seq, drops, after, alone=alone)
        self._dispatch(frame)
        for segment in frame.segments:
            self._jobs[segment.job].sent(segment, frame.seq)

    def _store(self, op: StoreNodes | None) -> None:
        """A frame of its own, without rows."""
        drops = self.retention.drops()
        if op is not None or drops:
            after = () if op is None else (op,)
            self._dispatch(Frame(self.ledger.epoch, self.ledger.next_seq, ops=drops, after=after))

    def _dispatch(self, frame: Frame) -> None:
        applied = self.ledger.apply(frame)
        if applied.standing is not Standing.NEW or applied.refusals or applied.lost:
            raise BrokenInvariant(
                f"the replica refuses its own frame: {applied}", tuple(self._story)
            )
        self.retention.sent(frame)
        self._in_flight[frame.seq] = frame
        self._actions.append(Send(frame))
