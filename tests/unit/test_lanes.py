"""Who gets which lane: the longest prefix, in place where nobody loses, copied where somebody would."""

from __future__ import annotations

from coordinator.frames import Epoch, Frame, JobId, LaneId, OpenLane, Segment, SegmentKind, Seq
from coordinator.lanes import LaneChoice, LaneTable
from coordinator.ledger import Ledger
from coordinator.prefixes import digest_of
from coordinator.requests import SessionId

_A, _B = SessionId("a"), SessionId("b")
_HEAD = tuple(range(100, 120))
_MOST = 99  # rows that may be reused: more than any prompt here has


def _table(lanes: int) -> tuple[Ledger, LaneTable]:
    ledger = Ledger(lanes, max_rows=64)
    return ledger, LaneTable(ledger, min_copy_rows=4)


def _fill(ledger: Ledger, lane: int, tokens: tuple[int, ...], job: int = 1) -> None:
    opening = OpenLane(LaneId(lane), JobId(job), 0, digest_of(()))
    segment = Segment(LaneId(lane), JobId(job), 0, tokens, SegmentKind.PREFILL)
    applied = ledger.apply(Frame(Epoch(0), Seq(ledger.next_seq), (opening,), (segment,)))
    assert not applied.refusals


def _seat(
    table: LaneTable, ledger: Ledger, lane: int, session: SessionId, tokens: tuple[int, ...]
) -> None:
    table.take(LaneChoice(LaneId(lane), 0), JobId(lane), session)
    _fill(ledger, lane, tokens, lane)
    table.release(LaneId(lane))


def test_a_session_goes_on_in_its_own_lane() -> None:
    ledger, table = _table(3)
    _seat(table, ledger, 1, _A, (*_HEAD, 1, 2, 3))
    choice = table.choose((*_HEAD, 1, 2, 3, 9), _A, reuse=True, most=_MOST)
    assert choice == LaneChoice(LaneId(1), 23)


def test_one_token_is_always_computed() -> None:
    ledger, table = _table(1)
    _seat(table, ledger, 0, _A, _HEAD)
    assert table.choose(_HEAD, _A, reuse=True, most=len(_HEAD) - 1) == LaneChoice(
        LaneId(0), len(_HEAD) - 1
    )


def test_another_sessions_tail_is_copied_around_not_overwritten() -> None:
    ledger, table = _table(2)
    _seat(table, ledger, 0, _A, (*_HEAD, 1, 2, 3))
    choice = table.choose((*_HEAD, 7, 8), _B, reuse=True, most=_MOST)
    assert choice == LaneChoice(LaneId(1), 20, copy_from=LaneId(0))


def test_a_lane_that_is_wholly_a_prefix_is_extended_in_place() -> None:
    ledger, table = _table(2)
    _seat(table, ledger, 0, _A, _HEAD)
    assert table.choose((*_HEAD, 7, 8), _B, reuse=True, most=_MOST) == LaneChoice(LaneId(0), 20)


def test_a_short_shared_prefix_is_not_worth_a_copy() -> None:
    ledger, table = _table(2)
    _seat(table, ledger, 0, _A, (5, 6, 7, 1, 2, 3))
    assert table.choose((5, 6, 7, 8, 9), _B, reuse=True, most=_MOST) == LaneChoice(LaneId(1), 0)


def test_the_idle_lane_used_longest_ago_is_overwritten() -> None:
    ledger, table = _table(2)
    _seat(table, ledger, 1, _A, (1, 2, 3))
    _seat(table, ledger, 0, _B, (4, 5, 6))
    assert table.choose((7, 8, 9), SessionId("c"), reuse=True, most=_MOST) == LaneChoice(
        LaneId(1), 0
    )


def test_a_closed_session_gives_its_lane_up_first() -> None:
    ledger, table = _table(2)
    _seat(table, ledger, 1, _A, (1, 2, 3))
    _seat(table, ledger, 0, _B, (4, 5, 6))
    table.disown(_B)
    assert table.choose((7, 8, 9), SessionId("c"), reuse=True, most=_MOST) == LaneChoice(
        LaneId(0), 0
    )


def test_a_busy_lane_is_never_given_away_but_may_be_copied_from() -> None:
    ledger, table = _table(2)
    table.take(LaneChoice(LaneId(0), 0), JobId(1), _A)
    _fill(ledger, 0, (*_HEAD, 1))
    choice = table.choose((*_HEAD, 1, 2), _A, reuse=True, most=_MOST)
    assert choice == LaneChoice(LaneId(1), 21, copy_from=LaneId(0))
    assert choice is not None
    table.take(choice, JobId(2), _A)
    assert table.choose((*_HEAD, 1, 2), _A, reuse=True, most=_MOST) is None


def test_a_request_without_reuse_starts_at_row_0() -> None:
    ledger, table = _table(1)
    _seat(table, ledger, 0, _A, _HEAD)
    assert table.choose((*_HEAD, 1), _A, reuse=False, most=_MOST) == LaneChoice(LaneId(0), 0)


def test_a_side_call_leaves_its_sessions_conversation_alone() -> None:
    """It shares a session with the conversation, and hardly a token: a title, a probe."""
    ledger, table = _table(2)
    _seat(table, ledger, 0, _A, (*_HEAD, 1, 2, 3))
    assert table.choose((100, 7, 8), _A, reuse=True, most=_MOST) == LaneChoice(LaneId(1), 0)
    _seat(table, ledger, 1, _A, (100, 7, 8))
    assert table.choose((*_HEAD, 1, 2, 3, 4), _A, reuse=True, most=_MOST) == LaneChoice(
        LaneId(0), 23
    )


def test_a_rewritten_end_is_computed_in_place() -> None:
    ledger, table = _table(2)
    _seat(table, ledger, 0, _A, (*_HEAD, 1, 2, 3))
    assert table.choose((*_HEAD, 9), _A, reuse=True, most=_MOST) == LaneChoice(LaneId(0), 20)


def test_further_side_calls_take_the_lanes_of_earlier_ones() -> None:
    ledger, table = _table(2)
    _seat(table, ledger, 0, _A, (*_HEAD, 1, 2, 3))
    for first in (7, 8, 9):
        prompt = (first, 1, 2)
        choice = table.choose(prompt, _A, reuse=True, most=_MOST)
        assert choice == LaneChoice(LaneId(1), 0)
        _seat(table, ledger, 1, _A, prompt)


def test_a_conversation_that_began_anew_outlives_the_one_before_it() -> None:
    """Long ago a session's lane may have been longer than the one it uses now."""
    ledger, table = _table(2)
    _seat(table, ledger, 0, _A, tuple(range(50)))
    for _ in range(4):
        _seat(table, ledger, 1, _A, _HEAD)
    assert table.choose((7, 8, 9), _A, reuse=True, most=_MOST) == LaneChoice(LaneId(0), 0)


def test_a_side_call_takes_what_nobody_owns_before_its_own_sessions_lane() -> None:
    ledger, table = _table(2)
    _seat(table, ledger, 0, _A, (*_HEAD, 1, 2, 3))
    _seat(table, ledger, 1, _B, (4, 5, 6))
    table.disown(_B)
    assert table.choose((7, 8, 9), _A, reuse=True, most=_MOST) == LaneChoice(LaneId(1), 0)


def test_a_conversation_without_a_session_survives_a_stranger_that_begins_alike() -> None:
    ledger, table = _table(2)
    table.take(LaneChoice(LaneId(0), 0), JobId(0), None)
    _fill(ledger, 0, (*_HEAD, 1, 2, 3))
    table.release(LaneId(0))
    assert table.choose((100, 7, 8), None, reuse=True, most=_MOST) == LaneChoice(LaneId(1), 0)
