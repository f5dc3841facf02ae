"""What the fuzzer's second opinion takes as held: nodes count from the reply to the frame that made them."""

from __future__ import annotations

from coordinator.frames import (
    DropNodes,
    Epoch,
    Frame,
    JobId,
    LaneId,
    NodeSpan,
    OpenLane,
    Reply,
    Segment,
    SegmentKind,
    Seq,
    StoreNodes,
)
from coordinator.nodes import node_id, root_of
from coordinator.prefixes import digest_of
from fakering.reference import Asked, Reference

ROOT = root_of("model")
KEPT, OTHER = (1, 2, 3), (7, 8)
JOB, LANE = JobId(0), LaneId(0)
NODE = node_id(ROOT, KEPT)


def written(seq: int, tokens: tuple[int, ...]) -> Frame:
    opening = OpenLane(LANE, JOB, 0, digest_of(()), ROOT)
    segment = Segment(LANE, JOB, 0, tokens, SegmentKind.PREFILL)
    return Frame(Epoch(0), Seq(seq), (opening,), (segment,))


def stored(seq: int, *, checkpoint: bool, drop: bool = False) -> Frame:
    ops = (DropNodes((NODE,)),) if drop else ()
    span = NodeSpan(NODE, ROOT, 0, len(KEPT), checkpoint)
    return Frame(Epoch(0), Seq(seq), ops, after=(StoreNodes(LANE, (span,)),))


def surely_held(state_rows: int, *frames: Frame, answered: int) -> int:
    """Of KEPT's rows, once the first `answered` of the frames have their replies."""
    reference = Reference(1, state_rows, 1, lambda job: Asked(KEPT, reuse=False, ended=True))
    for frame in frames:
        reference.sent(frame)
    for frame in frames[:answered]:
        assert reference.answered(Reply(frame.epoch, frame.seq))
    return reference.depth(KEPT, ROOT)


def test_a_node_counts_from_its_reply_on() -> None:
    frames = written(0, KEPT), stored(1, checkpoint=True), written(2, OTHER)
    assert surely_held(4, *frames, answered=1) == 0
    assert surely_held(4, *frames, answered=2) == len(KEPT)


def test_a_node_dropped_and_stored_again_does_not_count_by_the_reply_to_its_first_frame() -> None:
    first, again = stored(1, checkpoint=True), stored(2, checkpoint=False, drop=True)
    frames = written(0, KEPT), first, again, written(3, OTHER)
    assert surely_held(0, *frames, answered=2) == 0
    assert surely_held(0, *frames, answered=3) == len(KEPT)
    # Nor has it the checkpoint that it had then.
    assert surely_held(4, *frames, answered=4) == 0
