"""The scheduler's decisions, one event at a time; whole runs are the simulation's."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from coordinator.config import SchedulerSettings
from coordinator.drafters.ngram import NgramDrafter
from coordinator.errors import (
    BrokenInvariant,
    Cancelled,
    ContextTooLong,
    InvalidValue,
    QueueFull,
    RingUnavailable,
    StageLost,
)
from coordinator.events import (
    Action,
    Emit,
    EpochOpened,
    Fail,
    JobEnded,
    OpenEpoch,
    ReplyArrived,
    ReplyOverdue,
    RingDown,
    Send,
    Submitted,
)
from coordinator.frames import (
    CopyRows,
    Epoch,
    Frame,
    JobId,
    LaneId,
    LaneRows,
    LoadNodes,
    OpenLane,
    Refusal,
    RefusalCode,
    Reply,
    SegmentKind,
    SegmentReply,
    Seq,
)
from coordinator.held import NOTHING, Holding
from coordinator.nodes import Node, node_id, root_of
from coordinator.requests import Finished, FinishReason, Recovering, Request, Started, TokenDelta
from coordinator.scheduler import Scheduler
from fakering.model import FakeModel
from fakering.ring import describe

_SETTINGS = SchedulerSettings(frame_rows=8, chunk_rows=4, min_chunk_rows=2, queue_limit=2)


def _scheduler(lanes: int = 2, max_rows: int = 32) -> Scheduler:
    info = describe("fake", FakeModel(vocab_size=50), 2, lanes, max_rows)
    return Scheduler("ring-0", info, _SETTINGS)


def _submit(scheduler: Scheduler, job: int, *prompt: int, max_new: int = 4) -> list[Action]:
    request = Request(prompt, max_new_tokens=max_new, stop_tokens=frozenset({49}))
    return scheduler.on(Submitted(JobId(job), request, NgramDrafter(), 0.0))


def _frames(actions: list[Action]) -> list[Frame]:
    return [action.frame for action in actions if isinstance(action, Send)]


def _reply(frame: Frame, *tokens: int, refusals: tuple[Refusal, ...] = ()) -> ReplyArrived:
    refused = {refusal.lane for refusal in refusals}
    segments = tuple(
        SegmentReply(
            segment.lane,
            segment.job,
            segment.start,
            tuple(tokens[: len(segment.sampled_rows)]) if segment.lane not in refused else (),
            refused=segment.lane in refused,
        )
        for segment in frame.segments
    )
    lanes = tuple(LaneRows(lane, 0) for lane in refused if lane is not None)
    return ReplyArrived(Reply(frame.epoch, frame.seq, segments, lanes, refusals), 1.0)


def test_a_prompt_goes_out_in_chunks_as_many_as_the_stages_and_one_more() -> None:
    frames = _frames(_submit(_scheduler(), 1, *range(1, 21)))
    assert [segment.tokens for frame in frames for segment in frame.segments] == [
        (1, 2, 3, 4),
        (5, 6, 7, 8),
        (9, 10, 11, 12),
    ]
    assert [frame.seq for frame in frames] == [0, 1, 2]
    assert isinstance(frames[0].ops[0], OpenLane)
    assert all(frame.ops == () for frame in frames[1:])
    assert all(segment.sampling is None for frame in frames for segment in frame.segments)


def test_the_first_token_becomes_the_anchor_of_the_first_verify_frame() -> None:
    scheduler = _scheduler()
    (frame,) = _frames(_submit(scheduler, 1, 5, 6))
    assert frame.segments[0].sampling is not None
    actions = scheduler.on(_reply(frame, 9))
    started, delta = (action.event for action in actions if isinstance(action, Emit))
    assert isinstance(started, Started)
    assert (started.prompt_tokens, started.cached_prefix) == (2, 0)
    assert delta == TokenDelta((9,))
    (verify,) = _frames(actions)
    segment = verify.segments[0]
    assert (segment.kind, segment.start, segment.tokens) == (SegmentKind.VERIFY, 2, (9,))


def test_a_stop_token_ends_the_job_and_is_its_last_token() -> None:
    scheduler = _scheduler()
    (frame,) = _frames(_submit(scheduler, 1, 5, 6))
    events = [a.event for a in scheduler.on(_reply(frame, 49)) if isinstance(a, Emit)]
    assert events[1] == TokenDelta((49,))
    assert isinstance(events[2], Finished)
    assert events[2].reason is FinishReason.STOP
    assert (scheduler.running, scheduler.lanes.busy) == (0, 0)


def test_a_lane_with_no_row_left_ends_the_job() -> None:
    scheduler = _scheduler(max_rows=4)
    (frame,) = _frames(_submit(scheduler, 1, 5, 6, 7, max_new=9))
    events = [a.event for a in scheduler.on(_reply(frame, 8)) if isinstance(a, Emit)]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "error"),
    [((1,) * 32, ContextTooLong), ((1, 50), InvalidValue), ((1, -1), InvalidValue)],
)
def test_what_can_never_be_served_is_refused_at_once(
    prompt: tuple[int, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        _scheduler().admissible(Request(prompt), 0.0)


def test_jobs_beyond_the_lanes_wait_and_the_queue_is_bounded() -> None:
    scheduler = _scheduler(lanes=1)
    for job in range(3):
        _submit(scheduler, job, 1, 2)
    assert (scheduler.running, scheduler.waiting) == (1, 2)
    with pytest.raises(QueueFull):
        scheduler.admissible(Request((1, 2)), 0.0)
    scheduler.on(JobEnded(JobId(1), Cancelled(), 0.0))
    scheduler.admissible(Request((1, 2)), 0.0)


def test_ending_a_job_frees_its_lane_for_the_next_at_once() -> None:
    scheduler = _scheduler(lanes=1)
    _submit(scheduler, 1, *range(1, 5))
    _submit(scheduler, 2, 7, 8, 9)
    actions = scheduler.on(JobEnded(JobId(1), Cancelled(), 0.0))
    assert isinstance(actions[0], Fail)
    (frame,) = _frames(actions)
    assert [segment.job for segment in frame.segments] == [2]


def test_a_reply_of_another_epoch_or_to_no_frame_changes_nothing() -> None:
    scheduler = _scheduler()
    (frame,) = _frames(_submit(scheduler, 1, 5, 6))
    for odd in (Frame(Epoch(3), frame.seq), Frame(frame.epoch, Seq(9))):
        assert scheduler.on(_reply(odd)) == []
    assert scheduler.oldest_in_flight == frame.seq


def test_a_missing_reply_ends_the_epoch_and_the_job_starts_over() -> None:
    scheduler = _scheduler()
    (frame,) = _frames(_submit(scheduler, 1, 5, 6))
    actions = scheduler.on(ReplyOverdue(frame.epoch, frame.seq, 9.0))
    reason = "no reply to frame 0"
    assert actions == [Emit(JobId(1), Recovering(reason)), OpenEpoch(Epoch(1), reason, rows=2)]
    (again,) = _frames(scheduler.on(EpochOpened(Epoch(1), NOTHING, 9.0)))
    assert (again.epoch, again.seq) == (1, 0)
    assert [segment.tokens for segment in again.segments] == [(5, 6)]


def test_an_overdue_that_was_answered_meanwhile_is_ignored() -> None:
    scheduler = _scheduler()
    (frame,) = _frames(_submit(scheduler, 1, 5, 6, max_new=1))
    scheduler.on(_reply(frame, 9))
    assert scheduler.on(ReplyOverdue(frame.epoch, frame.seq, 9.0)) == []


def test_a_ring_that_never_answers_is_given_up() -> None:
    scheduler = _scheduler()
    actions = _submit(scheduler, 1, 5, 6)
    delays = []
    for epoch in range(1, 6):
        (frame,) = _frames(actions)
        opening = scheduler.on(ReplyOverdue(frame.epoch, frame.seq, 9.0))[-1]
        assert isinstance(opening, OpenEpoch)
        delays.append(opening.delay_s)
        actions = scheduler.on(EpochOpened(Epoch(epoch), NOTHING, 9.0))
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0]
    (frame,) = _frames(actions)
    (failed,) = scheduler.on(ReplyOverdue(frame.epoch, frame.seq, 9.0))
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, StageLost)
    with pytest.raises(RingUnavailable):
        scheduler.admissible(Request((1,)), 0.0)


def test_a_lane_refused_again_and_again_fails_its_job_with_the_story() -> None:
    scheduler = _scheduler()
    actions = _submit(scheduler, 1, 5, 6)
    for _ in range(9):
        (frame,) = _frames(actions)
        no_state = Refusal(RefusalCode.NO_STATE, 1, LaneId(frame.segments[0].lane), "none")
        actions = scheduler.on(_reply(frame, refusals=(no_state,)))
    (failed,) = actions
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, BrokenInvariant)
    assert any("NO-STATE" in line for line in failed.error.story)
    assert (scheduler.running, scheduler.lanes.busy) == (0, 0)


def test_a_lost_ring_fails_running_and_waiting_jobs() -> None:
    scheduler = _scheduler(lanes=1)
    _submit(scheduler, 1, 5, 6)
    _submit(scheduler, 2, 5, 6)
    actions = scheduler.on(RingDown("stage 1: died", 1.0))
    assert [action.job for action in actions if isinstance(action, Fail)] == [1, 2]
    assert (scheduler.running, scheduler.waiting, scheduler.down) == (0, 0, "stage 1: died")


def _shared(*own: int) -> tuple[int, ...]:
    return (*range(1, 21), *own)


def test_a_newcomer_waits_for_rows_that_another_job_is_prefilling_and_copies_them() -> None:
    settings = SchedulerSettings(frame_rows=8, chunk_rows=4, min_chunk_rows=2, min_copy_rows=4)
    info = describe("fake", FakeModel(vocab_size=50), 2, 3, 64)
    scheduler = Scheduler("ring-0", info, settings)
    actions = _submit(scheduler, 1, *_shared(30, 31))
    actions += _submit(scheduler, 2, *_shared(40, 41))
    actions += _submit(scheduler, 3, 45, 46)  # shares nothing, so it does not wait
    frames: list[Frame] = []
    while frames or _frames(actions):
        frames += _frames(actions)
        actions = scheduler.on(_reply(frames.pop(0), *([49] * 8)))
        for frame in _frames(actions):
            for op in frame.ops:
                if isinstance(op, CopyRows):
                    assert op.rows == len(_shared())
                    assert scheduler.counts.prefilled_rows < 2 * len(_shared())
                    return
    raise AssertionError("the shared rows were prefilled twice")


def test_a_short_prompt_with_the_ring_to_itself_is_one_frame_for_all_cores() -> None:
    scheduler = _scheduler()
    (frame,) = _frames(_submit(scheduler, 1, *range(1, 9)))
    assert (frame.rows, frame.alone) == (8, True)
    (verify,) = _frames(scheduler.on(_reply(frame, 20)))
    assert not verify.alone


def test_a_long_prompt_or_one_with_company_is_cut_for_overlap_and_never_alone() -> None:
    frames = _frames(_submit(_scheduler(), 1, *range(1, 20)))
    assert len(frames) > 1
    assert not any(frame.alone for frame in frames)

    scheduler = _scheduler()
    (first,) = _frames(_submit(scheduler, 1, *range(1, 9)))
    beside = _frames(_submit(scheduler, 2, *range(11, 19)))
    assert beside
    assert not any(frame.alone for frame in beside)


def test_a_ring_that_lends_no_cores_gets_no_lone_frames() -> None:
    info = replace(describe("fake", FakeModel(vocab_size=50), 2, 2, 32), lends_cores=False)
    scheduler = Scheduler("ring-0", info, _SETTINGS)
    frames = _frames(_submit(scheduler, 1, *range(1, 9)))
    assert not any(frame.alone for frame in frames)


def test_a_ring_that_kept_nodes_over_a_restart_goes_on_from_them() -> None:
    prompt = tuple(range(1, 13))
    lane, root = array("i", prompt[:8]), root_of(repr(FakeModel(vocab_size=50)))
    node = Node(node_id(root, lane), root, 0, lane)
    info = replace(
        describe("fake", FakeModel(vocab_size=50), 2, 2, 32),
        host_rows=100,
        held=Holding(nodes=(node,)),
    )
    scheduler = Scheduler("ring-0", info, replace(_SETTINGS, node_rows=8, min_copy_rows=2))
    (frame,) = _frames(_submit(scheduler, 1, *prompt))
    assert [type(op) for op in frame.ops] == [LoadNodes, OpenLane]
    assert frame.segments[0].start == 8
