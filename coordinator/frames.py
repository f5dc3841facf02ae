"""Frames and replies: the unit of work that goes down the ring, and the tail's answer.

Everything that changes a stage's rows is a frame, and every stage applies the same frames in the
same order. This file decides what a frame may say; whether a lane can take it is the ledger's
business. Illegal frames do not construct (ValueError): a stage that decodes one answers BAD-FRAME.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from coordinator.constraints import lets_any
from coordinator.requests import RowLogprobs, SamplingSpec

JobId = NewType("JobId", int)
LaneId = NewType("LaneId", int)
Epoch = NewType("Epoch", int)
Seq = NewType("Seq", int)

# Coordinator and stages may come from different wheels; a ring refuses to start on another number.
PROTOCOL_VERSION = 4

NodeId = NewType("NodeId", bytes)

DIGEST_BYTES = 16  # 128 bits: a clash would need 2**64 prefixes

NO_ROOT = NodeId(b"")  # of rows that never were anybody's

MOST_MEMOS = 1 << 16  # slots; a bound for frames that nobody of ours has made


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_ids(nodes: tuple[NodeId, ...]) -> None:
    _require(all(len(node) == DIGEST_BYTES for node in nodes), "a node id has a wrong length")


@dataclass(frozen=True, slots=True)
class OpenLane:
    """Gives a lane to a job: its first `cached_prefix` rows stay valid, all others become void.

    `prefix_digest` is ledger.digest_of() of the token ids that those rows are claimed to hold, `root` that of the chain
    that they would be: the job's model and tenant. Rows of another root are none of the job's.
    """

    lane: LaneId
    job: JobId
    cached_prefix: int
    prefix_digest: bytes
    root: NodeId = NO_ROOT

    def __post_init__(self) -> None:
        _require(self.lane >= 0, "lane is negative")
        _require(self.cached_prefix >= 0, "cached_prefix is negative")
        _require(len(self.prefix_digest) == DIGEST_BYTES, "prefix_digest has a wrong length")
        _require(len(self.root) in (0, DIGEST_BYTES), "root has a wrong length")


@dataclass(frozen=True, slots=True)
class CopyRows:
    """Copies rows [0, rows) of lane `source` to lane `target`; the target holds nothing else
    afterwards.
    """

    source: LaneId
    target: LaneId
    rows: int

    def __post_init__(self) -> None:
        _require(self.source >= 0 and self.target >= 0, "lane is negative")
        _require(self.source != self.target, "a lane is copied onto itself")
        _require(self.rows > 0, "copies no rows")


@dataclass(frozen=True, slots=True)
class LoadNodes:
    """Brings rows [start, end) of a lane from chain nodes, given in their order: the first one holds row
    `start`, the last one row `end - 1`. Rows before `start` must be there, and be those of the nodes' ancestors.
    With recurrent layers the last one must end at `end` and have a checkpoint, which is loaded too.
    """

    lane: LaneId
    start: int
    end: int
    nodes: tuple[NodeId, ...]

    def __post_init__(self) -> None:
        _require(self.lane >= 0, "lane is negative")
        _require(0 <= self.start < self.end, "loads no rows")
        _require(len(self.nodes) > 0, "loads no nodes")
        _require_ids(self.nodes)


@dataclass(frozen=True, slots=True)
class DropNodes:
    """Takes nodes out of every stage's store, and of others only the checkpoint; unknown ones are ignored."""

    nodes: tuple[NodeId, ...]
    checkpoints: tuple[NodeId, ...] = ()

    def __post_init__(self) -> None:
        _require_ids((*self.nodes, *self.checkpoints))


Op = OpenLane | CopyRows | LoadNodes | DropNodes


def lanes_of(ops: Iterable[Op]) -> Iterator[LaneId]:
    """The lanes that the ops change."""
    for op in ops:
        if isinstance(op, CopyRows):
            yield op.target
        elif not isinstance(op, DropNodes):
            yield op.lane


@dataclass(frozen=True, slots=True)
class NodeSpan:
    """A chain node to be: rows [start, end) of a lane, under a parent whose rows end at `start`."""

    node: NodeId
    parent: NodeId  # a root for start == 0
    start: int
    end: int
    checkpoint: bool = (
        False  # keeps the recurrent state at `end` as well, also of a node that is there already
    )

    def __post_init__(self) -> None:
        _require_ids((self.node, self.parent))
        _require(0 <= self.start < self.end, "a node without rows")


@dataclass(frozen=True, slots=True)
class StoreNodes:
    """Keeps copies of a lane's rows as chain nodes, after the frame's segments. What a stage cannot keep, it
    reports as lost; the lane is never refused for it. Nodes that are there already stay as they are.
    """

    lane: LaneId
    spans: tuple[NodeSpan, ...]

    def __post_init__(self) -> None:
        _require(self.lane >= 0, "lane is negative")
        _require(len(self.spans) > 0, "stores no nodes")


class SegmentKind(StrEnum):
    PREFILL = "prefill"  # samples nothing, or the last row only
    VERIFY = "verify"  # [anchor] + drafts: samples every row
    RECALL = "recall"  # computes nothing: samples from the logits that were kept of the row before `start`


@dataclass(frozen=True, slots=True)
class Segment:
    """Writes rows [start, end) of one lane with `tokens`; each row reads the rows up to itself.

    `memo` is a slot of the tail: a PREFILL leaves its last row's logits there, a RECALL samples from them.
    `masks`: what may be sampled at each sampled row, as in constraints.Constraint; none: anything at all of them.
    """

    lane: LaneId
    job: JobId
    start: int
    tokens: tuple[int, ...]
    kind: SegmentKind
    sampling: SamplingSpec | None = None  # None on a PREFILL: samples nothing
    prompt_tokens: int = 0  # rows from here on hold generated tokens; penalties tell them apart
    memo: int | None = None
    masks: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        _require(self.lane >= 0, "lane is negative")
        _require(self.start >= 0, "start is negative")
        _require(min(self.tokens, default=0) >= 0, "token id is negative")
        _require(max(self.tokens, default=0) < 1 << 31, "token id is too large")
        _require(
            self.sampling is not None or self.kind is SegmentKind.PREFILL,
            "a segment that samples needs a sampling spec",
        )
        self._require_memo()
        if self.masks:
            _require(len(self.masks) == len(self.sampled_rows), "masks are not one a sampled row")
            _require(all(lets_any(mask) for mask in self.masks), "a mask lets nothing follow")

    def _require_memo(self) -> None:
        if self.kind is SegmentKind.RECALL:
            _require(not self.tokens, "a RECALL segment computes no row")
            _require(self.start > 0 and self.memo is not None, "a RECALL segment of nothing")
        else:
            _require(len(self.tokens) > 0, "segment is empty")
        if self.memo is not None:
            _require(0 <= self.memo < MOST_MEMOS, "no such memo slot")
            _require(self.sampling is not None, "a segment without logits names a memo slot")
            _require(self.kind is not SegmentKind.VERIFY, "a VERIFY segment names a memo slot")

    @property
    def width(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def sampled_rows(self) -> range:
        """The rows, by their number in the lane, at which a token is sampled."""
        if self.sampling is None:
            return range(self.end, self.end)
        if self.kind is SegmentKind.RECALL:
            return range(self.start - 1, self.start)
        first = self.start if self.kind is SegmentKind.VERIFY else self.end - 1
        return range(first, self.end)


@dataclass(frozen=True, slots=True)
class Frame:
    epoch: Epoch
    seq: Seq
    ops: tuple[Op, ...] = ()
    segments: tuple[Segment, ...] = ()
    # Sent into an empty ring, with nothing to follow it before its reply: stages of one host may use each
    # other's cores for it. It changes no row, and a stage that does not know of it loses time only.
    alone: bool = False
    after: tuple[StoreNodes, ...] = ()  # ops that follow the segments

    def __post_init__(self) -> None:
        _require(self.epoch >= 0 and self.seq >= 0, "epoch or seq is negative")
        lanes = [segment.lane for segment in self.segments]
        _require(len(lanes) == len(set(lanes)), "a frame has two segments of one lane")

    @property
    def rows(self) -> int:
        return sum(segment.width for segment in self.segments)


class RefusalCode(StrEnum):
    KV_GAP = "KV-GAP"
    KV_CONTENT = "KV-CONTENT"
    FRAME_ORDER = "FRAME-ORDER"
    STALE_EPOCH = "STALE-EPOCH"
    ROW_LIMIT = "ROW-LIMIT"
    NO_STATE = "NO-STATE"
    BAD_FRAME = "BAD-FRAME"


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a stage would not do, and where. Without a lane the whole frame was refused."""

    code: RefusalCode
    stage: int
    lane: LaneId | None
    detail: str


@dataclass(frozen=True, slots=True)
class SegmentReply:
    """The tokens sampled at the segment's asked rows, in row order; none when the segment was
    refused.
    """

    lane: LaneId
    job: JobId
    start: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[RowLogprobs, ...] = ()
    refused: bool = False


@dataclass(frozen=True, slots=True)
class LaneRows:
    """How many rows of the lane every stage holds after the frame (the least over the stages)."""

    lane: LaneId
    valid_rows: int


@dataclass(frozen=True, slots=True)
class StageTiming:
    """Seconds that a frame waited at a stage, was computed there, and was decoded, copied and sent
    on.
    """

    stage: int
    queue_s: float = 0.0
    compute_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reply:
    epoch: Epoch
    seq: Seq
    segments: tuple[SegmentReply, ...] = ()
    lanes: tuple[LaneRows, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    timings: tuple[StageTiming, ...] = ()
    lost: tuple[NodeId, ...] = ()  # nodes that some stage does not have, or could not keep

    def refusal_of(self, lane: LaneId) -> Refusal | None:
        return next((refusal for refusal in self.refusals if refusal.lane == lane), None)
