"""The token id in each valid row of each lane: the state machine that every replica runs.

The coordinator, every stage and the fake ring feed the same frames to this one class, so each knows
what the others hold. A row is *valid* when the lane's tokens reach over it; a segment writes from
its start and makes every row behind its end void. It decides what is refused and why. It holds no
tensors and no clock, and it never guesses: whatever does not fit is a Refusal, and the lane is
refused until its next OpenLane.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.applied import Applied, Standing
from coordinator.frames import (
    NO_ROOT,
    CopyRows,
    DropNodes,
    Epoch,
    Frame,
    JobId,
    LaneId,
    LoadNodes,
    NodeId,
    OpenLane,
    Refusal,
    RefusalCode,
    Segment,
    SegmentKind,
    Seq,
    StoreNodes,
)
from coordinator.held import NOTHING, HeldLane, Holding
from coordinator.memos import MemoTable
from coordinator.nodes import NodeTable
from coordinator.prefixes import common_prefix, digest_of


@dataclass(slots=True)
class _Lane:
    tokens: array[int] = field(default_factory=lambda: array("i"))
    job: JobId | None = None
    blocked: Refusal | None = None  # repeated for every segment until the next OpenLane
    first: int = 0  # with recurrent layers: the least row count but 0 that can be gone on from
    root: NodeId = (
        NO_ROOT  # whose rows these are: of the model and tenant of the job that wrote them
    )


class Ledger:
    """One replica. `stage` only marks the refusals that this replica makes.

    `state_rows`: how many rows back from its end a lane's recurrent layers can go; 0: there are none, and any valid
    row can be gone on from.
    """

    def __init__(
        self,
        lanes: int,
        max_rows: int,
        epoch: Epoch = Epoch(0),
        stage: int = 0,
        state_rows: int = 0,
    ) -> None:
        self.max_rows = max_rows
        self.state_rows = state_rows
        self.nodes = NodeTable()
        self.memos = MemoTable()
        self._stage = stage
        self._lanes = [_Lane() for _ in range(lanes)]
        self.epoch = epoch
        self.next_seq = Seq(0)

    # What is there

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    def valid_rows(self, lane: LaneId) -> int:
        return len(self._lanes[lane].tokens)

    def tokens(self, lane: LaneId, end: int | None = None) -> tuple[int, ...]:
        return tuple(self._lanes[lane].tokens[:end])

    def root(self, lane: LaneId) -> NodeId:
        return self._lanes[lane].root

    def usable_prefix(self, lane: LaneId, prompt: Sequence[int], root: NodeId = NO_ROOT) -> int:
        """How many of the prompt's first tokens lie in the lane's valid rows; none where they are of another root."""
        known = self._lanes[lane]
        return common_prefix(known.tokens, prompt) if known.root == root else 0

    def restore_point(
        self, lane: LaneId, prompt: Sequence[int], most: int, root: NodeId = NO_ROOT
    ) -> int:
        """How many of the prompt's first `most` tokens the lane can go on behind."""
        rows = min(self.usable_prefix(lane, prompt, root), most)
        return rows if rows >= self._lanes[lane].first else 0

    def digest(self, lane: LaneId, rows: int) -> bytes:
        return digest_of(self._lanes[lane].tokens[:rows])

    def holding(self) -> Holding:
        """What this replica could go on from in another epoch."""
        lanes = (HeldLane(lane.tokens[:], lane.root, lane.first) for lane in self._lanes)
        return Holding(tuple(lanes), self.nodes.all(), frozenset(self.nodes.checkpoints))

    def is_blocked(self, lane: LaneId) -> bool:
        return self._lanes[lane].blocked is not None

    # What changes it

    def reset(self, epoch: Epoch, held: Holding | None = None) -> None:
        """Opens an epoch, whose first frame is number 0, with what all replicas hold and nothing else. None: that is
        not known yet; every row is void, and nodes stay.
        """
        self.epoch = epoch
        self.next_seq = Seq(0)
        lanes = NOTHING if held is None else held
        self._lanes = [_lane(lanes.lane(number)) for number in range(self.lanes)]
        self.memos.clear()
        if held is not None:
            self.nodes.replace(held.nodes, held.checkpoints)

    def truncate(self, lane: LaneId, rows: int) -> None:
        """Makes rows from `rows` on void: what a replica learns from others' refusals or from a lost row."""
        del self._lanes[lane].tokens[rows:]

    def apply(self, frame: Frame, refused_before: Sequence[Refusal] = ()) -> Applied:
        """Takes a frame: ops first, then segments. `refused_before`: what earlier stages refused of it.

        Lanes refused before are refused here too, so that no stage holds rows that its predecessor
        lacks. Only this replica's own refusals are returned.
        """
        standing, refusal = self._stand(frame)
        if refusal is not None:
            return Applied(Standing.REFUSED, refusals=(refusal,))
        if standing is Standing.APPLIED:
            return Applied(standing)
        self.next_seq = Seq(frame.seq + 1)
        refused = self._block_all(refused_before)
        moves, refusals, missing = self._apply_ops(frame, refused)
        segments = self._apply_segments(frame, refused, refusals)
        stores, lost = self._store_all(frame, refused)
        return Applied(
            Standing.NEW, segments, tuple(moves), tuple(refusals), stores, (*missing, *lost)
        )

    def _stand(self, frame: Frame) -> tuple[Standing, Refusal | None]:
        refusal = self._epoch_guard(frame) or self._order_guard(frame)
        if refusal is not None:
            return Standing.REFUSED, refusal
        return (Standing.APPLIED if frame.seq < self.next_seq else Standing.NEW), None

    def _block_all(self, refused_before: Sequence[Refusal]) -> frozenset[LaneId]:
        lanes = set()
        for refusal in refused_before:
            if refusal.lane is not None:
                lanes.add(refusal.lane)
                if refusal.lane < self.lanes:
                    self._lanes[refusal.lane].blocked = refusal
        return frozenset(lanes)

    def _apply_ops(
        self, frame: Frame, refused: frozenset[LaneId]
    ) -> tuple[list[CopyRows | LoadNodes], list[Refusal], list[NodeId]]:
        moves: list[CopyRows | LoadNodes] = []
        refusals: list[Refusal] = []
        missing: list[NodeId] = []
        for op in frame.ops:
            if isinstance(op, DropNodes):
                self.nodes.drop(op.nodes)
                self.nodes.checkpoints.difference_update(op.checkpoints)
                continue
            if (op.target if isinstance(op, CopyRows) else op.lane) in refused:
                continue
            if isinstance(op, LoadNodes):
                missing.extend(self.nodes.missing(op.nodes))
            refusal = self._apply_op(op)
            if refusal is not None:
                refusals.append(refusal)
            elif not isinstance(op, OpenLane):
                moves.append(op)
        return moves, refusals, missing

    def _apply_op(self, op: OpenLane | CopyRows | LoadNodes) -> Refusal | None:
        if isinstance(op, LoadNodes):
            return self._load(op)
        return self._copy(op) if isinstance(op, CopyRows) else self._open(op)

    def _apply_segments(
        self, frame: Frame, refused: frozenset[LaneId], refusals: list[Refusal]
    ) -> tuple[Segment, ...]:
        taken = []
        for segment in frame.segments:
            if segment.lane in refused:
                continue
            refusal = self._write(segment)
            if refusal is None:
                taken.append(segment)
            elif all(known.lane != segment.lane for known in refusals):
                refusals.append(refusal)
        return tuple(taken)

    def _open(self, op: OpenLane) -> Refusal | None:
        refusal = self._lane_guard(op.lane)
        if refusal is not None:
            return refusal
        refusal = (
            self._gap_guard(op.lane, op.cached_prefix)
            or self._content_guard(op)
            or self._state_guard(op.lane, op.lane, op.cached_prefix)
        )
        lane = self._lanes[op.lane]
        if refusal is not None:
            lane.blocked = refusal
            return refusal
        del lane.tokens[op.cached_prefix :]
        lane.first = min(lane.first, op.cached_prefix)
        lane.job, lane.root, lane.blocked = op.job, op.root, None
        return None

    def _load(self, op: LoadNodes) -> Refusal | None:
        refusal = self._lane_guard(op.lane)
        if refusal is not None:
            return refusal
        lane = self._lanes[op.lane]
        refusal = self._node_guard(op) or self._gap_guard(op.lane, op.start) or self._lead_guard(op)
        del lane.tokens[
            op.start :
        ]  # given up in any case: what follows a refusal starts from true rows
        if refusal is not None:
            lane.blocked = refusal
            return refusal
        if op.start == 0:
            lane.root = self.nodes[op.nodes[0]].parent
        lane.tokens.extend(self.nodes.tokens_of(op))
        lane.first = op.end if self.state_rows else 0
        lane.job, lane.blocked = None, None
        return None

    def _store_all(
        self, frame: Frame, refused: frozenset[LaneId]
    ) -> tuple[tuple[StoreNodes, ...], list[NodeId]]:
        """Makes nodes of valid rows; what rows do not bear out is lost, and the lane goes on."""
        stores: list[StoreNodes] = []
        for op in frame.after:
            if op.lane in refused or op.lane >= self.lanes:
                continue
            lane = self._lanes[op.lane]
            made = self.nodes.take(op.spans, lane.tokens, lane.first, lane.root)
            if made:
                stores.append(StoreNodes(op.lane, made))
        lost = (node for op in frame.after for node in self.nodes.lacking(op.spans))
        return tuple(stores), list(lost)

    def _copy(self, op: CopyRows) -> Refusal | None:
        refusal = self._lane_guard(op.source) or self._lane_guard(op.target)
        if refusal is not None:
            return refusal
        if op.rows > self.valid_rows(op.source):
            have = self.valid_rows(op.source)
            detail = f"copy of {op.rows} rows, but lane {op.source} has {have}"
            refusal = self._refuse(RefusalCode.KV_GAP, op.target, detail)
            self._lanes[op.target] = _Lane(blocked=refusal)
            return refusal
        refusal = self._state_guard(op.source, op.target, op.rows)
        if refusal is not None:
            self._lanes[op.target] = _Lane(blocked=refusal)
            return refusal
        source, first = self._lanes[op.source], op.rows if self.state_rows else 0
        self._lanes[op.target] = _Lane(source.tokens[: op.rows], first=first, root=source.root)
        return None

    def _write(self, segment: Segment) -> Refusal | None:
        refusal = self._lane_guard(segment.lane)
        if refusal is not None:
            return refusal
        refusal = (
            self._job_guard(segment)
            or self._gap_guard(segment.lane, segment.start)
            or self._state_guard(segment.lane, segment.lane, segment.start)
            or self._row_limit_guard(segment)
            or self._memo_guard(segment)
        )
        lane = self._lanes[segment.lane]
        if refusal is not None:
            lane.blocked = refusal
            return refusal
        del lane.tokens[segment.start :]
        lane.tokens.extend(segment.tokens)
        if self.state_rows:
            lane.first = max(min(lane.first, segment.start), segment.end - self.state_rows)
        if segment.memo is not None and segment.kind is SegmentKind.PREFILL:
            self.memos.keep(segment.memo, lane.tokens, lane.root)
        return None

    # The guards. Each is one method, so that a test can take one away and see the suite fail.

    def _epoch_guard(self, frame: Frame) -> Refusal | None:
        if frame.epoch == self.epoch:
            return None
        detail = f"frame of epoch {frame.epoch}, this is epoch {self.epoch}"
        return self._refuse(RefusalCode.STALE_EPOCH, None, detail)

    def _order_guard(self, frame: Frame) -> Refusal | None:
        if frame.seq <= self.next_seq:
            return None
        detail = f"frame {frame.seq} came where frame {self.next_seq} was due"
        return self._refuse(RefusalCode.FRAME_ORDER, None, detail)

    def _lane_guard(self, lane: LaneId) -> Refusal | None:
        if lane < self.lanes:
            return None
        detail = f"lane {lane} of {self.lanes}"
        return self._refuse(RefusalCode.BAD_FRAME, lane, detail)

    def _job_guard(self, segment: Segment) -> Refusal | None:
        lane = self._lanes[segment.lane]
        if lane.blocked is not None:
            return lane.blocked
        if lane.job != segment.job:
            detail = f"segment of job {segment.job} in a lane opened for {lane.job}"
            return self._refuse(RefusalCode.BAD_FRAME, segment.lane, detail)
        return None

    def _gap_guard(self, lane: LaneId, start: int) -> Refusal | None:
        if start <= self.valid_rows(lane):
            return None
        detail = f"starts at row {start}, but only {self.valid_rows(lane)} are valid"
        return self._refuse(RefusalCode.KV_GAP, lane, detail)

    def _node_guard(self, op: LoadNodes) -> Refusal | None:
        missing = self.nodes.missing(op.nodes)
        if missing:
            detail = f"{len(missing)} of {len(op.nodes)} nodes are not here"
            return self._refuse(RefusalCode.KV_GAP, op.lane, detail)
        last = op.nodes[-1]
        if self.state_rows and (
            last not in self.nodes.checkpoints or self.nodes[last].end != op.end
        ):
            detail = f"no recurrent state at row {op.end}"
            return self._refuse(RefusalCode.NO_STATE, op.lane, detail)
        fault = self.nodes.chain_fault(op)
        if fault is not None:
            return self._refuse(RefusalCode.BAD_FRAME, op.lane, fault)
        if op.end > self.max_rows:
            detail = f"loads up to row {op.end}, but a lane has {self.max_rows}"
            return self._refuse(RefusalCode.ROW_LIMIT, op.lane, detail)
        return None

    def _lead_guard(self, op: LoadNodes) -> Refusal | None:
        lane = self._lanes[op.lane]
        fault = self.nodes.lead_fault(op, lane.tokens, lane.root)
        return None if fault is None else self._refuse(RefusalCode.KV_CONTENT, op.lane, fault)

    def _state_guard(self, held: LaneId, refused: LaneId, rows: int) -> Refusal | None:
        """Recurrent layers go on only from where their state is known; before the first row it is."""
        if rows == 0 or rows >= self._lanes[held].first:
            return None
        detail = f"no recurrent state at row {rows}: the least is {self._lanes[held].first}"
        return self._refuse(RefusalCode.NO_STATE, refused, detail)

    def _content_guard(self, op: OpenLane) -> Refusal | None:
        ours = op.cached_prefix == 0 or self._lanes[op.lane].root == op.root
        if ours and self.digest(op.lane, op.cached_prefix) == op.prefix_digest:
            return None
        detail = f"the first {op.cached_prefix} rows hold other tokens than claimed"
        return self._refuse(RefusalCode.KV_CONTENT, op.lane, detail)

    def _memo_guard(self, segment: Segment) -> Refusal | None:
        if segment.kind is not SegmentKind.RECALL or segment.memo is None:
            return None
        lane = self._lanes[segment.lane]
        if self.memos.holds(segment.memo, lane.tokens[: segment.start], lane.root):
            return None
        detail = f"the logits of row {segment.start - 1} are not in slot {segment.memo}"
        return self._refuse(RefusalCode.KV_GAP, segment.lane, detail)

    def _row_limit_guard(self, segment: Segment) -> Refusal | None:
        if segment.end <= self.max_rows:
            return None
        detail = f"rows up to {segment.end}, but a lane has {self.max_rows}"
        return self._refuse(RefusalCode.ROW_LIMIT, segment.lane, detail)

    def _refuse(self, code: RefusalCode, lane: LaneId | None, detail: str) -> Refusal:
        return Refusal(code, self._stage, lane, detail)


def _lane(held: HeldLane) -> _Lane:
    return _Lane(held.tokens[:], first=held.first, root=held.root)
