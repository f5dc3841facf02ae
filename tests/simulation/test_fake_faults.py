"""Whatever the script of faults, a token that the fake ring serves is the oracle's.

A coordinator of a few lines plays two sessions, several frames in flight, and at any trouble tries again with
less: the claimed prefix, row 0, a new epoch, new stages.
"""

from __future__ import annotations

import pytest

from coordinator.errors import RingLost
from coordinator.frames import Epoch, Frame, JobId, LaneId, OpenLane, Reply, Segment, SegmentKind
from coordinator.ledger import digest_of
from coordinator.requests import GREEDY
from fakering import texts
from fakering.faults import ALL_FAULTS, FaultScript, random_script
from fakering.model import FakeModel
from fakering.network import Network, Pace

VOCAB = 97
MODEL = FakeModel(VOCAB)
LANES = 2
COUNT = 4
PATIENCE_S = 3.0


class Trouble(Exception):
    """The frame was refused, or nobody answered."""


class Player:
    def __init__(self, stages: int, faults: FaultScript) -> None:
        self.network = Network(stages, LANES, 64, MODEL, faults, Pace(step_s=0.01))
        self.now, self.epoch, self.seq, self.job = 0.0, 0, 0, 0
        self.replies: dict[tuple[int, int], Reply] = {}

    def send(self, ops: tuple = (), segments: tuple = ()) -> Frame:
        frame = Frame(Epoch(self.epoch), self.seq, ops, segments)
        self.seq += 1
        self.network.send(frame, self.now)
        return frame

    def tokens_of(self, frame: Frame) -> tuple[int, ...]:
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
        (part,) = self.replies[frame.epoch, frame.seq].segments
        if part.refused:
            raise Trouble
        return part.tokens

    def new_epoch(self) -> None:
        if self.network.lost is not None:
            self.network.rebuild()
        self.epoch, self.seq = self.epoch + 1, 0
        self.network.open_epoch(Epoch(self.epoch))

    def turn(self, lane: int, prompt: tuple[int, ...], cached: int) -> tuple[int, ...]:
        self.job += 1
        ops = (OpenLane(LaneId(lane), JobId(self.job), cached, digest_of(prompt[:cached])),)
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

    def turn_at_last(self, lane: int, prompt: tuple[int, ...], cached: int) -> tuple[int, ...]:
        for attempt in range(20):
            try:
                if attempt > 1:
                    self.new_epoch()
                return self.turn(lane, prompt, cached if attempt == 0 else 0)
            except (Trouble, RingLost):
                continue
        raise AssertionError("no turn came to its end")


def conversations(seed: int, stages: int, kinds: tuple) -> None:
    player = Player(stages, random_script(seed, stages, 40, count=4, kinds=kinds))
    histories = [texts.novel(9, seed * LANES + lane, VOCAB) for lane in range(LANES)]
    cached = [0] * LANES
    for turn in range(3):
        for lane in range(LANES):
            prompt = histories[lane] + texts.novel(7, turn, VOCAB)
            after = player.turn_at_last(lane, prompt, cached[lane])
            assert after == prompt + MODEL.oracle(prompt, COUNT), f"seed {seed}"
            histories[lane], cached[lane] = after, len(after) - 1


@pytest.mark.parametrize(
    "kind", [*ALL_FAULTS, None], ids=lambda kind: getattr(kind, "__name__", "all")
)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_faults_cost_time_and_never_a_token(kind: type | None, stages: int) -> None:
    for seed in range(12):
        conversations(seed, stages, ALL_FAULTS if kind is None else (kind,))
