"""What metrics and log lines say of a ring that lost a stage: while it heals, once it answers, when it is given up."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.config import SchedulerSettings
from coordinator.errors import RingLost, StageLost
from coordinator.frames import Epoch
from coordinator.held import Holding
from coordinator.ring import RingHealth
from fakering.faults import Lose
from fakering.ring import FakeRing
from gateway.observing.logs import JsonLines, TextLines
from tests.compat.healing import HeldUp
from tests.compat.http_client import until
from tests.unit.watched_service import turn, watched

if TYPE_CHECKING:
    from tests.unit.watched_service import Figures

PROMPT = "the quick brown fox jumps over the lazy dog"
STATES = ("ready", "loading", "recovering", "draining", "down")
FAST = SchedulerSettings(heal_attempts=3, heal_backoff_s=0.01)


def state_of(seen: Figures) -> str:
    (state,) = [state for state in STATES if seen["ring_state", state]]
    return state


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What the ring log wrote, as JSON."""
    ours = [record for record in caplog.records if record.name == "coordinator.ring_log"]
    return [json.loads(JsonLines().format(record)) for record in ours]


async def test_a_replaced_stage_is_counted_with_the_seconds_that_it_cost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with watched(faults=(Lose(stage=1, nth=6),)) as it:
        before = it.figures()
        await it.run(turn(PROMPT, tokens=20))
        seen = it.figures()
    assert before["stages_replaced_total", "ring-0"] == 0
    assert seen["stages_replaced_total", "ring-0"] == 1
    assert seen["epochs_total", "lost"] == 1
    assert seen["epochs_total", "unhealed"] == 0
    assert seen["restore_seconds_count"] == 1
    assert seen["ring_epoch"] == 1
    lost, restored = lines(caplog)
    assert (lost["level"], lost["message"], lost["ring"]) == ("warning", "recovering", "ring-0")
    assert (lost["epoch"], lost["cause"], lost["attempt"], lost["delay_s"]) == (1, "lost", 1, 0.0)
    assert lost["reason"] == "stage 1: died (scripted)"
    assert (restored["level"], restored["message"]) == ("warning", "answers again")
    assert (restored["attempts"], restored["replaced_stages"]) == (1, 1)
    # The new stage holds nothing, so no lane has a row that all of them have.
    assert restored["rows_kept"] == 0
    assert restored["rows_lost"] >= len(PROMPT)
    assert 0 < restored["seconds"] == pytest.approx(seen["restore_seconds_sum"], abs=1e-3)


async def test_a_ring_that_heals_is_recovering_until_it_is_whole() -> None:
    async with watched(faults=(Lose(stage=0, nth=6),), kind=HeldUp) as it:
        running = asyncio.create_task(it.run(turn(PROMPT, tokens=20)))
        ring = it.made[0]
        assert isinstance(ring, HeldUp)
        await ring.heals.wait()
        during = it.figures()
        ring.may_heal.set()
        await running
        after = it.figures()
    assert (state_of(during), during["num_requests_waiting"]) == ("recovering", 1)
    assert state_of(after) == "ready"


class Unhealable(FakeRing):
    async def open_epoch(self, epoch: Epoch) -> Holding:
        raise RingLost(0, "no room for it")


async def test_failed_healings_are_counted_and_a_ring_that_is_given_up_is_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with watched(faults=(Lose(stage=0, nth=6),), kind=Unhealable, settings=FAST) as it:
        with pytest.raises(StageLost):
            await it.run(turn(PROMPT, tokens=20))
        seen = it.figures()
    assert seen["epochs_total", "lost"] == 1
    assert seen["epochs_total", "unhealed"] == 2, "the third one gave it up"
    assert seen["stages_replaced_total", "ring-0"] == 0
    assert seen["restore_seconds_count"] == 0
    assert state_of(seen) == "down"
    *tries, end = lines(caplog)
    assert [each["attempt"] for each in tries] == [1, 2, 3]
    assert [each["delay_s"] for each in tries] == [0.0, 0.01, 0.02]
    assert (end["level"], end["message"], end["ring"]) == ("error", "given up", "ring-0")
    assert "no room for it" in end["reason"]
    assert "ringserve rings add" in end["what_to_do"]


async def test_a_stop_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async with watched() as it:
        await it.run(turn(PROMPT))
    assert lines(caplog) == []


async def test_a_loss_of_a_ring_at_rest_costs_no_more_seconds_than_its_healing() -> None:
    """The next turn may come an hour later: that is not how long it took."""
    async with watched() as it:
        await it.run(turn(PROMPT))
        ring = it.made[0]
        ring._go_down(RingLost(1, "died"))
        await until(lambda: bool(it.figures()["restore_seconds_count"]))
        assert state_of(it.figures()) == "ready"


class WithSpares(FakeRing):
    def health(self) -> RingHealth:
        return RingHealth(True, spares=2)


async def test_spares_are_a_gauge_of_each_ring() -> None:
    async with watched(kind=WithSpares) as it:
        seen = it.figures()
    assert seen["ring_spares", "ring-0"] == 2


def test_as_text_a_line_says_it_all_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    from coordinator.observe import EpochCause, EpochEnd
    from coordinator.ring_log import RingLog

    with caplog.at_level(logging.WARNING):
        RingLog().epoch_ended(
            "ring-0", EpochEnd(Epoch(3), EpochCause.LOST, "stage 1: died", 2, 0.5)
        )
    told = TextLines().format(caplog.records[0])
    facts = "ring=ring-0 epoch=3 cause=lost reason=stage 1: died attempt=2 delay_s=0.5"
    assert told.endswith(f"WARNING coordinator.ring_log recovering {facts}")
