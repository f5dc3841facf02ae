"""What lanes tell of themselves to whoever looks: whose they are, what they hold, and what of it was reused."""

from __future__ import annotations

from coordinator.frames import JobId, LaneId
from coordinator.lanes import LaneChoice, LaneState, LaneStatus, LaneTable
from coordinator.ledger import Ledger
from coordinator.requests import SessionId

S = SessionId("s")


class Rows(Ledger):
    """A ledger of which only the number of valid rows counts."""

    def __init__(self, lanes: int) -> None:
        super().__init__(lanes, 100)
        self.valid = [0] * lanes

    def valid_rows(self, lane: LaneId) -> int:
        return self.valid[lane]


def told(table: LaneTable, *, decodes: bool = False) -> list[LaneStatus]:
    return list(table.statuses(9, lambda _: decodes))


def test_a_lane_tells_its_life() -> None:
    ledger = Rows(1)
    table, lane = LaneTable(ledger, 1), LaneId(0)
    assert told(table) == [LaneStatus(lane, LaneState.EMPTY, None, 0, 0)]
    table.take(LaneChoice(lane, 30), JobId(1), S)
    # Rows that are copied here are valid once the frame that copies them was sent.
    assert told(table) == [LaneStatus(lane, LaneState.PREFILL, S, 0, 0)]
    ledger.valid[0] = 40
    assert told(table) == [LaneStatus(lane, LaneState.PREFILL, S, 40, 30)]
    assert told(table, decodes=True) == [LaneStatus(lane, LaneState.DECODE, S, 40, 30)]
    table.release(lane)
    assert told(table, decodes=True) == [LaneStatus(lane, LaneState.RESTING, S, 40, 30)]
    table.disown(S)
    assert told(table) == [LaneStatus(lane, LaneState.RESTING, None, 40, 30)]


def test_a_job_that_starts_over_has_reused_what_it_started_from() -> None:
    ledger = Rows(1)
    table = LaneTable(ledger, 1)
    table.take(LaneChoice(LaneId(0), 30), JobId(1), S)
    table.reopened(LaneId(0), 10)
    ledger.valid[0] = 50
    assert told(table)[0].reused_rows == 10
    table.vacate()
    assert table.forget_empty() == [0]
    assert (told(table)[0].session, told(table)[0].state) == (S, LaneState.RESTING)
    ledger.valid[0] = 0
    assert table.forget_empty() == []
    assert (told(table)[0].session, told(table)[0].reused_rows) == (None, 0)


def test_of_too_many_lanes_those_used_last_are_told_in_their_order() -> None:
    table = LaneTable(Rows(6), 1)
    for job, lane in enumerate((4, 1, 5)):
        table.take(LaneChoice(LaneId(lane), 0), JobId(job), None)
    assert [each.lane for each in table.statuses(2, lambda _: False)] == [1, 5]
    assert [each.lane for each in table.statuses(6, lambda _: False)] == [0, 1, 2, 3, 4, 5]
