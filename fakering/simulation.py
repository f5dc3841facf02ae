"""A whole coordinator core over a fake network in virtual time, without asyncio: what a fuzzer runs.

Feeds the real scheduler, carries out its actions on the network, and holds every stream against the oracle, every
opening against a second opinion and every epoch against what the stages really hold. It decides nothing of its own:
same plan, same faults, same run. Breaches raise SimulationFailed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from coordinator import events
from coordinator.config import SchedulerSettings
from coordinator.drafters.ngram import NgramDrafter
from coordinator.drafters.none import NoDrafter
from coordinator.errors import (
    Cancelled,
    ContextTooLong,
    QueueFull,
    RingLost,
    RingserveError,
    RingUnavailable,
)
from coordinator.frames import Epoch, Frame, JobId, LaneId, NodeId, OpenLane, Reply, Seq
from coordinator.held import Holding
from coordinator.nodes import root_of
from coordinator.requests import Finished, JobEvent, SessionId, Started
from coordinator.scheduler import Scheduler
from fakering.checks import Promises, QuietCheck, Recoveries, check_seats, check_taken, sessions_of
from fakering.clients import Clients, PlayedJob
from fakering.faults import LEG_FAULTS, RING_FAULTS, FaultScript, GatewayRestart, Lose, Stall
from fakering.model import FakeModel
from fakering.network import Network, Pace
from fakering.owners import Crossed, Owners
from fakering.plan import PlannedJob
from fakering.reference import Asked, Reference
from fakering.ring import describe
from fakering.truth import Breach, check_agreed, check_rows, require

_MAX_EVENTS = (
    20_000  # a run of 8 jobs takes some hundreds; more means that it goes round in circles
)
_STORY_EVENTS = 40
# Of a client whose last turn has not ended, or whose server is gone, until it looks again.
_PATIENCE_S = 0.15
# Of a new coordinator, between two attempts to take the ring over.
_AWAY_S = 0.5
# Whatever else these faults cost, no stage loses rows without its ring noticing.
NOTICED = (*LEG_FAULTS, *RING_FAULTS, GatewayRestart, Lose, Stall)


class SimulationFailed(AssertionError):
    """An invariant was broken. The message names it; the seed that led here is the caller's to print."""


@dataclass(frozen=True, slots=True, order=True)
class _Due:
    when: float
    order: int
    act: Callable[[], None] = field(compare=False)


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
        rest_s: float = 3.0,
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
        self.network = Network(
            stages, lanes, max_rows, model, faults, pace, host_rows, state_rows, rest_s
        )
        self.network.at_rest = check_agreed
        self.scheduler = Scheduler("sim", self.info, settings)
        self.clients = Clients(plan, model, max_rows, end_tokens, settings.heal_attempts)
        tenants = {JobId(index): planned.tenant for index, planned in enumerate(plan)}
        self._roots = {t: root_of(described.model_fingerprint, t) for t in set(tenants.values())}
        self._owners = Owners(lanes, tenants, {root: t for t, root in self._roots.items()})
        slack = settings.min_copy_rows
        self._reference = Reference(lanes, state_rows, slack, self._asked)
        self._promises = Promises(self._reference, 2 * (slack - 1))
        self._quiet = QuietCheck(self.info, self.network, self._reference)
        self._recoveries = Recoveries(settings)
        # Only where all of them can be kept: see Promises.
        self._is_roomy = exact and not state_rows and host_rows >= len(plan) * max_rows
        self._promising = self._is_roomy and all(isinstance(fault, NOTICED) for fault in faults)
        self.refusals = self.epochs = self.restarts = self.void_replies = 0
        self.now = 0.0
        self.plan = tuple(plan)
        self.faults = faults
        self._harmed = not all(isinstance(fault, GatewayRestart) for fault in faults)
        self._settings = settings
        self._due: list[_Due] = []
        self._order = 0
        self._events: deque[events.Event] = deque()
        self._story: deque[events.Event] = deque(maxlen=_STORY_EVENTS)
        self._watched: tuple[Epoch, Seq] | None = None
        self._epoch = Epoch(0)  # the last one that anybody asked for
        self._is_away = False  # there is no coordinator just now
        self._sessions: tuple[SessionId | None, ...] = ()  # of each lane, when the epoch ended
        for index, planned in enumerate(plan):
            self._later(planned.at_s, partial(self._submit, planned, JobId(index)))
        for fault in faults:
            if isinstance(fault, GatewayRestart):
                self._later(fault.at_s, self._restart)

    @property
    def jobs(self) -> dict[JobId, PlayedJob]:
        return self.clients.jobs

    # Time

    def run(self) -> None:
        """Plays everything to its end and checks the invariants after every event."""
        for _ in range(_MAX_EVENTS):
            if not self._step():
                break
        else:
            raise self._failed("the run goes on for ever")
        try:
            for number, job in self.jobs.items():
                require(job.ended, f"job {number} never ended")
            require(self.scheduler.lanes.busy == 0, "a lane is still busy")
            require(self.scheduler.waiting == 0, "a job still waits")
        except Breach as breach:
            raise self._failed(breach) from breach

    def _step(self) -> bool:
        """Lets the next thing happen; False when there is none. Raises SimulationFailed."""
        try:
            return self._happens()
        except (Breach, Crossed, RingserveError) as breach:
            raise self._failed(breach) from breach

    def _failed(self, breach: object) -> SimulationFailed:
        told = "\n  ".join(map(events.story_line, self._story))
        struck = "\n  ".join(map(str, self.network.struck)) or "none"
        kind = "" if isinstance(breach, Breach | str) else f"{type(breach).__name__}: "
        return SimulationFailed(
            f"at {self.now:.3f} s: {kind}{breach}\nevents:\n  {told}\nfaults that struck:\n  {struck}"
        )

    def _happens(self) -> bool:
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
            due.act()
        self._check()
        return True

    def _later(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, _Due(when, self._order, act))
        self._order += 1

    def _outcome(self, outcome: Reply | RingLost) -> None:
        if isinstance(outcome, RingLost):
            epoch = self.scheduler.ledger.epoch
            self._feed(events.RingBroken(epoch, str(outcome), self.now, outcome.for_good))
            return
        self.refusals += len(outcome.refusals)
        self.void_replies += outcome.epoch != self.scheduler.ledger.epoch
        require(self._harmed or not outcome.refusals, f"refused: {outcome.refusals}")
        require(self._harmed or not outcome.lost, "a node was lost without a fault")
        self._feed(events.ReplyArrived(outcome, self.now))

    # Clients

    def _submit(self, planned: PlannedJob, job: JobId) -> None:
        if self.clients.waits(job) or self._is_away:
            self._later(self.now + _PATIENCE_S, partial(self._submit, planned, job))
            return
        request = self.clients.ask(job)
        try:
            self.scheduler.admissible(request, self.now)
        except (ContextTooLong, QueueFull) as refused:
            self.jobs[job].error = refused
            return
        except RingUnavailable as refused:
            require(self.scheduler.down is not None, "a ring that is up takes no jobs")
            self.jobs[job].error = refused
            return
        drafter = NgramDrafter() if request.draft else NoDrafter()
        self._feed(events.Submitted(job, request, drafter, self.now))
        if planned.cancel_after_s is not None:
            self._later(self.now + planned.cancel_after_s, partial(self._cancel, job))
        for after_s, seconds in planned.pauses:
            self._later(self.now + after_s, partial(self._reads, job, lags=True))
            self._later(self.now + after_s + seconds, partial(self._reads, job, lags=False))

    def _cancel(self, job: JobId) -> None:
        if not self.jobs[job].ended:
            self._feed(events.JobEnded(job, Cancelled(), self.now))
            require(self.jobs[job].ended, f"job {job} was cancelled and goes on")

    def _reads(self, job: JobId, *, lags: bool) -> None:
        if not self.jobs[job].ended:
            self.jobs[job].paused = lags
            self._feed((events.ReaderLags if lags else events.ReaderCaughtUp)(job, self.now))

    def _foresee(self, job: JobId) -> None:
        wish = self.clients.wish(job)
        if wish is not None:
            self._owners.wished(wish)
            self._events.append(events.NextKnown(wish, self.now))

    def _asked(self, job: JobId) -> Asked:
        played = self.jobs[job]
        return Asked(played.context, played.request.reuse, played.ended)

    # The driver's part

    def _feed(self, event: events.Event) -> None:
        if self._is_away:
            return
        self._events.append(event)
        while self._events:
            self._handle(self._events.popleft())
        self._watch_oldest()

    def _handle(self, event: events.Event) -> None:
        self._story.append(event)
        if isinstance(event, events.ReplyArrived) and self._reference.answered(event.reply):
            self._recoveries.answered()
        before = self._recoveries.before(self.scheduler)
        ran = [job for job in self._reference.opened if not self.jobs[job].ended]
        actions = self.scheduler.on(event)
        if self._recoveries.after(self.scheduler, event, actions, before, ran):
            self._sessions = before.sessions
            self._reference.ended()
        if isinstance(event, events.EpochOpened):
            self._begin(event.held, actions)
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: events.Action) -> None:
        match action:
            case events.Send(frame):
                self._send(frame)
            case events.Emit(job, event):
                self._tell(job, event)
            case events.Fail(job, error):
                is_down = self.scheduler.down is not None
                self.clients.fail(job, error, is_down=is_down)
            case events.OpenEpoch(epoch, _, delay_s):
                self.epochs += 1
                require(epoch == self._epoch + 1, f"epoch {epoch} follows {self._epoch}")
                self._epoch = epoch
                self._later(self.now + delay_s + 0.1, partial(self._open_epoch, epoch))

    def _send(self, frame: Frame) -> None:
        self._owners.sent(frame)
        self.clients.served(frame)
        if self._promising:
            self._check_promises(frame)
        self._reference.sent(frame)
        try:
            self.network.send(frame, self.now)
        except RingLost as lost:
            epoch = self.scheduler.ledger.epoch
            self._events.append(events.RingBroken(epoch, str(lost), self.now, lost.for_good))

    def _check_promises(self, frame: Frame) -> None:
        for op in frame.ops:
            if not isinstance(op, OpenLane) or op.job not in self.jobs:
                continue
            follows, played = self.plan[op.job].follows, self.jobs[op.job]
            if follows is not None and played.started is None and played.request.reuse:
                self._promises.check(op.job, JobId(follows), op.root, played.request.prompt)

    def _tell(self, job: JobId, event: JobEvent) -> None:
        self.clients.tell(job, event)
        match event:
            case Started():
                self._check_started(job, event)
            case Finished():
                if self._promising:
                    self._promises.finished(job, self.jobs[job].context, self._root(job))
                self._foresee(job)

    def _root(self, job: JobId) -> NodeId:
        return self._roots[self.plan[job].tenant]

    def _watch_oldest(self) -> None:
        seq = self.scheduler.oldest_in_flight
        watched = None if seq is None else (self.scheduler.ledger.epoch, seq)
        if watched is not None and watched != self._watched:
            late = partial(self._overdue, *watched)
            self._later(self.now + self.scheduler.reply_deadline_s, late)
        self._watched = watched

    def _overdue(self, epoch: Epoch, seq: Seq) -> None:
        if (epoch, seq) == self._watched:
            self._feed(events.ReplyOverdue(epoch, seq, self.now))

    # Epochs

    def _open_epoch(self, epoch: Epoch) -> None:
        if self._is_away or epoch != self._epoch:
            return  # who asked for it is gone
        try:
            held = self._held(epoch)
        except RingLost as lost:
            self._feed(events.EpochFailed(epoch, str(lost), self.now, lost.for_good))
            return
        self._feed(events.EpochOpened(epoch, held, self.now))

    def _held(self, epoch: Epoch) -> Holding:
        """Raises RingLost."""
        held = self.network.open_epoch(epoch, self.now)
        self._quiet.check_opened(held)
        self._owners.new_epoch(held)
        return held

    def _begin(self, held: Holding, actions: Sequence[events.Action] = ()) -> None:
        """The coordinator goes on from what is held; of what it does then nothing is carried out yet."""
        trusted = self._recoveries.trusted
        if not any(isinstance(action, events.Fail) for action in actions):
            # A job that fails as it is seated leaves its lane as if it had been there.
            check_seats(self._sessions, self.scheduler, held, trusted=trusted)
        self._reference.begun(held, trusted=trusted)
        self._promises.begun()
        if self._is_roomy:
            check_taken(self.scheduler, self._reference, held, actions)

    def _restart(self) -> None:
        """The coordinator is gone with its jobs; another one will ask the stages what they hold."""
        if self._is_away:
            return
        self._is_away = True
        self.restarts += 1
        self._events.clear()
        self.clients.desert()
        self._later(self.now + _AWAY_S, self._take_over)

    def _take_over(self) -> None:
        self._epoch = Epoch(self._epoch + 1)
        try:
            held = self._held(self._epoch)
        except RingLost:
            self._later(self.now + _AWAY_S, self._take_over)
            return
        self._is_away = False
        self.scheduler = Scheduler(
            "sim", replace(self.info, epoch=self._epoch, held=held), self._settings
        )
        self._recoveries = Recoveries(self._settings)
        self._sessions = sessions_of(self.scheduler)
        self._reference.forget()
        self._begin(held)

    # Invariants

    def _check(self) -> None:
        is_open = not self._is_away and not self.scheduler.is_recovering
        if is_open and self.scheduler.down is None and self.scheduler.oldest_in_flight is None:
            self._quiet.check(self.scheduler, harmed=self._harmed)

    def _check_started(self, job: JobId, started: Started) -> None:
        """What is said to be reused is what the lane was opened with, and on every stage."""
        rows = started.cached_prefix
        require(rows == self._reference.opened.get(job), f"job {job} did not start at {rows}")
        reused = self.jobs[job].context[:rows]
        lane = LaneId(started.lane)
        for stage in self.network.stages:
            lacks = lane in stage.untold_lanes or stage.ledger.valid_rows(lane) < rows
            if stage.index not in self.network.dead and not lacks:
                check_rows(stage, lane, reused, first=rows + 1)
