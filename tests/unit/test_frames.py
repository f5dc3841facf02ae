"""Frames say only what they may: illegal ones do not construct."""

from __future__ import annotations

import pytest

from coordinator.frames import (
    DIGEST_BYTES,
    CopyRows,
    Epoch,
    Frame,
    JobId,
    LaneId,
    OpenLane,
    Segment,
    SegmentKind,
    Seq,
)
from coordinator.requests import GREEDY

DIGEST = bytes(DIGEST_BYTES)


def segment(**changes: object) -> Segment:
    fields = {
        "lane": LaneId(0),
        "job": JobId(1),
        "start": 5,
        "tokens": (7, 8, 9),
        "kind": SegmentKind.PREFILL,
    }
    return Segment(**(fields | changes))  # type: ignore[arg-type]


def test_a_segment_knows_its_rows() -> None:
    assert (segment().width, segment().end) == (3, 8)


def test_a_prefill_without_sampling_samples_nothing() -> None:
    assert list(segment().sampled_rows) == []


def test_a_sampling_prefill_samples_its_last_row_only() -> None:
    assert list(segment(sampling=GREEDY).sampled_rows) == [7]


def test_a_verify_segment_samples_every_row() -> None:
    verify = segment(kind=SegmentKind.VERIFY, sampling=GREEDY)
    assert list(verify.sampled_rows) == [5, 6, 7]


def test_a_frame_counts_the_rows_of_all_lanes() -> None:
    parts = (segment(), segment(lane=LaneId(1), tokens=(1,)))
    assert Frame(Epoch(0), Seq(0), segments=parts).rows == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lane": -1}, "lane is negative"),
        ({"start": -1}, "start is negative"),
        ({"tokens": ()}, "segment is empty"),
        ({"tokens": (1, -1)}, "token id is negative"),
        ({"tokens": (1 << 31,)}, "token id is too large"),
        ({"kind": SegmentKind.VERIFY}, "a segment that samples needs a sampling spec"),
    ],
)
def test_an_illegal_segment_does_not_construct(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        segment(**changes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((-1, 1, 0, DIGEST), "lane is negative"),
        ((0, 1, -1, DIGEST), "cached_prefix is negative"),
        ((0, 1, 0, DIGEST + b"x"), "prefix_digest has a wrong length"),
        ((0, 1, 0, DIGEST, b"x"), "root has a wrong length"),
    ],
)
def test_an_illegal_opening_does_not_construct(fields: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpenLane(*fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((-1, 1, 1), "lane is negative"),
        ((0, -1, 1), "lane is negative"),
        ((1, 1, 1), "copied onto itself"),
        ((0, 1, 0), "copies no rows"),
    ],
)
def test_an_illegal_copy_does_not_construct(fields: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CopyRows(*fields)  # type: ignore[arg-type]


def test_a_frame_has_one_segment_a_lane() -> None:
    with pytest.raises(ValueError, match="two segments of one lane"):
        Frame(Epoch(0), Seq(0), segments=(segment(), segment(start=8)))


@pytest.mark.parametrize(("epoch", "seq"), [(-1, 0), (0, -1)])
def test_a_frames_numbers_are_not_negative(epoch: int, seq: int) -> None:
    with pytest.raises(ValueError, match="epoch or seq is negative"):
        Frame(Epoch(epoch), Seq(seq))
