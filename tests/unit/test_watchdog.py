"""A stage's process ends itself when nobody probes it any more, and for no other reason."""

from __future__ import annotations

import pytest

from stage.watchdog import Watchdog


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watchdog(clock: Clock) -> Watchdog:
    return Watchdog(10.0, clock)


def fenced_after(watchdog: Watchdog, clock: Clock, most_s: float = 100.0) -> float | None:
    begin = clock.now
    while clock.now - begin < most_s:
        clock.now += watchdog.step_s
        if watchdog.is_fenced():
            return clock.now - begin
    return None


def test_who_was_never_probed_is_never_fenced(watchdog: Watchdog, clock: Clock) -> None:
    assert fenced_after(watchdog, clock) is None


def test_a_silence_ends_it_and_a_probe_ends_the_silence(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.heard()
    assert fenced_after(watchdog, clock, 9.0) is None
    watchdog.heard()
    assert fenced_after(watchdog, clock) == pytest.approx(10.0)


def test_time_in_which_the_process_was_stopped_is_no_silence(
    watchdog: Watchdog, clock: Clock
) -> None:
    watchdog.heard()
    assert not watchdog.is_fenced()
    clock.now += 3600.0
    assert not watchdog.is_fenced()
    # It is awake again, and has seen two steps of the silence.
    assert fenced_after(watchdog, clock) == pytest.approx(8.0)


def test_a_load_may_take_its_time_whatever_probe_comes_late(
    watchdog: Watchdog, clock: Clock
) -> None:
    watchdog.heard()
    watchdog.hold()
    watchdog.heard()
    assert fenced_after(watchdog, clock) is None
    watchdog.release()
    assert fenced_after(watchdog, clock) is None
    watchdog.heard()
    assert fenced_after(watchdog, clock) == pytest.approx(10.0)
