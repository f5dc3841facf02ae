"""Whatever the script of faults, a token that the fake ring serves is the oracle's.

A coordinator of a few lines plays two sessions, several frames in flight, and at any trouble tries again with
less: the claimed prefix, row 0, a new epoch, new stages. In their third turn the sessions change lanes, and go on
from chain nodes.
"""

from __future__ import annotations

import pytest

from coordinator.errors import RingLost
from coordinator.frames import (
    Epoch,
    Frame,
    JobId,
    LaneId,
    LoadNodes,
    NodeSpan,
    OpenLane,
    Reply,
    Segment,
    SegmentKind,
    StoreNodes,
)
from coordinator.nodes import node_id, root_of
from coordinator.prefixes import digest_of
from coordinator.requests import GREEDY
from fakering import texts
from fakering.faults import ALL_FAULTS, FaultScript, KeepNothing, random_script
from fakering.model import FakeModel
from fakering.network import Network, Pace

VOCAB = 97
MODEL = FakeModel(VOCAB)
LANES = 2
COUNT = 4
PATIENCE_S = 3.0
ROOT = root_of("fake")


class Trouble(Exception):
    """The frame was refused, or nobody answered."""


class Player:
    def __init__(self, stages: int, faults: FaultScript) -> None:
        self.network = Network(stages, LANES, 64, MODEL, faults, Pace(step_s=0.01), 1000)
        self.now, self.epoch, self.seq, self.job = 0.0, 0, 0, 0
        self.replies: dict[tuple[int, int], Reply] = {}

    def send(self, ops: tuple = (), segments: tuple = (), after: tuple = ()) -> Frame:
        frame = Frame(Epoch(self.epoch), self.seq, ops, segments, after=after)
        self.seq += 1
        self.network.send(frame, self.now)
        return frame

    def tokens_of(self, frame: Frame) -> tuple[int, ...]:
        (part,) = self.reply_to(frame).segments
        if part.refused:
            raise Trouble
        return part.tokens

    def reply_to(self, frame: Frame) -> Reply:
        deadline = self.now + PATIENCE_S
        while (frame.epoch, frame.seq) not in self.replies:
            due = self.network.next_due()
            if due is None or due > deadline:
                self.now = deadline
                raise Trouble
            self.now = max(self.now, due)
            for outcome in self.network.advance(self.now):
                if isinstance(outcome, RingLost):
                    raise Trouble
                self.replies[outcome.epoch, outcome.seq] = outcome
        return self.replies[frame.epoch, frame.seq]

    def new_epoch(self) -> None:
        if self.network.lost is not None:
            self.network.rebuild()
        self.epoch, self.seq = self.epoch + 1, 0
        self.network.open_epoch(Epoch(self.epoch))

    def store(self, lane: int, history: tuple[int, ...]) -> bool:
        """Whether all of the lane's rows are a node on every stage."""
        node = node_id(ROOT, history[:-1])
        span = NodeSpan(node, ROOT, 0, len(history) - 1)
        try:
            reply = self.reply_to(self.send(after=(StoreNodes(LaneId(lane), (span,)),)))
        except (Trouble, RingLost):
            return False
        return not reply.lost and not reply.refusals

    def turn(
        self, lane: int, prompt: tuple[int, ...], cached: int, *, load: bool = False
    ) -> tuple[int, ...]:
        """`load`: the cached prefix is a node."""
        self.job += 1
        ops: tuple = ()
        if load:
            nodes = (node_id(ROOT, prompt[:cached]),)
            ops = (LoadNodes(LaneId(lane), 0, cached, nodes),)
        ops += (OpenLane(LaneId(lane), JobId(self.job), cached, digest_of(prompt[:cached]), ROOT),)
        frames = []
        for start in range(cached, len(prompt), 5):
            chunk = prompt[start : start + 5]
            spec = GREEDY if start + 5 >= len(prompt) else None
            part = Segment(LaneId(lane), JobId(self.job), start, chunk, SegmentKind.PREFILL, spec)
            frames.append(self.send(ops, (part,)))
            ops = ()
        history = (*prompt, *self.tokens_of(frames[-1]))
        while len(history) < len(prompt) + COUNT:
            row = len(history) - 1
            anchor = history[-1:]
            step = Segment(LaneId(lane), JobId(self.job), row, anchor, SegmentKind.VERIFY, GREEDY)
            history += self.tokens_of(self.send((), (step,)))
        return history

    def turn_at_last(
        self, lane: int, prompt: tuple[int, ...], cached: int, *, load: bool
    ) -> tuple[int, ...]:
        for attempt in range(20):
            try:
                if attempt > 1:
                    self.new_epoch()
                if attempt == 0:
                    return self.turn(lane, prompt, cached, load=load)
                return self.turn(lane, prompt, 0)
            except (Trouble, RingLost):
                continue
        raise AssertionError("no turn came to its end")


def conversations(seed: int, stages: int, kinds: tuple) -> int:
    """How many turns began with chain nodes."""
    player = Player(stages, random_script(seed, stages, 40, count=4, kinds=kinds))
    histories = [texts.novel(9, seed * LANES + lane, VOCAB) for lane in range(LANES)]
    cached, stored = [0] * LANES, [False] * LANES
    for turn in range(4):
        if turn == 2:
            stored = [player.store(lane, histories[lane]) for lane in range(LANES)]
            cached = [rows if kept else 0 for rows, kept in zip(cached, stored, strict=True)]
        for session in range(LANES):
            lane = (session + turn // 2) % LANES
            load = turn == 2 and stored[session]
            prompt = histories[session] + texts.novel(7, turn, VOCAB)
            after = player.turn_at_last(lane, prompt, cached[session], load=load)
            assert after == prompt + MODEL.oracle(prompt, COUNT), f"seed {seed}"
            histories[session], cached[session] = after, len(after) - 1
    return sum(stored)


@pytest.mark.parametrize(
    "kind", [*ALL_FAULTS, None], ids=lambda kind: getattr(kind, "__name__", "all")
)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_faults_cost_time_and_never_a_token(kind: type | None, stages: int) -> None:
    kinds = ALL_FAULTS if kind is None else (kind,)
    loads = [conversations(seed, stages, kinds) for seed in range(12)]
    assert kind is KeepNothing or sum(loads) > 0
