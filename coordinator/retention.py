"""The retention policy: when a lane's rows are written back to the chain store, and what of it stays pinned.

Decides which rows become nodes: those of a lane that is about to be overwritten, and, while the ring has nothing
else to do, those of lanes at rest, a few at a time so that real work never waits for more than one frame. It sends
nothing: it hands out ops, and takes the replies' word for what became of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from coordinator.anchors import Anchors
from coordinator.chain import ChainIndex
from coordinator.config import SchedulerSettings
from coordinator.frames import (
    DropNodes,
    Frame,
    LaneId,
    LoadNodes,
    NodeId,
    Op,
    Reply,
    Segment,
    SegmentKind,
    Seq,
    StoreNodes,
)
from coordinator.held import Holding
from coordinator.jobs import Job
from coordinator.ledger import Ledger
from coordinator.nodes import root_of
from coordinator.ring import RingInfo

# Nodes of one idle frame: their rows are copied in a few milliseconds, which is what real work may have to wait.
_IDLE_NODES = 8


@dataclass(slots=True)
class _Ticket:
    """Nodes under way: the reply to their frame commits them, or aborts those that it reports as lost."""

    lane: LaneId
    nodes: tuple[NodeId, ...]
    root: NodeId  # the lane's
    head: tuple[int, ...]  # the lane's tokens up to its anchor
    asked: tuple[int, ...] = ()  # a prefix that an operator wants pinned


class Retention:
    def __init__(self, info: RingInfo, settings: SchedulerSettings, ledger: Ledger) -> None:
        self._min_rows = settings.min_copy_rows
        self._fingerprint = info.model_fingerprint
        self._ledger = ledger
        self.index = ChainIndex(
            info.host_rows,
            node_rows=settings.node_rows,
            min_tail_rows=settings.min_copy_rows,
            checkpoints=info.checkpoints if info.state_rows else None,
        )
        self.anchors = Anchors(self.index)
        self._tickets: dict[Seq, list[_Ticket]] = {}
        self._heads: dict[LaneId, int] = {}  # where the head of a lane's last job ends
        # Lanes with rows that have not been looked at.
        self._at_rest: OrderedDict[LaneId, None] = OrderedDict()
        self._asked: tuple[int, ...] = ()  # what the next ticket's nodes are to be pinned for

    def root(self, tenant: str) -> NodeId:
        """Of all chains of the tenant: what hangs on another root is none of his."""
        return root_of(self._fingerprint, tenant)

    @property
    def enabled(self) -> bool:
        return self.index.capacity > 0

    @property
    def is_settled(self) -> bool:
        """Whether all that is worth it has been written back, and has arrived."""
        return not self._at_rest and not any(self._tickets.values())

    # What a lane's life asks for

    def taken(self, lane: LaneId, job: Job) -> None:
        """The job has got the lane."""
        self._at_rest.pop(lane, None)
        self._heads[lane] = job.request.anchor
        self.anchors.want(job.request.prompt[: job.request.anchor], job.root)

    def left(self, lane: LaneId) -> None:
        """The job has ended; its rows are written back when there is time."""
        if self.enabled:
            self._at_rest[lane] = None
            self._at_rest.move_to_end(lane)

    def rescue(self, lane: LaneId, kept: int) -> StoreNodes | None:
        """What has to be stored before the lane's rows behind the first `kept` are overwritten."""
        rows = self._ledger.valid_rows(lane)
        if not self.enabled or lane not in self._at_rest or rows - kept < self._min_rows:
            return None
        return self._store(lane)

    def at_leisure(self) -> StoreNodes | None:
        """The next nodes to write back while the ring is idle; None when all lanes have been looked at."""
        while self._at_rest:
            lane = next(iter(self._at_rest))
            op = self._store(lane, most=_IDLE_NODES)
            if op is None or len(op.spans) < _IDLE_NODES:
                del self._at_rest[lane]
            if op is not None:
                return op
        return None

    def forget_behind(self, lane: LaneId, rows: int) -> None:
        """The lane's rows from there on are made anew: what the store has of them is not what it is to have."""
        nodes = self.index.match(self._ledger.tokens(lane), self._ledger.root(lane)).nodes
        self.index.lose([node for node in nodes if self.index.node(node).end > rows])

    def held_rows(self, prefix: Sequence[int], root: NodeId) -> int:
        """How many of a prefix's rows lie in one lane or in the store."""
        return max(self.held_in_lanes(prefix, root), self.index.match(prefix, root).rows)

    def held_in_lanes(self, prefix: Sequence[int], root: NodeId) -> int:
        lanes = map(LaneId, range(self._ledger.lanes))
        return max(self._ledger.usable_prefix(lane, prefix, root) for lane in lanes)

    def pin(self, prefix: Sequence[int], tenant: str) -> StoreNodes | None:
        """Pins a prefix at an operator's wish. What a lane holds of it and the store does not is stored first."""
        root = self.root(tenant)
        if self.anchors.pin(prefix, root):
            return None
        for lane in map(LaneId, range(self._ledger.lanes)):
            if self._ledger.usable_prefix(lane, prefix, root) == len(prefix):
                spans = self.index.store(prefix, root, (len(prefix),))
                self._asked = tuple(prefix)
                return StoreNodes(lane, spans) if spans else None
        return None

    def _store(self, lane: LaneId, most: int | None = None) -> StoreNodes | None:
        tokens = self._ledger.tokens(lane)
        root = self._ledger.root(lane)
        spans = self.index.store(tokens, root, self._ends(len(tokens)), most)
        return StoreNodes(lane, spans) if spans else None

    def _ends(self, *points: int) -> tuple[int, ...]:
        return points if self._ledger.state_rows else ()

    def passing_all(self, segments: Iterable[tuple[Job, Segment]]) -> list[StoreNodes]:
        """What prefill chunks leave behind: checkpoints at the restore points that they go through."""
        ops = (self._passing(job, segment) for job, segment in segments)
        return [op for op in ops if op is not None]

    def _passing(self, job: Job, segment: Segment) -> StoreNodes | None:
        window = self._ledger.state_rows
        if not self.enabled or not window or segment.kind is not SegmentKind.PREFILL:
            return None
        low = max(segment.start + 1, segment.end - window)
        points = tuple(p for p in job.restore_points if low <= p <= segment.end)
        if not points:
            return None
        spans = self.index.store(job.context[: max(points)], job.root, points)
        return StoreNodes(segment.lane, spans) if spans else None

    def is_stale(self, ops: Iterable[Op]) -> bool:
        """Whether nodes that the ops would load are gone meanwhile."""
        return any(not self.index.loadable(op.nodes) for op in ops if isinstance(op, LoadNodes))

    @contextmanager
    def held(self, ops: Iterable[Op]) -> Iterator[None]:
        """What is stored meanwhile takes its room from other nodes than those that the ops load."""
        loads = [op.nodes for op in ops if isinstance(op, LoadNodes)]
        for nodes in loads:
            self.index.pin(nodes)
        yield
        for nodes in loads:
            self.index.unpin(nodes)

    # What goes out and comes back

    def drops(self) -> tuple[Op, ...]:
        """To go before all else in the next frame."""
        nodes, checkpoints = self.index.take_drops(), self.index.take_checkpoint_drops()
        return (DropNodes(nodes, checkpoints),) if nodes or checkpoints else ()

    def sent(self, frame: Frame) -> None:
        self._tickets[frame.seq] = []
        for op in frame.after:
            head = self._ledger.tokens(op.lane, self._heads.get(op.lane, 0))
            nodes, root = tuple(span.node for span in op.spans), self._ledger.root(op.lane)
            self._tickets[frame.seq].append(_Ticket(op.lane, nodes, root, head, self._asked))
            self._asked = ()

    def answered(self, frame: Frame, reply: Reply) -> None:
        """Commits the frame's ticket. What some stage lacks goes everywhere."""
        tickets = self._tickets.pop(frame.seq, [])
        for ticket in tickets:
            kept = [node for node in ticket.nodes if node not in reply.lost]
            self.index.publish(kept)
            if len(kept) < len(ticket.nodes):
                self._at_rest.pop(ticket.lane, None)  # tried again when the lane was used again
        if reply.lost:
            self.index.lose(reply.lost)
        for ticket in tickets:
            self.anchors.want(ticket.head, ticket.root)
            if ticket.asked:
                self.anchors.pin(ticket.asked, ticket.root)

    def voided(self, frames: Iterable[Frame]) -> None:
        """An epoch has ended with these frames unanswered."""
        for op in (op for frame in frames for op in frame.ops if isinstance(op, DropNodes)):
            self.index.undelivered(op.nodes, op.checkpoints)

    def resumed(self, held: Holding, resting: Iterable[LaneId]) -> None:
        """An epoch begins with these nodes and no others, and with these lanes at rest: tickets of before are void."""
        self.index.reconcile(held.nodes, held.checkpoints)
        under_way = [ticket for tickets in self._tickets.values() for ticket in tickets]
        for ticket in (ticket for ticket in under_way if ticket.asked):
            self.anchors.pin(ticket.asked, ticket.root)
        self._tickets.clear()
        self._asked = ()
        self._at_rest.clear()
        for lane in resting:
            self.left(lane)
