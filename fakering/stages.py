"""One fake stage: a real ledger beside buffers of its own, and the same refusals as a stage with a model.

It decides, for one frame, what is refused, what is written and what goes on to the next stage; the tail makes
the reply. It knows neither time nor legs, and its buffers never learn from its ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from coordinator.applied import Applied, Standing
from coordinator.constraints import lets_any
from coordinator.frames import (
    CopyRows,
    DropNodes,
    Epoch,
    Frame,
    LaneId,
    LaneRows,
    LoadNodes,
    NodeId,
    Op,
    OpenLane,
    Refusal,
    RefusalCode,
    Reply,
    Segment,
    SegmentKind,
    SegmentReply,
    StageTiming,
    lanes_of,
)
from coordinator.held import Holding
from coordinator.ledger import Ledger
from fakering.faults import CorruptRow, KeepNothing, LoseNode, Refuse, Restart, StageFault, reopens
from fakering.model import FakeModel, Hashes, KeptRows, Rows, context_hashes


@dataclass(frozen=True, slots=True)
class Activations:
    """What a stage made of one segment's rows."""

    lane: LaneId
    values: Hashes


@dataclass(frozen=True, slots=True)
class Parcel:
    """What travels on a leg: the frame, and what the stages so far made of it and refused of it."""

    frame: Frame
    activations: tuple[Activations, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    lanes: tuple[LaneRows, ...] = ()
    timings: tuple[StageTiming, ...] = ()
    lost: tuple[NodeId, ...] = ()

    @property
    def is_refused(self) -> bool:
        return any(refusal.lane is None for refusal in self.refusals)

    def of_lane(self, lane: LaneId) -> Hashes | None:
        return next((made.values for made in self.activations if made.lane == lane), None)


class FakeStage:
    """Stage `index` of a ring. The first one embeds, so it alone meets token ids that do not exist."""

    def __init__(
        self,
        index: int,
        lanes: int,
        max_rows: int,
        model: FakeModel,
        host_rows: int = 0,
        state_rows: int = 0,
    ) -> None:
        self.index = index
        self.ledger = Ledger(lanes, max_rows, stage=index, state_rows=state_rows)
        self.rows = Rows(lanes, max_rows, state_rows)
        self.kept: dict[NodeId, KeptRows] = {}
        # What it has lost and not told anybody yet: it tells when it is asked for it.
        self.untold_lanes: set[LaneId] = set()
        self.untold_nodes: set[NodeId] = set()
        self._suspect = False  # some row may not be what its ledger says
        self._memos: dict[int, int] = {}  # the tail's: what it made of a prompt's last row
        self._model = model
        self._host_rows = host_rows

    def open_epoch(self, epoch: Epoch, held: Holding | None = None) -> None:
        """What all stages hold stays, or no row at all; the buffers keep bytes that nobody may read any more."""
        self.ledger.reset(epoch, held)
        self.untold_lanes.clear()
        self.untold_nodes.clear()
        if held is None:
            return
        nodes = self.ledger.nodes
        self.kept = {id_: rows for id_, rows in self.kept.items() if id_ in nodes}
        for id_ in self.kept.keys() - nodes.checkpoints:
            self.kept[id_] = replace(self.kept[id_], state=None)

    def holding(self) -> Holding:
        """What this stage could go on from: no node without bytes, and no row that a check of the bytes finds wrong."""
        nodes = self.ledger.nodes
        nodes.drop([node for node in nodes.ids() if node not in self.kept])
        nodes.checkpoints &= {node for node, kept in self.kept.items() if kept.state is not None}
        for lane in map(LaneId, range(self.ledger.lanes if self._suspect else 0)):
            self.ledger.truncate(lane, self._right_rows(lane))
        return self.ledger.holding()

    def _right_rows(self, lane: LaneId) -> int:
        rows = self.ledger.valid_rows(lane)
        wrong = self.rows.activations[lane, :rows] != context_hashes(self.rows.tokens[lane, :rows])
        return int(np.argmax(wrong)) if wrong.any() else rows

    def inherit(self, lost: FakeStage, part: float) -> None:
        """Takes over this part of a lost stage's nodes, and of their states: by their ids, so that all sorts of gaps
        come.
        """
        for node in lost.ledger.nodes.all():
            kept = lost.kept.get(node.id)
            if kept is None or node.id[0] >= 256 * part:
                continue
            keeps_state = kept.state is not None and node.id[1] < 256 * part
            self.ledger.nodes.add(node)
            self.kept[node.id] = kept if keeps_state else replace(kept, state=None)
            if keeps_state:
                self.ledger.nodes.checkpoints.add(node.id)

    def handle(self, parcel: Parcel, faults: Sequence[StageFault] = ()) -> Parcel | None:
        """What goes on to the next leg; None for a frame that was applied before."""
        frame = parcel.frame
        self._suffer(frame, faults)
        if parcel.is_refused:
            return replace(parcel, lanes=self._least(parcel))
        own = self._bad_tokens(frame) + _scripted(self.index, frame, faults)
        lost = self._find_lost(frame) if self._is_new(frame) else ()
        applied = self.ledger.apply(frame, (*parcel.refusals, *own))
        if applied.standing is Standing.APPLIED:
            return None
        refusals = (
            applied.refusals if applied.standing is Standing.REFUSED else own + applied.refusals
        )
        self._move(frame, applied)
        made = tuple(self._compute(segment, parcel) for segment in applied.segments)
        refusals = (*parcel.refusals, *refusals)
        lost += applied.lost + self._keep(applied, faults)
        lost = tuple(dict.fromkeys((*parcel.lost, *lost)))
        self.untold_nodes.difference_update(lost)
        if applied.standing is Standing.NEW:
            self.untold_lanes.difference_update(_touched(frame))
        lanes = self._least(parcel)
        return replace(parcel, activations=made, refusals=refusals, lanes=lanes, lost=lost)

    def reply(self, parcel: Parcel) -> Reply:
        """The tail's answer. Tokens come from this stage's own rows and the activations that it made."""
        frame = parcel.frame
        segments = tuple(self._sampled(segment, parcel) for segment in frame.segments)
        return Reply(
            frame.epoch,
            frame.seq,
            segments,
            parcel.lanes,
            parcel.refusals,
            parcel.timings,
            parcel.lost,
        )

    # Chain nodes

    def _find_lost(self, frame: Frame) -> tuple[NodeId, ...]:
        """Nodes that the frame wants and whose bytes are gone: the ledger is told before it is asked."""
        wanted = (node for op in frame.ops if isinstance(op, LoadNodes) for node in op.nodes)
        lost = tuple(node for node in wanted if node in self.ledger.nodes and node not in self.kept)
        self.ledger.nodes.drop(lost)
        return lost

    def _move(self, frame: Frame, applied: Applied) -> None:
        for move in applied.moves:
            if isinstance(move, CopyRows):
                self.rows.copy(move.source, move.target, move.rows)
                continue
            for kept in (self.kept[node] for node in move.nodes):
                start, end = max(move.start, kept.start), min(move.end, kept.end)
                self.rows.restore(move.lane, start, end, kept)
        if applied.standing is Standing.NEW:
            for op in frame.ops:
                if isinstance(op, DropNodes):
                    self._drop(op)

    def _drop(self, op: DropNodes) -> None:
        for node in op.nodes:
            self.kept.pop(node, None)
        for node in op.checkpoints:
            if node in self.kept:
                self.kept[node] = replace(self.kept[node], state=None)

    def _keep(self, applied: Applied, faults: Sequence[StageFault]) -> tuple[NodeId, ...]:
        """Copies what became nodes; returns those that there is no room for."""
        lost: list[NodeId] = []
        room = self._host_rows - sum(kept.end - kept.start for kept in self.kept.values())
        if any(isinstance(fault, KeepNothing) for fault in faults):
            room = 0
        for op in applied.stores:
            for span in op.spans:
                wanted = 0 if span.node in self.kept else span.end - span.start
                if wanted > room:
                    lost.append(span.node)
                    continue
                room -= wanted
                self.kept[span.node] = self.rows.save(
                    op.lane, span.start, span.end, state=span.checkpoint
                )
        self.ledger.nodes.drop(lost)
        return tuple(lost)

    # Rows

    def _compute(self, segment: Segment, parcel: Parcel) -> Activations:
        received = None if self.index == 0 else parcel.of_lane(segment.lane)
        made = self.rows.write_and_read(segment.lane, segment.start, segment.tokens, received)
        return Activations(segment.lane, made)

    def _sampled(self, segment: Segment, parcel: Parcel) -> SegmentReply:
        made = parcel.of_lane(segment.lane)
        if made is None or parcel.is_refused:
            return SegmentReply(segment.lane, segment.job, segment.start, refused=True)
        spec = segment.sampling
        if spec is None:
            return SegmentReply(segment.lane, segment.job, segment.start)
        tokens, logprobs = [], []
        masks = segment.masks or (b"",) * len(segment.sampled_rows)
        for row, mask in zip(segment.sampled_rows, masks, strict=True):
            activation = self._activation(segment, made, row)
            history = self.rows.history(segment.lane, row)
            tokens.append(self._model.choose(activation, history, spec, mask))
            if spec.logprobs is not None:
                logprobs.append(self._model.logprobs(activation, tokens[-1], spec.logprobs))
        return SegmentReply(
            segment.lane, segment.job, segment.start, tuple(tokens), tuple(logprobs)
        )

    def _activation(self, segment: Segment, made: Hashes, row: int) -> int:
        """From a memo, or made now, and left as one where the segment says so."""
        if segment.kind is SegmentKind.RECALL:
            assert segment.memo is not None
            return self._memos[segment.memo]
        activation = int(made[row - segment.start])
        if segment.memo is not None:
            self._memos[segment.memo] = activation
        return activation

    def _least(self, parcel: Parcel) -> tuple[LaneRows, ...]:
        before = {known.lane: known.valid_rows for known in parcel.lanes}
        return tuple(
            LaneRows(lane, min(self.ledger.valid_rows(lane), before.get(lane, 1 << 62)))
            for lane in _touched(parcel.frame)
            if lane < self.ledger.lanes
        )

    def _bad_tokens(self, frame: Frame) -> tuple[Refusal, ...]:
        if self.index > 0:
            return ()
        return tuple(
            Refusal(
                RefusalCode.BAD_FRAME,
                self.index,
                segment.lane,
                f"tokens or masks for another vocabulary than that of {self._model.vocab_size}",
            )
            for segment in frame.segments
            if self._is_outside(segment)
        )

    def _is_outside(self, segment: Segment) -> bool:
        size = self._model.vocab_size
        known = max(segment.tokens, default=0) < size
        return not (known and all(lets_any(mask, size) for mask in segment.masks))

    def _suffer(self, frame: Frame, faults: Sequence[StageFault]) -> None:
        for fault in faults:
            if isinstance(fault, Restart):
                self.untold_lanes.update(map(LaneId, range(self.ledger.lanes)))
                self.untold_nodes.update(self.ledger.nodes.ids())
                self.rows.wipe()
                self.kept.clear()
                self.ledger.nodes.drop(self.ledger.nodes.ids())
                for lane in range(self.ledger.lanes):
                    self.ledger.truncate(LaneId(lane), 0)
            elif isinstance(fault, LoseNode):
                loaded = [n for op in frame.ops if isinstance(op, LoadNodes) for n in op.nodes]
                self.kept.pop(loaded[fault.which % len(loaded)], None)
            elif isinstance(fault, CorruptRow) and self._is_new(frame):
                self._corrupt(fault, next(op for op in frame.ops if reopens(op)))

    def _is_new(self, frame: Frame) -> bool:
        """Only a frame that is going to be applied has its claims checked."""
        return (frame.epoch, frame.seq) == (self.ledger.epoch, self.ledger.next_seq)

    def _corrupt(self, fault: CorruptRow, op: Op) -> None:
        if not isinstance(op, OpenLane) or op.lane >= self.ledger.lanes:
            return
        row = fault.row % op.cached_prefix
        if row >= self.ledger.valid_rows(op.lane):
            return
        self._suspect = True
        self.rows.tokens[op.lane, row] ^= np.uint64(1)
        if fault.in_ledger:
            # No frame can say this, so it has no method of the ledger.
            self.ledger._lanes[op.lane].tokens[row] ^= 1


def _touched(frame: Frame) -> tuple[LaneId, ...]:
    ops = lanes_of(frame.ops)
    return tuple(dict.fromkeys((*ops, *(segment.lane for segment in frame.segments))))


def _scripted(stage: int, frame: Frame, faults: Sequence[StageFault]) -> tuple[Refusal, ...]:
    code = next((fault.code for fault in faults if isinstance(fault, Refuse)), None)
    if code is None:
        return ()
    return tuple(Refusal(code, stage, lane, "scripted") for lane in _touched(frame))
