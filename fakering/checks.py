"""What has to be true of a whole ring at rest, at the beginning of an epoch and of the way there, whatever went wrong.

Compares the coordinator with what the stages really hold and with the second opinion of reference.py. Raises Breach; it
changes nothing and decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator import events
from coordinator.config import SchedulerSettings
from coordinator.errors import RingserveError, StageLost
from coordinator.frames import Epoch, JobId, LaneId, NodeId, Seq
from coordinator.held import Holding
from coordinator.lanes import LaneState
from coordinator.requests import JobEvent, Recovering, SessionId
from coordinator.retention import Retention
from coordinator.ring import RingInfo
from coordinator.scheduler import Scheduler
from fakering.network import Network
from fakering.reference import Reference
from fakering.stages import FakeStage
from fakering.truth import RightNodes, check_opened, check_rows, require

# Between two openings.
_LONGEST_WAIT_S = 30.0


class QuietCheck:
    """Of a ring with nothing in flight. A stage that has taken no frame since it was looked at is passed over."""

    def __init__(self, info: RingInfo, network: Network, reference: Reference) -> None:
        self._info = info
        self._network = network
        self._reference = reference
        self._seen: dict[int, tuple[FakeStage, Epoch, Seq]] = {}
        self._right = RightNodes()

    def check(self, scheduler: Scheduler, *, harmed: bool) -> None:
        """`harmed`: some fault has struck, or may: stages may have lost what they have not been asked for since. Else
        all replicas are alike.
        """
        check_replica(scheduler, self._reference)
        for stage in self._network.stages:
            seen = (stage, stage.ledger.epoch, stage.ledger.next_seq)
            if stage.index in self._network.dead or self._seen.get(stage.index) == seen:
                continue
            self._seen[stage.index] = seen
            self._check_lanes(scheduler, stage, harmed=harmed)
            self._check_nodes(scheduler, stage, harmed=harmed)

    def check_opened(self, held: Holding) -> None:
        check_opened(self._network.stages, held, self._right)

    def _check_lanes(self, scheduler: Scheduler, stage: FakeStage, *, harmed: bool) -> None:
        replica, holding = scheduler.ledger, scheduler.ledger.holding()
        for lane in map(LaneId, range(replica.lanes)):
            if lane in stage.untold_lanes:
                continue
            ours = replica.tokens(lane)
            theirs = stage.ledger.tokens(lane)
            require(theirs[: len(ours)] == ours, f"replicas differ in lane {lane}")
            require(harmed or theirs == ours, f"rows are left in lane {lane}")
            check_rows(stage, lane, ours, holding.lane(lane).first)

    def _check_nodes(self, scheduler: Scheduler, stage: FakeStage, *, harmed: bool) -> None:
        replica, theirs = scheduler.ledger, stage.ledger
        rows = sum(kept.end - kept.start for kept in stage.kept.values())
        require(rows <= self._info.host_rows, f"a store of {rows} rows")
        states = sum(kept.state is not None for kept in stage.kept.values())
        require(states <= self._info.checkpoints, f"a store of {states} checkpoints")
        known, has = set(replica.nodes.ids()), set(theirs.nodes.ids())
        require(has <= known, "a stage has nodes that nobody knows of")
        promised = known - self._reference.given_up - stage.untold_nodes
        require(promised <= has, "a stage lacks nodes")
        if not harmed:
            require(known == has, "replicas know other nodes")
            require(replica.memos.known == theirs.memos.known, "replicas know other memos")
            self._right.check(stage)


def check_replica(scheduler: Scheduler, reference: Reference) -> None:
    """The coordinator believes what its frames come to, and its index what its ledger does."""
    replica = scheduler.ledger
    for lane in map(LaneId, range(replica.lanes)):
        tokens = reference.lane(lane)
        if tokens is not None:
            require(replica.tokens(lane) == tokens, f"the coordinator is wrong of lane {lane}")
    known = set(replica.nodes.ids()) - reference.given_up
    require(known == reference.nodes, "the coordinator's ledger has other nodes than its frames")
    indexed = {node.id for node in scheduler.retention.index.nodes()}
    require(indexed <= known, "the index has nodes that no stage has, or that were given up")
    states = set(scheduler.retention.index.resumable())
    require(states <= replica.nodes.checkpoints, "the index has states that no stage has")
    require(not scheduler.retention._tickets, "nodes are under way in no frame")
    check_entries(scheduler.retention)


def check_entries(retention: Retention) -> None:
    """Nothing is under way, every pin is some anchor's, and what is counted is what is there."""
    index, anchors = retention.index, retention.anchors
    holders = (*anchors._heads.values(), *anchors._by_hand.values())
    pins = Counter(node for nodes in holders for node in nodes)
    entries = index._entries.items()
    for id_, entry in entries:
        # Of what is lost its anchor hears when it is asked next.
        wanted = 0 if id_ in index.lost_pins else pins[id_]
        require(entry.settled, "a node is under way in no frame")
        require(entry.pins == wanted, f"a node with {entry.pins} pins, of which {wanted} are held")
    pinned = sum(entry.node.rows for _, entry in entries if entry.pins)
    require(index.pinned_rows == pinned, f"{index.pinned_rows} pinned rows, in truth {pinned}")
    require(index.rows == sum(entry.node.rows for _, entry in entries), "rows are counted wrong")


def check_taken(
    scheduler: Scheduler, reference: Reference, held: Holding, actions: Sequence[events.Action]
) -> None:
    """At the beginning of an epoch, with room for all: what is held and was not given up may be counted on, but for
    what a longer node takes the place of at once.
    """
    indexed = {node.id for node in scheduler.retention.index.nodes()}
    frames = [action.frame for action in actions if isinstance(action, events.Send)]
    spans = [span for frame in frames for op in frame.after for span in op.spans]
    for node in held.nodes:
        siblings = (s for s in spans if (s.parent, s.start) == (node.parent, node.start))
        is_replaced = any(span.end > node.end for span in siblings)
        is_known = node.id in indexed or is_replaced or node.id not in reference.nodes
        require(is_known, "the index does not know of nodes that all stages have")


def check_seats(
    before: Sequence[SessionId | None], scheduler: Scheduler, held: Holding, *, trusted: bool
) -> None:
    """Lanes whose rows outlived the epoch are their sessions' still, and the others are nobody's."""
    for status in scheduler.lanes.statuses(len(before), lambda job: False):
        if status.state is LaneState.EMPTY:
            require(status.session is None, f"empty lane {status.lane} is a session's")
        elif status.state is LaneState.RESTING:
            rows = len(held.lane(status.lane).tokens) if trusted else 0
            if rows:
                owner = before[status.lane]
                require(status.session == owner, f"lane {status.lane} changed hands")


def sessions_of(scheduler: Scheduler) -> tuple[SessionId | None, ...]:
    lanes = scheduler.lanes.statuses(scheduler.ledger.lanes, lambda job: False)
    return tuple(status.session for status in lanes)


@dataclass(frozen=True, slots=True)
class Before:
    """How a scheduler was when an event came."""

    is_down: bool
    is_recovering: bool
    epoch: Epoch
    sessions: tuple[SessionId | None, ...]


class Recoveries:
    """Epochs end when they must and only then, those that ran are told once, and openings follow each other as the
    settings say.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._openings = 0  # since the last good reply

    def answered(self) -> None:
        self._openings = 0

    @property
    def trusted(self) -> bool:
        return self._openings <= 1

    def before(self, scheduler: Scheduler) -> Before:
        epoch = scheduler.ledger.epoch
        sessions = sessions_of(scheduler)
        return Before(scheduler.down is not None, scheduler.is_recovering, epoch, sessions)

    def after(
        self,
        scheduler: Scheduler,
        event: events.Event,
        actions: Sequence[events.Action],
        before: Before,
        ran: Sequence[JobId],
    ) -> bool:
        """Whether an epoch ended. `ran`: the jobs that had a lane, in the order in which they got it."""
        told = [a.job for a in actions if isinstance(a, events.Emit) and _is_recovering(a.event)]
        spent = {a.job for a in actions if isinstance(a, events.Fail) and is_lost(a.error)}
        ended = [action for action in actions if isinstance(action, events.OpenEpoch)]
        require(len(ended) <= 1, "an epoch ends twice")
        require(bool(ended) or not told, "a loss is told that is none")
        if isinstance(event, events.RingBroken) and event.epoch == before.epoch:
            is_noticed = scheduler.is_recovering or scheduler.down is not None
            require(is_noticed, "the ring is lost, and its epoch goes on")
        require(not (ended and _is_final(event)), "a ring that is somebody else's is to heal")
        if before.is_recovering and not isinstance(event, events.EpochFailed):
            require(not ended, "an epoch ends that has not begun")
        if scheduler.down is not None and not before.is_down and not _is_final(event):
            require(self._openings >= self._settings.heal_attempts, "the ring is given up too soon")
        if isinstance(event, events.ReplyArrived) and event.reply.epoch != before.epoch:
            require(not ended, "an epoch ends of another one's reply")
        for opening in ended:
            left = [job for job in ran if job not in spent]
            self._check_ended(opening.delay_s, told, left)
            waiting = [job.id for job in scheduler._queue]
            require(waiting[: len(left)] == left, f"{waiting} wait, though {left} ran")
        return bool(ended)

    def _check_ended(self, delay_s: float, told: Sequence[JobId], ran: Sequence[JobId]) -> None:
        self._openings += 1
        require(self._openings <= self._settings.heal_attempts, "the ring is not given up")
        wait = self._settings.heal_backoff_s * 2 ** (self._openings - 2)
        expected = 0.0 if self._openings == 1 else min(wait, _LONGEST_WAIT_S)
        require(delay_s == expected, f"opening {self._openings} waits {delay_s} s")
        require(len(told) == len(set(told)), "a job hears twice of one loss")
        require(set(told) == set(ran), f"jobs {sorted(told)} hear of a loss, {sorted(ran)} ran")


def _is_final(event: events.Event) -> bool:
    return isinstance(event, events.RingBroken | events.EpochFailed) and event.for_good


def is_lost(error: RingserveError) -> bool:
    return isinstance(error, StageLost)


def _is_recovering(event: JobEvent) -> bool:
    return isinstance(event, Recovering)


class Promises:
    """Rows that a finished turn has left: as long as there is room for all of them, whoever goes on from it reuses
    them all. What an epoch's end takes away is taken off; only so many rows may go with each move.
    """

    def __init__(self, reference: Reference, slack: int) -> None:
        self._reference = reference
        self._slack = slack
        self._rows: dict[JobId, tuple[tuple[int, ...], NodeId, int]] = {}

    def finished(self, job: JobId, context: tuple[int, ...], root: NodeId) -> None:
        # The last token has no row.
        self._rows[job] = (context[:-1], root, len(context) - 1)

    def begun(self) -> None:
        for job, (rows, root, most) in self._rows.items():
            self._rows[job] = (rows, root, min(most, self._reference.depth(rows, root)))

    def check(self, job: JobId, before: JobId, root: NodeId, prompt: Sequence[int]) -> None:
        """Before the frame that opens the job's lane. What is on its way to the store cannot be counted on."""
        promise = self._rows.get(before)
        if promise is None or promise[1] != root or tuple(prompt[: len(promise[0])]) != promise[0]:
            return
        rows, _, most = promise
        most = min(most, len(prompt) - 1)
        may_come = self._reference.depth(rows, root, sure=False)
        is_there = self._reference.depth(rows, root)
        if may_come == is_there:
            have = f"job {before} has left {most} rows, and {is_there} of them are there"
            require(is_there >= most - self._slack, f"{have} for job {job}")
