"""What a storm's findings are: pauses, moments, and the table's figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from coordinator.frames import (
    DIGEST_BYTES,
    Epoch,
    Frame,
    JobId,
    LaneId,
    LoadNodes,
    NodeId,
    NodeSpan,
    Op,
    Segment,
    SegmentKind,
    Seq,
    StoreNodes,
)
from coordinator.requests import GREEDY
from gateway.chaos.book import Book, Played, pause_s
from gateway.chaos.checker import wrong_answers
from gateway.chaos.faults import Struck
from gateway.chaos.moments import moments_of
from gateway.chaos.report import report
from gateway.chaos.storm import Fault, Moment, Planned
from gateway.chaos.traffic import Ask, Kind, Step

LANE, NODE = LaneId(0), NodeId(b"n" * DIGEST_BYTES)


def frame(seq: int = 0, *segments: Segment, ops: tuple[Op, ...] = (), keeps: bool = False) -> Frame:
    store = StoreNodes(LANE, (NodeSpan(NODE, NODE, 0, 16),))
    return Frame(Epoch(0), Seq(seq), ops, segments, after=(store,) if keeps else ())


def verify(job: int, width: int) -> Segment:
    return Segment(LANE, JobId(job), 30, (1,) * width, SegmentKind.VERIFY, GREEDY)


def prefill(width: int) -> Segment:
    return Segment(LANE, JobId(1), 0, (1,) * width, SegmentKind.PREFILL)


def test_a_frame_tells_its_moments() -> None:
    assert moments_of(frame(0, prefill(64)), ()) == {Moment.PREFILL}
    assert moments_of(frame(0, prefill(3)), ()) == set()
    assert moments_of(frame(0, verify(1, 1)), ()) == {Moment.DECODE}
    load = LoadNodes(LANE, 0, 16, (NODE,))
    assert moments_of(frame(0, prefill(16), ops=(load,)), ()) == {Moment.PREFILL, Moment.RESTORE}
    assert moments_of(frame(keeps=True), ()) == {Moment.PUBLISH}


def test_drafts_are_speculation_and_so_is_a_frame_behind_another_of_its_job() -> None:
    both = {Moment.DECODE, Moment.SPECULATION}
    assert moments_of(frame(0, verify(1, 4)), ()) == both
    assert moments_of(frame(1, verify(1, 1)), [frame(0, verify(1, 1))]) == both
    assert moments_of(frame(1, verify(2, 1)), [frame(0, verify(1, 1))]) == {Moment.DECODE}


def test_a_pause_is_the_longest_gap_from_the_fault_on_less_the_usual_one() -> None:
    arrivals = (0.0, 0.1, 0.2, 3.2, 3.3, 3.4)
    assert pause_s(arrivals, at_s=0.25) == pytest.approx(2.9)
    assert pause_s(arrivals, at_s=3.25) == pytest.approx(0.0)


def test_a_gap_before_the_fault_is_not_its_pause_nor_is_one_behind_the_next_fault() -> None:
    arrivals = (0.0, 5.0, 5.1, 5.2, 9.2, 9.3)
    assert pause_s(arrivals, 5.05, (0.0, 5.15)) == pytest.approx(0.0)
    assert pause_s(arrivals, at_s=5.15) == pytest.approx(3.9)


def test_of_a_gap_that_two_faults_lie_in_each_has_its_part_or_none() -> None:
    arrivals = (0.0, 0.1, 8.1, 8.2)
    assert pause_s(arrivals, 2.0, (-1.0, 5.0)) is None
    assert pause_s(arrivals, 5.0, (2.0, 20.0)) == pytest.approx(3.0)


def test_a_stream_without_a_token_on_either_side_has_no_pause() -> None:
    assert pause_s((), 1.0) is None
    assert pause_s((2.0, 2.1), at_s=1.0) is None
    assert pause_s((0.0, 0.1), at_s=1.0) is None


ASK = Ask((1, 2, 3), GREEDY, 4, draft=True)


def planned(number: int, fault: Fault = Fault.KILL_DECODE) -> Planned:
    return Planned(number, fault, Moment.DECODE, 0, 0.5, 1.0, 7)


def played(**changes: object) -> Played:
    step = Step(Kind.EXTEND, "s", ASK)
    turn = Played(0, step, "ring-0", 0.0, 10.0, (1.0, 1.1, 1.2, 6.0, 6.1), (7, 8, 9, 9))
    return replace(turn, **changes)  # type: ignore[arg-type]


def test_a_turn_is_hit_by_the_faults_that_it_lives_through() -> None:
    book = Book()
    book.ended(played())  # before any fault: nothing hits it
    for number, at_s in enumerate((-1.0, 2.0, 7.0, 11.0)):
        book.struck(planned(number), at_s, ring="ring-0")
    book.ended(played())
    book.ended(played(ring="ring-1"))
    assert [(hit.number, hit.elsewhere) for hit in book.hits] == [
        (1, False),
        (2, False),
        (1, True),
        (2, True),
    ]
    assert book.hits[0].pause_s == pytest.approx(4.7)
    assert book.hits[1].pause_s is None


def test_wrong_and_lost_streams_are_told_of_their_faults_and_of_the_whole() -> None:
    book = Book()
    book.struck(planned(0), 2.0, ring="ring-0")
    book.struck(planned(1, Fault.STOP), 7.0, ring="ring-0")
    book.ended(played())
    book.ended(played(tokens=(7, 8, 0, 0), sent_s=5.0))
    book.ended(played(error="UNAVAILABLE: gone", ended_s=3.0))
    wrong = wrong_answers(book, {ASK: (7, 8, 9, 9)})
    assert "differ from their cold answer at token 2 of 4" in str(wrong[0])
    struck = [
        Struck(
            planned(0), 2.0, True, kills=1, attempts=1, detected_s=0.1, opened_s=2.0, answered_s=2.5
        ),
        Struck(planned(1, Fault.STOP), 7.0, False, problem="it hangs"),
    ]
    told = report(book, struck, wrong, ["a lane is busy"])
    assert (told.kills, told.streams, told.wrong_streams, told.lost_streams) == (1, 3, 1, 1)
    kill, stop = told.faults
    assert (kill.fault, kill.streams_hit, kill.lost, kill.wrong, kill.in_moment) == (
        "kill-decode",
        2,
        1,
        0,
        1,
    )
    assert (stop.fault, stop.streams_hit, stop.wrong, stop.problems) == (
        "stop",
        2,
        1,
        ("stop of stage 0 in decode: it hangs",),
    )
    assert not told.is_clean
    keys = {"kills", "streams", "wrong_streams", "lost_streams", "pause_s_p50", "pause_s_p95"}
    assert keys <= set(json.loads(told.to_json()))


@pytest.mark.parametrize(
    "found", [{"problems": ["a lane is busy"]}, {"wrong": True}, {"lost": True}]
)
def test_any_finding_makes_a_report_unclean(found: dict[str, object]) -> None:
    book = Book()
    book.ended(played(error="INTERNAL: no" if found.get("lost") else ""))
    cold = {ASK: (1,) if found.get("wrong") else (7, 8, 9, 9)}
    assert not report(book, [], wrong_answers(book, cold), found.get("problems", [])).is_clean  # type: ignore[arg-type]
    clean = Book()
    clean.ended(played())
    assert report(clean, [], wrong_answers(clean, {ASK: (7, 8, 9, 9)}), []).is_clean
