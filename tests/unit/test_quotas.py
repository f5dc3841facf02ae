"""Limits of a key: jobs at once and tokens a minute, on a clock that the tests move."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coordinator.errors import InvalidSetting, RateLimited
from fakering.clock import VirtualClock
from gateway.safety.keys import NOBODY, Caller
from gateway.safety.quotas import Admitted, Limits, Quotas

_A, _B = Caller("a"), Caller("b")


def spent(quotas: Quotas, caller: Caller, tokens: int) -> None:
    with quotas.admit(caller) as job:
        job.used(tokens)


def wait_of(quotas: Quotas, caller: Caller) -> float:
    """How long the caller is told to wait; 0: he is let in."""
    try:
        with quotas.admit(caller):
            return 0.0
    except RateLimited as limited:
        return limited.retry_after_s


def test_jobs_at_once_are_counted_for_each_key_and_given_back_however_they_end() -> None:
    quotas = Quotas(Limits(jobs=2), VirtualClock())
    with ExitStack() as running:
        for _ in range(2):
            running.enter_context(quotas.admit(_A))
        with pytest.raises(RateLimited, match="2 turns at once") as told, quotas.admit(_A):
            pass
        assert told.value.retry_after_s > 0
        assert wait_of(quotas, _B) == 0
    assert wait_of(quotas, _A) == 0
    with suppress(KeyError), quotas.admit(_A):
        raise KeyError
    with quotas.admit(_A), quotas.admit(_A):
        pass


def test_tokens_leak_at_the_rate_and_the_wait_that_is_told_is_enough_and_no_more() -> None:
    clock = VirtualClock()
    quotas = Quotas(Limits(tokens_per_minute=600), clock)
    spent(quotas, _A, 600)
    told = wait_of(quotas, _A)
    assert told == pytest.approx(0.1, abs=0.01)
    assert wait_of(quotas, _B) == 0
    spent(quotas, _B, 1200)
    assert wait_of(quotas, _B) == pytest.approx(60.1, abs=0.01), "what was over is paid back"
    clock.advance_to(told / 2)
    assert wait_of(quotas, _A) > 0
    clock.advance_to(told)
    assert wait_of(quotas, _A) == 0


def test_a_refused_request_costs_nothing() -> None:
    quotas = Quotas(Limits(jobs=1, tokens_per_minute=60), VirtualClock())
    spent(quotas, _A, 61)
    told = wait_of(quotas, _A)
    for _ in range(100):
        assert wait_of(quotas, _A) == told
    with quotas.admit(_B):
        assert all(wait_of(quotas, _B) > 0 for _ in range(10))
    assert wait_of(quotas, _B) == 0


def test_without_limits_everybody_is_let_in() -> None:
    quotas = Quotas(Limits(), VirtualClock())
    with ExitStack() as running:
        for _ in range(1000):
            running.enter_context(quotas.admit(NOBODY)).used(1 << 40)


@pytest.mark.parametrize("name", ["jobs", "tokens_per_minute"])
def test_a_limit_of_nothing_is_refused_when_it_is_set(name: str) -> None:
    for most in (0, -1):
        with pytest.raises(InvalidSetting, match=name):
            Limits(**{name: most})


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 10**7),
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10**8)), max_size=20),
    st.floats(0, 1e6),
)
def test_whoever_waits_as_long_as_he_is_told_is_let_in(
    most: int, uses: list[tuple[float, int]], start: float
) -> None:
    clock = VirtualClock(start)
    quotas = Quotas(Limits(tokens_per_minute=most), clock)
    for after_s, tokens in uses:
        clock.advance_to(clock.now() + after_s)
        if not wait_of(quotas, _A):
            spent(quotas, _A, tokens)
    clock.advance_to(clock.now() + wait_of(quotas, _A))
    assert wait_of(quotas, _A) == 0


class Plain(RuleBasedStateMachine):
    """Beside a plain account of everything that ever happened: no job is let in where some stretch of time holds more
    than leaks in it, and none is kept out that has room.
    """

    MOST, JOBS = 60, 2  # a token a second

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.quotas = Quotas(Limits(self.JOBS, self.MOST), self.clock)
        self.running: dict[Caller, list[tuple[ExitStack, Admitted]]] = {_A: [], _B: []}
        self.history: dict[Caller, list[tuple[float, int]]] = {_A: [], _B: []}

    def level(self, caller: Caller) -> float:
        """By its definition: the most by which any stretch up to now exceeds what leaks in it."""
        now, uses = self.clock.now(), self.history[caller]
        return max(
            (sum(n for _, n in uses[i:]) - (now - uses[i][0]) for i in range(len(uses))),
            default=0.0,
        )

    @rule(caller=st.sampled_from([_A, _B]))
    def asks(self, caller: Caller) -> None:
        room = len(self.running[caller]) < self.JOBS and self.level(caller) <= self.MOST - 1 + 1e-6
        stack = ExitStack()
        try:
            job = stack.enter_context(self.quotas.admit(caller))
        except RateLimited:
            assert not room
            return
        assert room
        self.running[caller].append((stack, job))

    @rule(caller=st.sampled_from([_A, _B]), tokens=st.integers(0, 90))
    def uses(self, caller: Caller, tokens: int) -> None:
        if self.running[caller]:
            self.running[caller][0][1].used(tokens)
            self.history[caller].append((self.clock.now(), tokens))

    @rule(caller=st.sampled_from([_A, _B]))
    def ends(self, caller: Caller) -> None:
        if self.running[caller]:
            self.running[caller].pop()[0].close()

    @rule(seconds=st.integers(0, 70))
    def time_goes_by(self, seconds: int) -> None:
        self.clock.advance_to(self.clock.now() + seconds)

    @invariant()
    def no_more_run_than_may(self) -> None:
        assert all(len(jobs) <= self.JOBS for jobs in self.running.values())


TestPlain = Plain.TestCase
TestPlain.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
