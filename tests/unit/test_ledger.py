"""The ledger: what a lane holds after each frame, and what it refuses."""

from __future__ import annotations

import pytest

from coordinator.applied import Applied, Standing
from coordinator.frames import (
    CopyRows,
    Epoch,
    Frame,
    JobId,
    LaneId,
    OpenLane,
    Refusal,
    RefusalCode,
    Segment,
    SegmentKind,
    Seq,
)
from coordinator.ledger import Ledger
from coordinator.prefixes import common_prefix, digest_of
from coordinator.requests import GREEDY

A, B = LaneId(0), LaneId(1)
JOB = JobId(1)
MAX_ROWS = 16


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(lanes=2, max_rows=MAX_ROWS, stage=3)


def open_lane(lane: LaneId, tokens: tuple[int, ...] = (), job: JobId = JOB) -> OpenLane:
    return OpenLane(lane, job, len(tokens), digest_of(tokens))


def write(lane: LaneId, start: int, *tokens: int, job: JobId = JOB) -> Segment:
    return Segment(lane, job, start, tokens, SegmentKind.VERIFY, GREEDY)


def feed(ledger: Ledger, *parts: OpenLane | CopyRows | Segment, before: tuple = ()) -> Applied:
    ops = tuple(part for part in parts if not isinstance(part, Segment))
    segments = tuple(part for part in parts if isinstance(part, Segment))
    return ledger.apply(Frame(ledger.epoch, ledger.next_seq, ops, segments), before)


def codes(applied: Applied) -> list[tuple[RefusalCode, int | None]]:
    return [(refusal.code, refusal.lane) for refusal in applied.refusals]


def test_writing_makes_rows_valid_and_all_behind_them_void(ledger: Ledger) -> None:
    feed(ledger, open_lane(A), write(A, 0, 1, 2, 3, 4))
    applied = feed(ledger, write(A, 1, 9))
    assert applied.segments == (write(A, 1, 9),)
    assert ledger.tokens(A) == (1, 9)
    assert ledger.valid_rows(A) == 2


def test_opening_keeps_the_claimed_prefix_and_voids_the_rest(ledger: Ledger) -> None:
    feed(ledger, open_lane(A), write(A, 0, 1, 2, 3, 4))
    feed(ledger, open_lane(A, (1, 2), JobId(2)))
    assert ledger.tokens(A) == (1, 2)
    assert codes(feed(ledger, write(A, 2, 5))) == [(RefusalCode.BAD_FRAME, A)]


def test_an_unopened_lane_takes_nothing(ledger: Ledger) -> None:
    assert codes(feed(ledger, write(A, 0, 1))) == [(RefusalCode.BAD_FRAME, A)]


def test_a_copied_lane_takes_nothing_before_it_is_opened(ledger: Ledger) -> None:
    feed(ledger, open_lane(A), open_lane(B), write(A, 0, 1, 2), write(B, 0, 7, 8, 9))
    applied = feed(ledger, CopyRows(A, B, 2), write(B, 2, 5))
    assert applied.moves == (CopyRows(A, B, 2),)
    assert codes(applied) == [(RefusalCode.BAD_FRAME, B)]
    assert ledger.tokens(B) == (1, 2)


def test_a_refused_copy_leaves_its_target_with_nothing(ledger: Ledger) -> None:
    feed(ledger, open_lane(A), open_lane(B), write(A, 0, 1), write(B, 0, 7, 8))
    assert codes(feed(ledger, CopyRows(A, B, 2))) == [(RefusalCode.KV_GAP, B)]
    assert ledger.valid_rows(B) == 0
    assert ledger.is_blocked(B)


def test_a_gap_is_refused_and_writes_nothing(ledger: Ledger) -> None:
    feed(ledger, open_lane(A), write(A, 0, 1, 2))
    applied = feed(ledger, write(A, 3, 4))
    assert codes(applied) == [(RefusalCode.KV_GAP, A)]
    assert applied.refusals[0].stage == 3
    assert applied.segments == ()
    assert ledger.tokens(A) == (1, 2)


def test_a_false_claim_is_refused_and_changes_nothing(ledger: Ledger) -> None:
    feed(ledger, open_lane(A), write(A, 0, 1, 2))
    applied = feed(ledger, open_lane(A, (1, 3), JobId(2)), write(A, 2, 5, job=JobId(2)))
    assert codes(applied) == [(RefusalCode.KV_CONTENT, A)]
    assert ledger.tokens(A) == (1, 2)


def test_a_lane_may_be_filled_but_not_overfilled(ledger: Ledger) -> None:
    full = tuple(range(MAX_ROWS))
    assert codes(feed(ledger, open_lane(A), write(A, 0, *full))) == []
    assert codes(feed(ledger, write(A, MAX_ROWS, 1))) == [(RefusalCode.ROW_LIMIT, A)]
    assert ledger.tokens(A) == full


def test_a_refused_lane_refuses_until_it_is_opened(ledger: Ledger) -> None:
    feed(ledger, open_lane(A), write(A, 0, 1))
    first = feed(ledger, write(A, 5, 1)).refusals
    assert feed(ledger, write(A, 1, 2)).refusals == first
    assert codes(feed(ledger, open_lane(A, (1,)), write(A, 1, 2))) == []
    assert ledger.tokens(A) == (1, 2)


def test_other_lanes_of_a_refused_frame_are_served(ledger: Ledger) -> None:
    applied = feed(ledger, open_lane(A), open_lane(B), write(A, 1, 1), write(B, 0, 7))
    assert codes(applied) == [(RefusalCode.KV_GAP, A)]
    assert applied.segments == (write(B, 0, 7),)


def test_what_an_earlier_stage_refused_is_left_alone_and_not_repeated(ledger: Ledger) -> None:
    feed(ledger, open_lane(A), open_lane(B), write(A, 0, 1, 2), write(B, 0, 7))
    before = (Refusal(RefusalCode.KV_GAP, 0, A, "there"),)
    applied = feed(ledger, open_lane(A), write(A, 0, 9), write(B, 1, 8), before=before)
    assert applied.refusals == ()
    assert applied.segments == (write(B, 1, 8),)
    assert ledger.tokens(A) == (1, 2)
    assert ledger.is_blocked(A)


@pytest.mark.parametrize("lane", [LaneId(2), LaneId(99)])
def test_a_lane_that_does_not_exist_is_refused_once(ledger: Ledger, lane: LaneId) -> None:
    applied = feed(ledger, open_lane(lane), write(lane, 0, 1))
    assert codes(applied) == [(RefusalCode.BAD_FRAME, lane)]
    assert codes(feed(ledger, CopyRows(lane, A, 1))) == [(RefusalCode.BAD_FRAME, lane)]
    before = (Refusal(RefusalCode.BAD_FRAME, 0, lane, "there"),)
    assert feed(ledger, write(lane, 0, 1), before=before).refusals == ()


def test_a_frame_that_was_applied_is_ignored(ledger: Ledger) -> None:
    frame = Frame(Epoch(0), Seq(0), (open_lane(A),), (write(A, 0, 1, 2),))
    ledger.apply(frame)
    feed(ledger, write(A, 2, 3))
    assert ledger.apply(frame) == Applied(Standing.APPLIED)
    assert ledger.tokens(A) == (1, 2, 3)


def test_a_frame_that_skips_ahead_is_refused_whole(ledger: Ledger) -> None:
    applied = ledger.apply(Frame(Epoch(0), Seq(1), (open_lane(A),), (write(A, 0, 1),)))
    assert applied.standing is Standing.REFUSED
    assert codes(applied) == [(RefusalCode.FRAME_ORDER, None)]
    assert (ledger.next_seq, ledger.valid_rows(A)) == (0, 0)


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_frame_of_another_epoch_is_refused_whole(ledger: Ledger, epoch: int) -> None:
    ledger.reset(Epoch(1))
    applied = ledger.apply(Frame(Epoch(epoch), Seq(0), (open_lane(A),), (write(A, 0, 1),)))
    assert codes(applied) == [(RefusalCode.STALE_EPOCH, None)]
    assert ledger.next_seq == 0


def test_a_new_epoch_voids_everything_and_counts_from_zero(ledger: Ledger) -> None:
    feed(ledger, open_lane(A), write(A, 0, 1))
    feed(ledger, write(A, 5, 1))
    ledger.reset(Epoch(1))
    assert (ledger.epoch, ledger.next_seq) == (1, 0)
    assert ledger.valid_rows(A) == 0
    assert not ledger.is_blocked(A)


def test_truncating_voids_rows_and_nothing_else(ledger: Ledger) -> None:
    feed(ledger, open_lane(A), write(A, 0, 1, 2, 3))
    ledger.truncate(A, 1)
    ledger.truncate(A, 5)
    assert ledger.tokens(A) == (1,)
    assert codes(feed(ledger, write(A, 1, 9))) == []


def test_the_usable_prefix_ends_at_the_first_other_token(ledger: Ledger) -> None:
    feed(ledger, open_lane(A), write(A, 0, 1, 2, 3))
    assert ledger.usable_prefix(A, (1, 2, 3, 4)) == 3
    assert ledger.usable_prefix(A, (1, 2)) == 2
    assert ledger.usable_prefix(A, (1, 9, 3)) == 1
    assert ledger.usable_prefix(B, (1,)) == 0


@pytest.mark.parametrize("at", [0, 1, 1023, 1024, 1025, 2047, 2999, 3000])
def test_common_prefixes_are_exact_on_both_sides_of_a_block(at: int) -> None:
    left = list(range(3000))
    right = [*left[:at], -1, *left[at + 1 :]] if at < 3000 else [*left, 7]
    assert common_prefix(left, right) == common_prefix(right, left) == at


def test_digests_tell_order_and_length_apart() -> None:
    digests = {digest_of(tokens) for tokens in ((), (0,), (0, 0), (1, 2), (2, 1), (1, 2, 0))}
    assert len(digests) == 6
    assert digest_of([1, 2]) == digest_of((1, 2))
