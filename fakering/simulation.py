"""A whole coordinator core over a fake network in virtual time, without asyncio: what a fuzzer
runs.

Feeds the real scheduler, carries out its actions on the network, and holds every stream against the
oracle after each event. It decides nothing of its own: same plan, same faults, same run. Breaches
raise SimulationFailed.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coordinator.config import SchedulerSettings
from coordinator.drafters.ngram import NgramDrafter
from coordinator.drafters.none import NoDrafter
from coordinator.errors import Cancelled, ConstraintFailed, RingLost, RingserveError
from coordinator.events import (
    Action,
    Emit,
    EpochOpened,
    Event,
    Fail,
    JobEnded,
    NextKnown,
    OpenEpoch,
    ReplyArrived,
    ReplyOverdue,
    RingBroken,
    Send,
    Submitted,
)
from coordinator.foresight import Wish
from coordinator.frames import Epoch, JobId, LaneId, Reply, Seq
from coordinator.nodes import root_of
from coordinator.requests import Finished, Request, SamplingSpec, SessionId, Started, TokenDelta
from coordinator.scheduler import Scheduler
from fakering.faults import FaultScript
from fakering.model import FakeModel
from fakering.network import Network, Pace
from fakering.owners import Crossed, Owners
from fakering.ring import describe
from fakering.toys import ToyConstraint, random_toy

_MAX_EVENTS = (
    20_000  # a run of 8 jobs takes some hundreds; more means that it goes round in circles
)


class SimulationFailed(AssertionError):
    """An invariant was broken. The message names it; the seed that led here is the caller's to
    print.
    """


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A turn to play. With `follows`, its prompt is that job's prompt and answer, then `prompt`; with `again`,
    just that job's prompt.
    """

    at_s: float
    prompt: tuple[int, ...]
    session: str | None = None
    follows: int | None = None
    again: bool = False
    max_new_tokens: int = 12
    seed: int | None = None  # None: greedy
    draft: bool = True
    cancel_after_s: float | None = None
    constraint: ToyConstraint | None = None
    # When it has finished, the session's next prompt is known to begin with so much of its own prompt and answer,
    # and with these tokens behind it. None: nothing is known.
    next_keeps: int | None = None
    next_adds: tuple[int, ...] = ()
    tenant: str = ""


@dataclass(slots=True)
class PlayedJob:
    """What became of it. `started` is the last word on what was reused."""

    request: Request
    expected: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    started: Started | None = None
    finished: Finished | None = None
    error: RingserveError | None = None

    @property
    def ended(self) -> bool:
        return self.finished is not None or self.error is not None


@dataclass(frozen=True, slots=True, order=True)
class _Due:
    when: float
    order: int
    what: PlannedJob | JobId | Epoch | tuple[Epoch, Seq] = field(compare=False)
    job: JobId | None = field(compare=False, default=None)


class Simulation:
    def __init__(
        self,
        plan: Sequence[PlannedJob],
        model: FakeModel,
        *,
        stages: int = 2,
        lanes: int = 3,
        max_rows: int = 96,
        exact: bool = True,
        host_rows: int = 0,
        state_rows: int = 0,
        checkpoints: int = 0,
        settings: SchedulerSettings,
        faults: FaultScript = (),
        end_tokens: frozenset[int] = frozenset(),
    ) -> None:
        described = describe("fake", model, stages, lanes, max_rows)
        self.info = replace(
            described,
            exact=exact,
            host_rows=host_rows,
            state_rows=state_rows,
            checkpoints=checkpoints,
        )
        pace = Pace(0.01, 0.001)
        self.network = Network(stages, lanes, max_rows, model, faults, pace, host_rows, state_rows)
        self.scheduler = Scheduler("sim", self.info, settings)
        self.jobs: dict[JobId, PlayedJob] = {}
        tenants = {JobId(index): planned.tenant for index, planned in enumerate(plan)}
        roots = {root_of(described.model_fingerprint, t): t for t in set(tenants.values())}
        self._owners = Owners(lanes, tenants, roots)
        self.refusals = 0
        self.epochs = 0
        self.now = 0.0
        self._plan = plan
        self._model = model
        self.faults = faults
        self._end_tokens = end_tokens
        self._due: list[_Due] = []
        self._order = 0
        self._events: deque[Event] = deque()
        self._watched: tuple[Epoch, Seq] | None = None
        for index, planned in enumerate(plan):
            self._later(planned.at_s, planned, JobId(index))

    def run(self) -> None:
        """Plays everything to its end and checks the invariants after every event."""
        try:
            for _ in range(_MAX_EVENTS):
                if not self._step():
                    break
            else:
                raise SimulationFailed("the run goes on for ever")
        except Crossed as crossed:
            raise SimulationFailed(f"at {self.now:.3f} s: {crossed}") from crossed
        for job in self.jobs.values():
            self._require(job.ended, "a job never ended")
        self._require(self.scheduler.lanes.busy == 0, "a lane is still busy")
        self._require(self.scheduler.waiting == 0, "a job still waits")

    def _step(self) -> bool:
        network_due = self.network.next_due()
        own_due = self._due[0].when if self._due else None
        if network_due is None and own_due is None:
            return False
        if own_due is None or (network_due is not None and network_due <= own_due):
            assert network_due is not None
            self.now = max(self.now, network_due)
            for outcome in self.network.advance(self.now):
                self._outcome(outcome)
        else:
            due = heapq.heappop(self._due)
            self.now = max(self.now, due.when)
            self._happen(due)
        self._check()
        return True

    def _outcome(self, outcome: Reply | RingLost) -> None:
        if isinstance(outcome, RingLost):
            self._feed(RingBroken(self.scheduler.ledger.epoch, str(outcome), self.now))
            return
        self.refusals += len(outcome.refusals)
        self._require(bool(self.faults) or not outcome.refusals, f"refused: {outcome.refusals}")
        self._require(bool(self.faults) or not outcome.lost, "a node was lost without a fault")
        self._feed(ReplyArrived(outcome, self.now))

    def _happen(self, due: _Due) -> None:
        match due.what:
            case PlannedJob():
                assert due.job is not None
                self._submit(due.what, due.job)
            case (epoch, seq):
                self._feed(ReplyOverdue(epoch, seq, self.now))
            case int() if due.job is not None:
                if not self.jobs[due.job].ended:
                    self._feed(JobEnded(due.job, Cancelled(), self.now))
            case epoch:
                self._open_epoch(Epoch(epoch))

    def _open_epoch(self, epoch: Epoch) -> None:
        held = self.network.open_epoch(epoch)
        self._owners.new_epoch(held)
        self._feed(EpochOpened(epoch, held, self.now))

    def _submit(self, planned: PlannedJob, job: JobId) -> None:
        before: tuple[int, ...] = ()
        if planned.follows is not None:
            earlier = self.jobs.get(JobId(planned.follows))
            if (
                earlier is None or not earlier.ended
            ):  # a client sends its next turn when the last one has ended
                self._later(self.now + 0.05, planned, job)
                return
            before = earlier.request.prompt
            if not planned.again:
                before = (*before, *earlier.tokens)
        request = self._request(planned, before)
        self.jobs[job] = PlayedJob(request, self._oracle(request))
        try:
            self.scheduler.admissible(request)
        except RingserveError as refused:
            self.jobs[job].error = refused
            return
        drafter = NgramDrafter() if request.draft else NoDrafter()
        self._feed(Submitted(job, request, drafter, self.now))
        if planned.cancel_after_s is not None:
            self._later(self.now + planned.cancel_after_s, job, job)

    def _request(self, planned: PlannedJob, before: tuple[int, ...]) -> Request:
        sampling = SamplingSpec(temperature=0.0)
        if planned.seed is not None:
            sampling = SamplingSpec(temperature=0.8, seed=planned.seed)
        return Request(
            prompt=(*before, *planned.prompt),
            sampling=sampling,
            max_new_tokens=planned.max_new_tokens,
            stop_tokens=self._end_tokens,
            session=SessionId(planned.session) if planned.session is not None else None,
            draft=planned.draft,
            tenant=planned.tenant,
            constraint=planned.constraint,
        )

    def _feed(self, event: Event) -> None:
        self._events.append(event)
        while self._events:
            for action in self.scheduler.on(self._events.popleft()):
                self._carry_out(action)
        self._watch_oldest()

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(frame):
                self._owners.sent(frame)
                try:
                    self.network.send(frame, self.now)
                except RingLost as lost:
                    epoch = self.scheduler.ledger.epoch
                    self._events.append(RingBroken(epoch, str(lost), self.now))
            case Emit(job, event):
                played = self.jobs[job]
                self._require(not played.ended, "an event behind the end")
                if isinstance(event, Started):
                    self._require(played.started is None, "started twice")
                    played.started = event
                elif isinstance(event, TokenDelta):
                    played.tokens.extend(event.tokens)
                elif isinstance(event, Finished):
                    played.finished = event
                    self._foresee(job)
            case Fail(job, error):
                self._require(not self.jobs[job].ended, "failed behind the end")
                self.jobs[job].error = error
            case OpenEpoch(epoch, _, delay_s):
                self.epochs += 1
                self._later(self.now + delay_s + 0.1, epoch)

    def _foresee(self, job: JobId) -> None:
        planned, played = self._plan[job], self.jobs[job]
        if planned.next_keeps is None or played.request.session is None:
            return
        told = (*played.request.prompt, *played.tokens)[: planned.next_keeps]
        if told or planned.next_adds:
            tokens = (*told, *planned.next_adds)
            wish = Wish(played.request.session, tokens, tenant=planned.tenant)
            self._owners.wished(wish)
            self._events.append(NextKnown(wish, self.now))

    def _later(
        self,
        when: float,
        what: PlannedJob | JobId | Epoch | tuple[Epoch, Seq],
        job: JobId | None = None,
    ) -> None:
        heapq.heappush(self._due, _Due(when, self._order, what, job))
        self._order += 1

    def _watch_oldest(self) -> None:
        seq = self.scheduler.oldest_in_flight
        watched = None if seq is None else (self.scheduler.ledger.epoch, seq)
        if watched is not None and watched != self._watched:
            self._later(self.now + self.scheduler.reply_deadline_s, watched)
        self._watched = watched

    # Invariants

    def _check(self) -> None:
        for played in self.jobs.values():
            self._check_stream(played)
        for stage in self.network.stages:
            rows = sum(kept.end - kept.start for kept in stage.kept.values())
            self._require(rows <= self.info.host_rows, f"a store of {rows} rows")
            states = sum(kept.state is not None for kept in stage.kept.values())
            self._require(states <= self.info.checkpoints, f"a store of {states} checkpoints")
        if not self.faults and self.scheduler.oldest_in_flight is None:
            self._check_replicas()

    def _check_stream(self, played: PlayedJob) -> None:
        got, expected = tuple(played.tokens), played.expected
        if got != expected[: len(got)]:
            raise SimulationFailed(f"at {self.now:.3f} s: wrong tokens: {got} for {expected}")
        self._require(played.finished is None or got == expected, "finished early")
        if isinstance(played.error, ConstraintFailed):
            self._require(got == expected, "a constraint failed early")

    def _oracle(self, request: Request) -> tuple[int, ...]:
        count = min(request.max_new_tokens, self.info.max_rows - len(request.prompt))
        toy = request.constraint
        if isinstance(toy, ToyConstraint) and toy.fails_at is not None:
            count = min(count, toy.fails_at)
            toy = replace(toy, fails_at=None)
        ends = self._end_tokens
        return self._model.oracle(request.prompt, count, request.sampling, ends, toy)

    def _check_replicas(self) -> None:
        replica = self.scheduler.ledger
        for lane in map(LaneId, range(replica.lanes)):
            ours = replica.tokens(lane)
            for stage in self.network.stages:
                theirs = stage.ledger.tokens(lane)
                self._require(ours == theirs, f"replicas differ in lane {lane}")
        nodes = set(replica.nodes.ids())
        for stage in self.network.stages:
            known = stage.ledger.memos.known
            self._require(replica.memos.known == known, "replicas know other memos")
            self._require(nodes == set(stage.ledger.nodes.ids()), "replicas know other nodes")
            self._require(nodes == stage.kept.keys(), "a stage keeps other rows than nodes")

    def _require(self, holds: bool, breach: str) -> None:
        if not holds:
            raise SimulationFailed(f"at {self.now:.3f} s: {breach}")


def random_plan(
    seed: int, jobs: int, vocab_size: int, *, head: int = 20, tenants: Sequence[str] = ("",)
) -> tuple[PlannedJob, ...]:
    """Turns of a few sessions over one shared head: follow-ups, branches, retries and cancellations. With several
    tenants each job is one's of them, whatever it follows and whosever session it names.
    """
    owners = random.Random(f"tenants/{seed}")
    dice = random.Random(seed)
    resends = random.Random(f"resends/{seed}")
    toys = random.Random(f"toys/{seed}")
    shared = tuple(dice.randrange(vocab_size) for _ in range(head))
    plan: list[PlannedJob] = []
    for index in range(jobs):
        follows = dice.randrange(index) if index and dice.random() < 0.5 else None
        fresh = tuple(dice.randrange(vocab_size) for _ in range(dice.randint(1, 12)))
        begins = shared[: dice.randint(0, head)] if follows is None else ()
        again = follows is not None and resends.random() < 0.3
        session = plan[follows].session if follows is not None else f"s{index}"
        plan.append(
            PlannedJob(
                at_s=dice.uniform(0.0, 1.0),
                prompt=() if again else (*begins, *fresh),
                session=session if dice.random() < 0.8 else None,
                follows=follows,
                again=again,
                max_new_tokens=dice.randint(1, 14),
                seed=dice.choice((None, None, dice.randrange(1 << 32))),
                draft=dice.random() < 0.8,
                cancel_after_s=dice.uniform(0.0, 0.4) if dice.random() < 0.2 else None,
                constraint=random_toy(toys, vocab_size + 1) if toys.random() < 0.3 else None,
                next_keeps=dice.randint(0, 40) if dice.random() < 0.4 else None,
                next_adds=tuple(dice.randrange(vocab_size) for _ in range(dice.randint(0, 20))),
                tenant=owners.choice(tenants),
            )
        )
    return tuple(plan)
