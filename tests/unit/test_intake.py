"""What requests and waiting turns take of the memory is bounded, and what is given back is free for others."""

from __future__ import annotations

import tracemalloc

import pytest

from coordinator.config import SchedulerSettings
from coordinator.drafters.ngram import NgramDrafter
from coordinator.errors import InvalidSetting, QueueFull, Shed
from coordinator.events import Submitted
from coordinator.frames import JobId
from coordinator.requests import Request
from coordinator.scheduler import Scheduler
from fakering.clock import VirtualClock
from fakering.model import FakeModel
from fakering.ring import describe
from fakering.texts import novel
from gateway.intake import Intake
from gateway.settings import ServeSettings

KIB = 1024


def test_requests_hold_no_more_bytes_than_may_be_held_at_once() -> None:
    shed: list[Shed] = []
    intake = Intake(VirtualClock(), 300 * KIB, shed.append)
    with intake.opened() as one, intake.opened() as two:
        one.add(100 * KIB)
        one.add(100 * KIB)
        two.add(70 * KIB)
        with pytest.raises(QueueFull) as full:
            two.add(31 * KIB)
        assert (full.value.reason, full.value.waiting) == (Shed.BYTES, 270 * KIB)
        two.add(30 * KIB)
        assert intake.bytes == 300 * KIB
    assert intake.bytes == 0
    assert shed == [Shed.BYTES]


def test_a_small_request_always_finds_room() -> None:
    intake = Intake(VirtualClock(), 300 * KIB)
    with intake.opened() as big, intake.opened() as small:
        big.add(300 * KIB)
        small.add(64 * KIB)
        with pytest.raises(QueueFull):
            small.add(1)


def test_the_end_of_a_request_that_was_let_in_is_not_refused() -> None:
    intake = Intake(VirtualClock(), 300 * KIB)
    with intake.opened() as big, intake.opened() as small:
        big.add(300 * KIB)
        small.add(60 * KIB)
        big.add(0)
        assert big.bytes == 300 * KIB


def test_a_request_that_fails_gives_its_bytes_back() -> None:
    intake = Intake(VirtualClock(), 300 * KIB)
    with pytest.raises(RuntimeError), intake.opened() as held:  # noqa: PT012
        held.add(200 * KIB)
        raise RuntimeError
    with intake.opened() as held:
        held.add(200 * KIB)
        held.drop()
        assert intake.bytes == 0
    assert intake.bytes == 0


def test_room_is_expected_when_as_many_bytes_have_been_answered() -> None:
    clock = VirtualClock()
    intake = Intake(clock, 300 * KIB)
    for _ in range(80):
        with intake.opened() as held:
            held.add(100 * KIB)
            clock.advance(40.0)
    with intake.opened() as held, intake.opened() as other:
        held.add(300 * KIB)
        with pytest.raises(QueueFull) as full:
            other.add(150 * KIB)
    assert full.value.retry_after_s == pytest.approx(20.0, rel=0.01)


def test_the_longest_request_must_find_room() -> None:
    with pytest.raises(InvalidSetting, match="request_bytes"):
        ServeSettings(model="m", request_bytes=1000)


def test_a_turn_that_waits_takes_little_more_than_its_prompt() -> None:
    """What drafts are looked up in is five times as large: it is made when the turn has its lane."""
    tokens = 20_000
    info = describe("fake", FakeModel(50_000), 2, 1, tokens + 1)
    scheduler = Scheduler("ring", info, SchedulerSettings())
    prompts = [novel(tokens, number, 50_000) for number in range(3)]
    held = []
    for number, prompt in enumerate(prompts):
        request = Request(prompt)
        tracemalloc.start()
        scheduler.on(Submitted(JobId(number), request, NgramDrafter(), 0.0))
        held.append(tracemalloc.get_traced_memory()[0] / tokens)
        tracemalloc.stop()
    assert scheduler.waiting == 2
    assert held[0] > 100, "the first one has its lane"
    assert max(held[1:]) < 12
