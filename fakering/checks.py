"""What has to be true of a whole ring at rest, at the beginning of an epoch and of the way there, whatever went wrong.

Compares the coordinator with what the stages really hold and with the second opinion of reference.py. Raises Breach; it
changes nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from coordinator.config import SchedulerSettings
from coordinator.frames import Epoch, JobId, LaneId, NodeId, Seq
from coordinator.held import Holding
from coordinator.lanes import LaneState
from coordinator.requests import SessionId
from coordinator.ring import RingInfo
from coordinator.scheduler import Scheduler
from fakering.network import Network
from fakering.reference import Reference
from fakering.stages import FakeStage
from fakering.truth import RightNodes, check_opened, check_rows, require


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


@dataclass(slots=True)
class Recoveries:
    """How often epochs were to be opened since the last good reply, counted here anew."""

    settings: SchedulerSettings
    openings: int = 0

    def answered(self) -> None:
        self.openings = 0

    def check_ended(self, delay_s: float, told: Sequence[JobId], ran: Collection[JobId]) -> None:
        """An epoch ended, and these jobs were told so."""
        self.openings += 1
        require(self.openings <= self.settings.heal_attempts, "the ring is not given up")
        wait = self.settings.heal_backoff_s * 2 ** (self.openings - 2)
        least, most = (0.0, 0.0) if self.openings == 1 else (min(wait, 30.0), min(wait, 30.0))
        require(least <= delay_s <= most, f"opening {self.openings} waits {delay_s} s")
        require(len(told) == len(set(told)), "a job hears twice of one loss")
        require(set(told) == set(ran), f"jobs {sorted(told)} hear of a loss, {sorted(ran)} ran")

    def check_given_up(self) -> None:
        require(self.openings >= self.settings.heal_attempts, "the ring is given up too soon")

    @property
    def trusted(self) -> bool:
        return self.openings <= 1


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
