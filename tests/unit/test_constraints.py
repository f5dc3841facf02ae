"""A constraint is asked about the right tokens, and whatever it does wrong costs its own job."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coordinator.constraints import allows, asked_masks, lets_any
from coordinator.drafters.none import NoDrafter
from coordinator.errors import ConstraintFailed
from coordinator.frames import JobId, LaneId, Segment, SegmentKind, SegmentReply, Seq
from coordinator.jobs import Job
from coordinator.requests import GREEDY, Request
from coordinator.speculation import Speculation


class Scripted:
    """Answers as it was told, or raises; says what it was asked. Draft 9 may never follow."""

    def __init__(self, answer: tuple[bytes, ...] | Exception | None = None) -> None:
        self.answer = answer
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def masks(self, decided: Sequence[int], drafts: Sequence[int]) -> tuple[bytes, ...]:
        self.asked.append((tuple(decided), tuple(drafts)))
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            return self.answer
        right = drafts[: drafts.index(9)] if 9 in drafts else drafts
        path = list(decided)
        masks = [_mask(path)]
        for draft in right:
            path.append(draft)
            masks.append(_mask(path))
        return tuple(masks)

    def forced(self, decided: Sequence[int], limit: int) -> tuple[int, ...]:
        return ()


def _mask(path: Sequence[int]) -> bytes:
    """Tells which tokens it was made for."""
    return bytes([len(path) + 1, *path])


class Drafts(NoDrafter):
    def __init__(self, *drafts: int) -> None:
        self.drafts = drafts

    def draft(self, guess: Sequence[int], limit: int) -> tuple[int, ...]:
        return self.drafts[len(guess) :][:limit]


def _job(constraint: Scripted, *drafts: int, prompt: tuple[int, ...] = (1, 2, 3)) -> Job:
    request = Request(prompt, max_new_tokens=20, constraint=constraint)
    job = Job(JobId(1), request, 0.0, 64, Drafts(*drafts))
    job.lane = LaneId(0)
    job.open(0, (), (len(prompt),))
    job.opened_seq = Seq(0)
    return job


def _send(job: Job, segment: Segment | None, seq: int) -> Segment:
    assert segment is not None
    job.sent(segment, Seq(seq))
    return segment


def _answer(job: Job, *tokens: int, seq: int = 9) -> None:
    assert job.lane is not None
    job.answer(SegmentReply(job.lane, job.id, 0, tokens), Seq(seq), 0.0)


@pytest.mark.parametrize(
    "answer",
    [(), (b"\0\0",), (b"\1", b"\1"), ValueError("too many items"), ConstraintFailed("a limit")],
    ids=["none", "nothing may follow", "too many", "raises", "raises ours"],
)
def test_a_constraint_that_does_not_answer_well_is_one_typed_error(
    answer: tuple[bytes, ...] | Exception,
) -> None:
    with pytest.raises(ConstraintFailed):
        asked_masks(Scripted(answer), (1, 2), ())


def test_masks_are_read_lowest_bit_first_and_end_where_they_end() -> None:
    assert [token for token in range(40) if allows(b"\x01\x80", token)] == [0, 15]
    assert all(allows(b"", token) for token in range(40))
    assert not lets_any(b"\0\0\0")
    assert lets_any(b"\0\x10", 13)
    assert not lets_any(b"\0\x10", 12)
    assert not lets_any(b"\0\x10", 8)
    assert lets_any(b"\0\x10", 400)


@pytest.mark.parametrize(
    ("kind", "rows", "masks"),
    [
        (SegmentKind.VERIFY, 3, (b"\1", b"\1")),
        (SegmentKind.VERIFY, 2, (b"\1", b"\0")),
        (SegmentKind.PREFILL, 3, (b"\1", b"\1", b"\1")),
    ],
)
def test_masks_that_fit_no_rows_do_not_construct(
    kind: SegmentKind, rows: int, masks: tuple[bytes, ...]
) -> None:
    with pytest.raises(ValueError, match="mask"):
        Segment(LaneId(0), JobId(0), 4, (1,) * rows, kind, GREEDY, masks=masks)


def test_a_prefill_that_samples_nothing_takes_no_masks() -> None:
    with pytest.raises(ValueError, match="mask"):
        Segment(LaneId(0), JobId(0), 4, (1,), SegmentKind.PREFILL, masks=(b"\1",))


def test_only_the_last_chunk_of_a_prompt_asks_what_may_follow() -> None:
    constraint = Scripted()
    job = _job(constraint)
    first = _send(job, job.prefill_segment(2), 0)
    assert (first.masks, constraint.asked) == ((), [])
    last = _send(job, job.prefill_segment(2), 1)
    assert last.masks == (_mask(()),)


def test_a_verify_segment_has_the_mask_behind_each_of_its_tokens() -> None:
    job = _job(Scripted(), 5, 6)
    _send(job, job.prefill_segment(None), 0)
    _answer(job, 4)
    segment = job.verify_segment(Speculation(width=3, depth=1), 0.0)
    assert segment is not None
    assert segment.tokens == (4, 5, 6)
    assert segment.masks == (_mask((4,)), _mask((4, 5)), _mask((4, 5, 6)))


def test_frames_sent_ahead_have_masks_of_the_guess_that_they_are_built_on() -> None:
    job = _job(Scripted(), 5, 6, 7, 8)
    _send(job, job.prefill_segment(None), 0)
    _answer(job, 4)
    plan = Speculation(width=3, depth=2)
    _send(job, job.verify_segment(plan, 0.0), 1)
    ahead = _send(job, job.verify_segment(plan, 0.0), 2)
    assert ahead.tokens == (7, 8)
    assert ahead.masks == (_mask((4, 5, 6, 7)), _mask((4, 5, 6, 7, 8)))
    # The guess fails at once: the next frame is built on what was decided.
    _answer(job, 3, 3, 3)
    again = job.verify_segment(plan, 0.0)
    assert again is not None
    assert again.tokens[0] == 3
    assert again.masks[0] == _mask((4, 3))


def test_a_draft_that_may_not_follow_is_not_sent_nor_are_those_behind_it() -> None:
    job = _job(Scripted(), 5, 9, 6, 6)
    _send(job, job.prefill_segment(None), 0)
    _answer(job, 4)
    plan = Speculation(width=4, depth=2)
    segment = _send(job, job.verify_segment(plan, 0.0), 1)
    assert segment.tokens == (4, 5)
    assert job.drafted == 1
    assert job.verify_segment(plan, 0.0) is None, "the draft behind the guess may not follow either"


def test_a_job_that_goes_on_after_its_rows_were_lost_asks_behind_what_it_has_said() -> None:
    constraint = Scripted()
    job = _job(constraint)
    _send(job, job.prefill_segment(None), 0)
    _answer(job, 4)
    job.open(0, (), (4,))
    assert job.prefill_segment(None).masks == (_mask((4,)),)


def test_without_a_constraint_no_segment_has_masks() -> None:
    request = Request((1, 2, 3))
    job = Job(JobId(1), request, 0.0, 64, Drafts(5, 6))
    job.lane = LaneId(0)
    job.open(0, (), (3,))
    job.opened_seq = Seq(0)
    assert _send(job, job.prefill_segment(None), 0).masks == ()
    _answer(job, 4)
    assert _send(job, job.verify_segment(Speculation(3, 1), 0.0), 1).masks == ()
