"""What a coordinator may reuse, told from its frames and their replies: a second opinion on every opening.

It keeps lanes, chains and memos of its own, in plain lists and by brute force, and asks neither ledger nor index. For
each lane that is opened it says how deep the prompt's rows lie at most, in place, by copy or in chain nodes, and how
deep they must be reused at least: less only by fewer rows than are worth a copy. Where a refusal makes it doubtful what
a lane still holds, that lane counts for the most and not for the least. Raises Breach; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from coordinator.foresight import AHEAD
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
    Reply,
    Segment,
    SegmentKind,
    Seq,
)
from coordinator.held import Holding
from fakering.truth import require

_Key: TypeAlias = tuple[Epoch, Seq]


@dataclass(frozen=True, slots=True)
class Asked:
    """Of a job: what its lane is to hold, and whether rows may be reused for it."""

    context: tuple[int, ...]
    reuse: bool
    ended: bool


@dataclass(slots=True)
class _Lane:
    tokens: list[int] = field(default_factory=list)
    root: NodeId = NO_ROOT
    first: int = 0
    doubtful: bool = False
    until: Seq = Seq(0)  # and stays so whatever comes of frames before this one


@dataclass(frozen=True, slots=True)
class _Node:
    parent: NodeId
    start: int
    tokens: tuple[int, ...]
    made: _Key | None = None  # by which frame; None: in an epoch before
    acked: bool = False
    state: bool = False  # asked for
    state_acked: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(slots=True)
class _Memo:
    prompt: tuple[int, ...]
    root: NodeId
    doubtful: bool = False


class Reference:
    def __init__(
        self,
        lanes: int,
        state_rows: int,
        min_copy_rows: int,
        asked: Callable[[JobId], Asked],
    ) -> None:
        self._state_rows = state_rows
        self._slack = min_copy_rows - 1
        self._asked = asked
        self._lanes = [_Lane() for _ in range(lanes)]
        self._nodes: dict[NodeId, _Node] = {}
        self._memos: dict[int, _Memo] = {}
        # Dropped, by which frame if any yet, and not known to be gone everywhere; and the same of their checkpoints.
        self._given_up: dict[NodeId, _Key | None] = {}
        self._bare: dict[NodeId, _Key] = {}
        self._flight: dict[_Key, Frame] = {}
        # Jobs of this epoch, and how deep each was opened last.
        self.opened: dict[JobId, int] = {}
        self._refused: dict[JobId, int] = {}  # and how deep nodes reached then

    # What happens

    def sent(self, frame: Frame) -> None:
        """Raises Breach where an opening is none that should be."""
        self._flight[frame.epoch, frame.seq] = frame
        for op in frame.ops:
            if isinstance(op, DropNodes):
                self._drop(op, (frame.epoch, frame.seq))
        openings = [op for op in frame.ops if isinstance(op, OpenLane) and op.job != AHEAD]
        for op in openings:
            self._judge(op)
        for op in frame.ops:
            if isinstance(op, CopyRows):
                self._copy(op)
            elif isinstance(op, LoadNodes):
                self._load(op)
            elif isinstance(op, OpenLane):
                self._open(op)
        for segment in frame.segments:
            self._write(segment)
        self._store(frame)

    def answered(self, reply: Reply) -> bool:
        """Whether it is the reply that was due, and of a frame that was not refused as a whole."""
        key = (reply.epoch, reply.seq)
        if key != next(iter(self._flight), None):
            return False
        if any(refusal.lane is None for refusal in reply.refusals):
            return False
        frame = self._flight.pop(key)
        self._lose(reply.lost)
        self._confirm(frame)
        opened = [op.lane for op in frame.ops if isinstance(op, OpenLane)]
        self._given_up = {node: by for node, by in self._given_up.items() if by != key}
        self._bare = {node: by for node, by in self._bare.items() if by != key}
        for lane in opened:
            if frame.seq >= self._lanes[lane].until:
                self._lanes[lane].doubtful = False
        for refusal in reply.refusals:
            if refusal.lane is not None:
                self._doubt(refusal.lane, frame)
        return True

    def ended(self) -> None:
        """An epoch is over: no reply of it counts any more."""
        self._flight.clear()
        self.opened.clear()

    def begun(self, held: Holding, *, trusted: bool) -> None:
        """An epoch begins. `trusted`: rows of lanes may be gone on from."""
        self.ended()
        self._memos.clear()
        self._refused.clear()
        for number in range(len(self._lanes)):
            left = held.lane(number)
            self._lanes[number] = _Lane()
            if trusted and len(left.tokens):
                self._lanes[number] = _Lane(list(left.tokens), left.root, left.first)
        ids = {node.id for node in held.nodes}
        self._given_up = {node: None for node in self._given_up if node in ids}
        self._bare = {node: by for node, by in self._bare.items() if node in held.checkpoints}
        self._nodes = {}
        for node in held.nodes:
            if node.id not in self._given_up:
                state = node.id in held.checkpoints and node.id not in self._bare
                known = _Node(node.parent, node.start, tuple(node.tokens), None, True, state, state)
                self._nodes[node.id] = known

    def forget(self) -> None:
        """A new coordinator, which knows of nothing that was given up."""
        self._given_up.clear()
        self._bare.clear()

    # What may be asked

    @property
    def given_up(self) -> frozenset[NodeId]:
        return frozenset(self._given_up)

    @property
    def nodes(self) -> frozenset[NodeId]:
        return frozenset(self._nodes)

    def lane(self, lane: LaneId) -> tuple[int, ...] | None:
        """The tokens of its rows; None where that is doubtful."""
        known = self._lanes[lane]
        return None if known.doubtful else tuple(known.tokens)

    def depth(self, context: Sequence[int], root: NodeId, *, sure: bool = True) -> int:
        """How many of the first tokens can be gone on behind: surely, or if all goes well that is on its way."""
        lanes = [lane for lane in self._lanes if not (sure and lane.doubtful)]
        deepest = max((self._depth(lane, context, root) for lane in lanes), default=0)
        return max(deepest, self._chain(context, root, sure=sure))

    # The verdict

    def _judge(self, op: OpenLane) -> None:
        asked = self._asked(op.job)
        context, depth = asked.context, op.cached_prefix
        self.opened[op.job] = depth
        where = f"job {op.job} is opened at {depth} of {len(context)}"
        if not asked.reuse:
            require(depth == 0, f"{where}, though it wants no reuse")
            return
        memos = [m for m in self._memos.values() if (m.prompt, m.root) == (context, op.root)]
        most = context[: len(context) - (0 if memos else 1)]
        deepest = self.depth(most, op.root, sure=False)
        require(depth <= deepest, f"{where}, but {deepest} are held")
        if op.job in self._refused:
            most = context[:-1]
            least = min(self._refused[op.job], self._chain(most, op.root, sure=True))
        else:
            if any(memo.doubtful for memo in memos):
                most = context[:-1]
            least = self.depth(most, op.root)
        require(depth >= least - self._slack, f"{where}, but {least} are held")

    def _depth(self, lane: _Lane, tokens: Sequence[int], root: NodeId) -> int:
        if lane.root != root:
            return 0
        rows = _shared(lane.tokens, tokens)
        return rows if rows >= lane.first else 0

    def _chain(self, tokens: Sequence[int], root: NodeId, *, sure: bool) -> int:
        """The most rows that any chain brings a lane to. `sure`: that every stage is known to have."""
        children: dict[NodeId, list[NodeId]] = {}
        for id_, node in self._nodes.items():
            if node.acked or not sure:
                children.setdefault(node.parent, []).append(id_)
        deepest, reached = 0, [(root, 0)]
        while reached:
            parent, start = reached.pop()
            for id_ in children.get(parent, ()):
                node = self._nodes[id_]
                rows = _shared(node.tokens, tokens[start:]) if node.start == start else 0
                if rows == len(node.tokens):
                    reached.append((id_, node.end))
                if not self._state_rows:
                    deepest = max(deepest, start + rows)
                elif rows == len(node.tokens) and (node.state_acked or (node.state and not sure)):
                    deepest = max(deepest, node.end)
        return deepest

    # Lanes

    def _copy(self, op: CopyRows) -> None:
        source = self._lanes[op.source]
        first = op.rows if self._state_rows else 0
        self._lanes[op.target] = _Lane(source.tokens[: op.rows], source.root, first)
        self._lanes[op.target].doubtful = source.doubtful

    def _load(self, op: LoadNodes) -> None:
        lane = self._lanes[op.lane]
        del lane.tokens[op.start :]
        for id_ in op.nodes:
            node = self._nodes[id_]
            lane.tokens.extend(node.tokens[max(0, op.start - node.start) : op.end - node.start])
        if op.start == 0:
            lane.root = self._nodes[op.nodes[0]].parent
        lane.first = op.end if self._state_rows else 0

    def _open(self, op: OpenLane) -> None:
        lane = self._lanes[op.lane]
        del lane.tokens[op.cached_prefix :]
        lane.root, lane.first = op.root, min(lane.first, op.cached_prefix)
        if op.job != AHEAD:
            context = self._asked(op.job).context[: op.cached_prefix]
            require(tuple(lane.tokens) == context, f"job {op.job} is opened on other rows")

    def _write(self, segment: Segment) -> None:
        lane = self._lanes[segment.lane]
        del lane.tokens[segment.start :]
        lane.tokens.extend(segment.tokens)
        if self._state_rows:
            lane.first = max(min(lane.first, segment.start), segment.end - self._state_rows)
        if segment.kind is SegmentKind.PREFILL and segment.memo is not None:
            self._memos[segment.memo] = _Memo(tuple(lane.tokens), lane.root)

    def _doubt(self, lane: LaneId, frame: Frame) -> None:
        self._lanes[lane].doubtful = True
        last = max((seq for _, seq in self._flight), default=frame.seq)
        for job in {segment.job for segment in frame.segments if segment.lane == lane}:
            if job == AHEAD or self._asked(job).ended:
                # Nobody starts over: all that the lane has is given up, whoever has opened it since.
                self._lanes[lane].until = Seq(last + 1)
        for each in (frame, *self._flight.values()):
            for segment in each.segments:
                if segment.lane == lane and segment.memo in self._memos:
                    self._memos[segment.memo].doubtful = True
                if segment.lane == lane and segment.job in self.opened:
                    asked = self._asked(segment.job).context[:-1]
                    root = self._lanes[lane].root
                    self._refused[segment.job] = self._chain(asked, root, sure=True)

    # Nodes

    def _store(self, frame: Frame) -> None:
        for op in frame.after:
            for span in op.spans:
                known = self._nodes.get(span.node)
                if known is None:
                    tokens = tuple(self._lanes[op.lane].tokens[span.start : span.end])
                    known = _Node(span.parent, span.start, tokens, (frame.epoch, frame.seq))
                self._nodes[span.node] = replace(known, state=known.state or span.checkpoint)
                self._given_up.pop(span.node, None)

    def _confirm(self, frame: Frame) -> None:
        for span in (span for op in frame.after for span in op.spans):
            node = self._nodes.get(span.node)
            if node is None:
                continue  # lost, as its reply or one before said, or dropped since
            if node.made is not None and node.made > (frame.epoch, frame.seq):
                continue  # what that frame made of it was dropped since, with its checkpoint
            state_acked = node.state_acked or span.checkpoint
            self._nodes[span.node] = replace(node, acked=True, state_acked=state_acked)

    def _drop(self, op: DropNodes, by: _Key) -> None:
        for id_ in op.nodes:
            self._nodes.pop(id_, None)
            self._given_up[id_] = by
        for id_ in op.checkpoints:
            self._bare[id_] = by
            if id_ in self._nodes:
                self._nodes[id_] = replace(self._nodes[id_], state=False, state_acked=False)

    def _lose(self, nodes: Sequence[NodeId]) -> None:
        """With all that hangs on them."""
        for id_ in nodes:
            self._nodes.pop(id_, None)
            self._given_up[id_] = None
            self._lose([child for child, node in self._nodes.items() if node.parent == id_])


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    rows = 0
    while rows < min(len(left), len(right)) and left[rows] == right[rows]:
        rows += 1
    return rows
