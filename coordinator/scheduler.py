"""The scheduler: a pure state machine, events in, actions out. No awaits, no clock, no randomness.

Decides which segments the next frame carries, what a reply means, and what follows a refusal. It
keeps the ledger replica: a frame is applied here when it is sent, so the replica is ahead of the
stages by exactly the frames in flight. Invariant: a frame that the replica refuses is never sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from coordinator import events, readers
from coordinator.admission import Admission
from coordinator.applied import Standing
from coordinator.batch import Batch, Filler
from coordinator.config import SchedulerSettings
from coordinator.costs import Costs
from coordinator.counts import Counter, RingCounts
from coordinator.errors import BrokenInvariant, RingserveError, RingUnavailable, StageLost
from coordinator.fairness import FairQueue
from coordinator.flight import Flight
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
from coordinator.held import Holding
from coordinator.jobs import Job, Phase
from coordinator.ledger import Ledger
from coordinator.overload import Gate
from coordinator.recovery import Recovery
from coordinator.requests import Finished, FinishReason, Recovering, Request, Started
from coordinator.retention import Retention
from coordinator.ring import RingInfo

# Refused again and again: starting over does not mend that.
_MAX_REFUSALS = 8
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
        self._flight = Flight(info.stages)
        self._epoch_open = False
        self._down: str | None = None
        self._recovery = Recovery(settings)
        self._costs = Costs(info.stages)
        self.gate = Gate(info, settings, self._costs, self._admission.unheld)
        self._foresight = Foresight(self.ledger, self.lanes, settings, info)
        self._filler = Filler(info, settings, self._costs, self._admission.memos)
        self._counter = Counter(info.stages)
        self._story: deque[str] = deque(maxlen=_STORY_EVENTS)
        self._actions: list[events.Action] = []
        self._begin(info.epoch, info.held)

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
    def is_recovering(self) -> bool:
        """Whether its epoch is over and the next one has not begun: jobs wait, and may be submitted."""
        return self._down is None and not self._epoch_open

    @property
    def oldest_in_flight(self) -> Seq | None:
        oldest = self._flight.oldest
        return None if oldest is None else oldest.seq

    @property
    def reply_deadline_s(self) -> float:
        """How long the reply that is due next may take, from when it became the next."""
        oldest = self._flight.oldest
        least_s = self._settings.reply_timeout_s
        return least_s if oldest is None else self._costs.deadline_s(oldest, least_s)

    def admissible(self, request: Request, now: float) -> None:
        """Raises what a submission of this request would be refused with."""
        if self._down is not None:
            raise RingUnavailable(self._down)
        self._admission.check(request)
        self.gate.check(request, self._jobs.values(), tuple(self._queue), now)

    # Events

    def on(self, event: events.Event) -> list[events.Action]:
        self._story.append(events.story_line(event))
        self._actions = []
        match event:
            case events.Submitted():
                self._submit(event)
            case events.JobEnded(job, error):
                self._end_job(job, error)
            case events.JobSatisfied(job, now):
                self._satisfy(job, now)
            case events.ReplyArrived(reply, now):
                self._reply(reply, now)
            case events.ReplyOverdue(epoch, seq):
                if epoch == self.ledger.epoch and seq == self.oldest_in_flight:
                    self._end_epoch(f"no reply to frame {seq}")
            case events.RingBroken(epoch, reason, now, for_good):
                if epoch == self.ledger.epoch and self._epoch_open:
                    self._recovery.broken(now, idle=not self._flight)
                    self._end_epoch(reason, for_good=for_good)
            case events.EpochOpened(epoch, held, now):
                if epoch == self.ledger.epoch and self.is_recovering:
                    self._recovery.opened(now)
                    self._begin(epoch, held)
            case events.EpochFailed(epoch, reason, _, for_good):
                if epoch == self.ledger.epoch and self.is_recovering:
                    self._end_epoch(reason, for_good=for_good)
            case events.RingDown(reason):
                self._ring_down(reason)
            case events.ReaderLags() | events.ReaderCaughtUp():
                self._counter.pauses += readers.mark(event, (*self._jobs.values(), *self._queue))
            case events.Drafted():
                pass  # the frame that waited for it is made below
            case events.SessionClosed(session):
                self._admission.close_session(session)
                self._foresight.forget(session)
            case events.NextKnown(wish):
                self._foresight.wish(wish)
            case events.PrefixPinned(prefix, tenant):
                if self._epoch_open:
                    self._store(self.retention.pin(prefix, tenant))
            case events.NodeDropped(node):
                self.retention.index.lose([node])
        self.gate.healing.look(event.now, heals=self.is_recovering)
        self._pump(event.now)
        return self._actions

    def _submit(self, event: events.Submitted) -> None:
        self.admissible(event.request, event.now)
        self._queue.push(self._admission.job_of(event))
        self._foresight.forget(event.request.session)

    def _end_job(self, job_id: JobId, error: RingserveError) -> None:
        self._counter.failed(error)
        if (job := self._jobs.get(job_id)) is not None:
            self._release(job)
        elif self._queue.remove(job_id) is None:
            return
        self._actions.append(events.Fail(job_id, error))

    def _satisfy(self, job_id: JobId, now: float) -> None:
        if (job := self._jobs.get(job_id)) is not None:
            self._finish(job, FinishReason.STOP, now)
        elif (waiting := self._queue.remove(job_id)) is not None:
            self._tell_end(waiting, FinishReason.STOP, now)

    def _finish(self, job: Job, reason: FinishReason, now: float) -> None:
        self._release(job)
        self.gate.ended(job, now)
        self._tell_end(job, reason, now)

    def _tell_end(self, job: Job, reason: FinishReason, now: float) -> None:
        self._actions.append(events.Emit(job.id, Finished(reason, job.usage(), job.timings(now))))

    def _ring_down(self, reason: str) -> None:
        self._down, self._epoch_open = reason, False
        for job in (*self._jobs.values(), *self._queue):
            self._actions.append(events.Fail(job.id, StageLost(reason)))
        self._jobs.clear()
        self._queue.clear()
        self._flight.clear()
        self.lanes.vacate()

    # Replies

    def _reply(self, reply: Reply, now: float) -> None:
        if reply.epoch != self.ledger.epoch or reply.seq not in self._flight:
            return
        if reply.seq != self.oldest_in_flight:
            self._end_epoch(f"reply {reply.seq} came before {self.oldest_in_flight}")
            return
        for refusal in reply.refusals:
            if refusal.lane is None:
                self._end_epoch(f"frame {reply.seq} was refused: {refusal.code} {refusal.detail}")
                return
        frame = self._flight.take(reply.seq)
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
        if self._epoch_open:
            self._recovery.answered()

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
            self._end_epoch(f"reply {reply.seq} lacks tokens of lane {segment.lane}")
            return
        self._announce(job)
        delta = job.answer(answer, self.ledger.next_seq, now)
        if delta is not None:
            self._actions.append(events.Emit(job.id, delta))
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
        self._actions.append(events.Emit(job.id, started))

    def _refused(self, job: Job, refusal: Refusal, reply: Reply) -> None:
        """A stage lacks what we believed: fall back to what all stages hold, and go on."""
        assert job.lane is not None
        job.refusals += 1
        if job.refusals > _MAX_REFUSALS:
            self._release(job)
            message = f"lane {job.lane} was refused {job.refusals} times: {refusal.detail}"
            self._actions.append(events.Fail(job.id, BrokenInvariant(message, tuple(self._story))))
            return
        held = next((rows.valid_rows for rows in reply.lanes if rows.lane == job.lane), 0)
        trusted = refusal.code is RefusalCode.KV_GAP and job.refusals == 1
        self.ledger.truncate(job.lane, held if trusted else 0)
        self._admission.reopen(job)

    def _end_epoch(self, reason: str, *, for_good: bool = False) -> None:
        """Jobs keep their tokens and wait for lanes again, oldest first. Which rows are left the stages will say."""
        delay_s = None if for_good else self._recovery.next_opening()
        if delay_s is None:
            self._ring_down(reason if for_good else self._recovery.verdict(reason))
            return
        self.retention.voided(self._flight.frames)
        for job in reversed(self._jobs.values()):
            job.requeue()
            if self._recovery.hopeless(job.losses):
                error = StageLost(f"{job.losses} times since this turn's last token: {reason}")
                self._actions.append(events.Fail(job.id, error))
                continue
            self._queue.push_front(job)
            self._actions.append(events.Emit(job.id, Recovering(reason)))
        self._jobs.clear()
        self._flight.clear()
        self.lanes.vacate()
        self._epoch_open, epoch = False, Epoch(self.ledger.epoch + 1)
        self._actions.append(events.OpenEpoch(epoch, reason, delay_s, self.lanes.rows))
        self.ledger.reset(epoch)

    def _begin(self, epoch: Epoch, held: Holding) -> None:
        """Goes on from what every stage holds. Lanes are cut by their next opening where that is not to be trusted."""
        if not self._recovery.trusts_rows:
            held = replace(held, lanes=())
        self.ledger.reset(epoch, held)
        self.gate.begun(self._queue)
        self.retention.resumed(held, self.lanes.forget_empty())
        self._epoch_open = True

    def _release(self, job: Job) -> None:
        del self._jobs[job.id]
        # Frames that still speculate for a job that has ended are as void as those of a failed guess.
        still_out = job.in_flight if job.phase is Phase.DECODE else 0
        self._counter.ended(job, discarded_frames=job.discarded + still_out)
        self._foresight.ended(job.request, job.cached_prefix)
        self._admission.leave(job)

    def _pump(self, now: float) -> None:
        while self._epoch_open and self._has_room():
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
        if self._epoch_open and not self._jobs and not self._queue and not self._flight:
            self._work_ahead()

    def _has_room(self) -> bool:
        phases = {job.phase for job in self._jobs.values() if not job.rests}
        return self._flight.has_room(phases, waiting=len(self._queue) > 0)

    def _admit(self, now: float) -> Job | None:
        """Gives the next waiting job a lane, if one is free."""
        if self.lanes.busy == self._info.lanes:
            return None
        for job in self._queue.heads():
            alone = not self._jobs and len(self._queue) == 1
            if self._admission.seat(job, self._jobs.values(), now, alone=alone, store=self._store):
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
        if step is not None and not self._flight:
            epoch, seq = self.ledger.epoch, self.ledger.next_seq
            self._dispatch(step.frame(epoch, seq, alone=self._info.lends_cores))
            self._counter.computed_ahead(step.segment.width)
            if step.completes:
                self._admission.foreseen(step.wish, step.segment.lane)

    def _is_alone(self, batch: Batch) -> bool:
        """Whether the whole ring waits for this frame: the last chunk of the only job's prompt."""
        segment = batch.segments[0]
        ends_prompt = segment.kind is SegmentKind.PREFILL and segment.sampling is not None
        only = len(self._jobs) == 1 and not self._flight and not self._queue
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
        self._flight.add(frame)
        self._actions.append(events.Send(frame))
