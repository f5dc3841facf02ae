"""One stage: takes a frame, refuses or computes it, and says what the next stage or the coordinator gets.

Decides the order of things: check the message, apply the frame to the ledger, then the ops, then all taken segments
in one call of the slice, on the tail sampling, and last the nodes to be stored. Every row it computes was taken by
its own ledger first. It may not decide what is refused (the ledger does) nor how messages travel. A frame never ends
it; an error in computing does, since the rows behind it are then unknown.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from coordinator.applied import Applied, Standing
from coordinator.constraints import lets_any
from coordinator.errors import InvalidValue
from coordinator.frames import (
    Epoch,
    Frame,
    LaneId,
    LaneRows,
    Refusal,
    RefusalCode,
    Reply,
    Segment,
    SegmentReply,
    StageTiming,
    lanes_of,
)
from coordinator.held import Holding
from coordinator.ledger import Ledger
from stage.attention import RowSegment
from stage.cores import Cores
from stage.kv.checkpoints import Checkpoints
from stage.kv.mirror import Key, Record
from stage.kv.store import HostStore
from stage.memos import Memos
from stage.messages import FrameMessage, Garbled, ReplyMessage
from stage.model.slice import ModelSlice, RowBatch
from stage.ops import FrameOps, joined
from stage.sampling import (
    AskedRow,
    History,
    NotFinite,
    SampledRow,
    check_spec,
    reads_history,
    sample_rows,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Waited:
    """Seconds that a message waited for this stage, and those that it was on its way and being decoded."""

    queue_s: float = 0.0
    transfer_s: float = 0.0


class Stage:
    """One replica: ledger, slice and nodes. One thread processes; `open_epoch` may come from another one."""

    def __init__(
        self,
        index: int,
        model: ModelSlice,
        cores: Cores,
        store: HostStore,
        checkpoints: Checkpoints,
        memos: Memos,
    ) -> None:
        self.index = index
        self.model = model
        self._cores = cores
        self.store = store
        self.ledger = Ledger(model.rows.lanes, model.rows.max_rows, stage=index)
        self._memos = memos
        if model.decoder.is_tail:
            self.ledger.memos.slots = memos.slots
        self._ops = FrameOps(self.ledger, model, store, checkpoints)
        self._opened = Epoch(0)
        self.is_new = True  # no epoch was opened here yet
        self._lock = Lock()

    def join(self, state_rows: int) -> None:
        """Learns before its first frame what holds for the whole ring: RingInfo.state_rows."""
        self.ledger.state_rows = state_rows

    def holding(self) -> Holding:
        """What this stage could go on from. Waits for the frame being computed."""
        with self._lock:
            return self._ops.holding()

    def open_epoch(self, epoch: Epoch, held: Holding | None = None) -> None:
        """Begins an epoch with what all stages hold; None: every row is void. Waits for the frame being computed;
        those that wait behind it are dropped.
        """
        self._opened = epoch
        self.is_new = False
        with self._lock:
            if held is not None:
                self._ops.keep_only(held)
            self.ledger.reset(epoch, held)

    @property
    def stored_bytes(self) -> int:
        """Of nodes in host memory. Any thread may ask."""
        return self._ops.stored_bytes

    def lacks(self, key: Key) -> bool:
        """Whether it could be taken back."""
        with self._lock:
            return self._ops.lacks(key)

    def take_back(self, record: Record) -> bool:
        """Keeps what a neighbour kept for the stage that was here before."""
        with self._lock:
            return self._ops.take_back(record)

    def close(self) -> None:
        """Called when the last frame was processed: what is to outlive the stage gets a moment to reach the disk."""
        self.store.close()

    def process(
        self, message: FrameMessage | Garbled, waited: Waited = Waited()
    ) -> FrameMessage | ReplyMessage | None:
        """What goes on from here; None when the frame is void or was applied before."""
        with self._lock:
            if message.opened != self._opened:
                log.debug("dropped stage=%d epoch=%d", self.index, message.opened)
                return None
            if isinstance(message, Garbled):
                message = _unread(message, self.index)
            started = time.perf_counter()
            outcome = self._take(message)
            if outcome is None:
                return None
            spent = time.perf_counter() - started
            timing = StageTiming(self.index, waited.queue_s, spent, waited.transfer_s)
            return _with_timing(outcome, timing, self.model.decoder.is_tail)

    def _take(self, message: FrameMessage) -> FrameMessage | ReplyMessage | None:
        frame = message.frame
        refusals = message.refusals if message.refused_whole else self._check(message)
        if _is_whole(refusals):
            return self._refuse(message, refusals)
        gone = self._ops.prepare(frame)
        applied = self.ledger.apply(frame, refusals)
        if applied.standing is Standing.APPLIED:
            log.debug("ignored stage=%d epoch=%d seq=%d", self.index, frame.epoch, frame.seq)
            return None
        refusals += applied.refusals
        if applied.standing is Standing.REFUSED:
            return self._refuse(message, refusals)
        self._ops.run(frame, applied, {refusal.lane for refusal in refusals})
        lost = joined(message.lost, gone, applied.lost)
        message = replace(message, refusals=refusals, lost=lost)
        output = self._compute(message, applied.segments)
        if self.model.decoder.is_tail:
            return self._reply(message, applied, output)
        computed = tuple(segment.lane for segment in applied.segments)
        lost = joined(lost, self._ops.store(applied.stores, ()))
        return replace(
            message, lanes=self._least(message), lost=lost, computed=computed, hidden=output
        )

    def _refuse(self, message: FrameMessage, refusals: tuple[Refusal, ...]) -> FrameMessage:
        """The whole frame goes on to the tail without rows, for the coordinator to hear of it."""
        lanes = self._least(message)
        lost = joined(message.lost, self._ops.unknown(message.frame))
        return replace(message, refusals=refusals, lanes=lanes, lost=lost, computed=(), hidden=None)

    # What the ledger cannot know

    def _check(self, message: FrameMessage) -> tuple[Refusal, ...]:
        """The refusals so far and those that this stage adds before it asks its ledger."""
        added: list[Refusal] = []
        if self.model.decoder.is_head:
            added.extend(self._check_tokens(message.frame))
        detail = self._check_hidden(message)
        if detail is not None:
            added.append(Refusal(RefusalCode.BAD_FRAME, self.index, None, detail))
        return (*message.refusals, *added)

    def _check_tokens(self, frame: Frame) -> Iterator[Refusal]:
        for segment in frame.segments:
            detail = _outside(segment, self.model.decoder.vocab_size)
            if detail is not None:
                yield Refusal(RefusalCode.BAD_FRAME, self.index, segment.lane, detail)

    def _check_hidden(self, message: FrameMessage) -> str | None:
        """Hidden rows belong to the segments that the stages before computed, neither more nor fewer."""
        if self.model.decoder.is_head:
            clean = message.hidden is None and not message.computed
            return None if clean else "hidden rows came to the first stage"
        refused = {refusal.lane for refusal in message.refusals}
        segments = message.frame.segments
        wanted = tuple(segment.lane for segment in segments if segment.lane in message.computed)
        missing = [
            s.lane for s in segments if s.lane not in message.computed and s.lane not in refused
        ]
        rows = sum(segment.width for segment in segments if segment.lane in message.computed)
        shape = None if message.hidden is None else tuple(message.hidden.shape)
        expected = (rows, self.model.decoder.hidden_size) if rows else None
        if wanted != message.computed or missing or shape != expected:
            return f"hidden rows {shape} for lanes {message.computed}, expected {expected}"
        return None

    # What is computed

    def _compute(self, message: FrameMessage, taken: tuple[Segment, ...]) -> Tensor | None:
        """Hidden rows, or on the tail logits of the asked rows; None when there is nothing to compute."""
        taken = tuple(segment for segment in taken if segment.width)
        if not taken:
            return None
        batch = RowBatch(
            token_ids=tuple(token for segment in taken for token in segment.tokens),
            segments=tuple(RowSegment(s.lane, s.start, s.width) for s in taken),
            asked=tuple(_asked(taken)) if self.model.decoder.is_tail else (),
        )
        self._cores.use(message.frame.alone)
        output = self.model.forward(batch, _select(message, taken))
        return output.hidden if output.logits is None else output.logits

    def _least(self, message: FrameMessage) -> tuple[LaneRows, ...]:
        """For each lane that the frame touches, the least valid rows of the stages so far."""
        before = {lane.lane: lane.valid_rows for lane in message.lanes}
        rows = {
            lane: self.ledger.valid_rows(lane)
            for lane in _touched(message.frame)
            if lane < self.ledger.lanes
        }
        return tuple(LaneRows(lane, min(n, before.get(lane, n))) for lane, n in rows.items())

    def _reply(
        self, message: FrameMessage, applied: Applied, logits: Tensor | None
    ) -> ReplyMessage:
        frame = message.frame
        sampled, added = self._sample(applied.segments, logits)
        refusals = (*message.refusals, *added)
        lost = self._ops.store(applied.stores, {refusal.lane for refusal in added})
        segments = tuple(_segment_reply(s, sampled.get(s.lane)) for s in frame.segments)
        lanes = self._least(message)
        reply = Reply(
            frame.epoch,
            frame.seq,
            segments,
            lanes,
            refusals,
            message.timings,
            joined(message.lost, lost),
        )
        return ReplyMessage(message.opened, reply)

    def _sample(
        self, taken: tuple[Segment, ...], logits: Tensor | None
    ) -> tuple[dict[LaneId, list[SampledRow]], list[Refusal]]:
        """The sampled rows by lane; a lane whose logits are not finite is refused and its rows are void."""
        logits = self._memos.sampled(taken, logits)
        sampled: dict[LaneId, list[SampledRow]] = {segment.lane: [] for segment in taken}
        asked = [(segment, row) for segment in taken for row in self._asked_rows(segment)]
        if logits is None or not asked:
            return sampled, []
        try:
            rows = sample_rows(logits, [row for _, row in asked])
        except NotFinite as error:
            bad = {asked[row][0].lane for row in error.rows}
            keep = [n for n, (segment, _) in enumerate(asked) if segment.lane not in bad]
            asked = [asked[n] for n in keep]
            rows = sample_rows(logits[keep], [row for _, row in asked])
            refusals = [self._void(s) for s in taken if s.lane in bad]
            sampled = {lane: [] for lane in sampled if lane not in bad}
        else:
            refusals = []
        for (segment, _), row in zip(asked, rows, strict=True):
            sampled[segment.lane].append(row)
        return sampled, refusals

    def _void(self, segment: Segment) -> Refusal:
        self.ledger.truncate(segment.lane, segment.start)
        if segment.memo is not None:
            self.ledger.memos.drop(segment.memo)
        detail = "the model's logits are not finite"
        log.error("refused stage=%d lane=%d reason=%s", self.index, segment.lane, detail)
        return Refusal(RefusalCode.BAD_FRAME, self.index, segment.lane, detail)

    def _asked_rows(self, segment: Segment) -> Iterator[AskedRow]:
        spec = segment.sampling
        if spec is None:
            return
        history: History = ()
        if reads_history(spec):
            # Once a segment: a context has many rows, and a verify segment samples each of its own.
            history = np.array(self.ledger.tokens(segment.lane, segment.end), dtype=np.int64)
        masks = segment.masks or (b"",) * len(segment.sampled_rows)
        for row, mask in zip(segment.sampled_rows, masks, strict=True):
            yield AskedRow(row + 1, spec, history, segment.prompt_tokens, mask)


def _unread(garbled: Garbled, index: int) -> FrameMessage:
    log.warning(
        "refused stage=%d epoch=%d seq=%d reason=%s",
        index,
        garbled.epoch,
        garbled.seq,
        garbled.detail,
    )
    refusal = Refusal(RefusalCode.BAD_FRAME, index, None, garbled.detail)
    return FrameMessage(garbled.opened, Frame(garbled.epoch, garbled.seq), (refusal,))


def _is_whole(refusals: tuple[Refusal, ...]) -> bool:
    return any(refusal.lane is None for refusal in refusals)


def _outside(segment: Segment, vocab_size: int) -> str | None:
    """What in the segment only a larger vocabulary could mean."""
    largest = max(segment.tokens, default=0)
    if largest >= vocab_size:
        return f"token id {largest}, but the vocabulary has {vocab_size}"
    try:
        if segment.sampling is not None:
            check_spec(segment.sampling, vocab_size)
    except InvalidValue as error:
        return str(error)
    if not all(lets_any(mask, vocab_size) for mask in segment.masks):
        return f"a mask lets none of the vocabulary's {vocab_size} tokens follow"
    return None


def _with_timing(
    outcome: FrameMessage | ReplyMessage, timing: StageTiming, is_tail: bool
) -> FrameMessage | ReplyMessage:
    if isinstance(outcome, ReplyMessage):
        reply = outcome.reply
        return replace(outcome, reply=replace(reply, timings=(*reply.timings, timing)))
    timings = (*outcome.timings, timing)
    if not is_tail:
        return replace(outcome, timings=timings)
    frame = outcome.frame
    segments = tuple(SegmentReply(s.lane, s.job, s.start, refused=True) for s in frame.segments)
    reply = Reply(
        frame.epoch, frame.seq, segments, outcome.lanes, outcome.refusals, timings, outcome.lost
    )
    return ReplyMessage(outcome.opened, reply)


def _touched(frame: Frame) -> tuple[LaneId, ...]:
    ops = lanes_of(frame.ops)
    return tuple(dict.fromkeys((*ops, *(segment.lane for segment in frame.segments))))


def _asked(taken: tuple[Segment, ...]) -> Iterator[int]:
    """The sampled rows' places in the batch."""
    offset = 0
    for segment in taken:
        yield from (offset + row - segment.start for row in segment.sampled_rows)
        offset += segment.width


def _select(message: FrameMessage, taken: tuple[Segment, ...]) -> Tensor | None:
    """The hidden rows of the taken segments: a lane that only this stage refused came with rows to drop."""
    if message.hidden is None or len(taken) == len(message.computed):
        return message.hidden
    computed = [s for s in message.frame.segments if s.lane in message.computed]
    parts = message.hidden.split([segment.width for segment in computed])
    kept = zip(computed, parts, strict=True)
    return torch.cat([part for segment, part in kept if segment in taken])


def _segment_reply(segment: Segment, sampled: list[SampledRow] | None) -> SegmentReply:
    if sampled is None:
        return SegmentReply(segment.lane, segment.job, segment.start, refused=True)
    return SegmentReply(
        segment.lane,
        segment.job,
        segment.start,
        tuple(row.token for row in sampled),
        tuple(row.logprobs for row in sampled if row.logprobs is not None),
    )
