"""Width and depth follow what drafts and rows cost; a drafter that is wrong costs nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.costs import DEFAULT_CALL_ROWS, CostModel
from coordinator.speculation import DraftRate, DraftTime, Speculation, plan_speculation

_MAX_WIDTH = 16
_RATES = st.floats(0.0, 0.995)
_COSTS = st.floats(1.0, 4096.0)


def _plan(
    rate: float, *, call_rows: float = DEFAULT_CALL_ROWS, jobs: int = 1, stages: int = 2
) -> Speculation:
    return plan_speculation(
        rate, call_rows=call_rows, jobs=jobs, stages=stages, max_width=_MAX_WIDTH
    )


def test_drafts_that_are_never_right_are_not_sent() -> None:
    for jobs in (1, 2, 8):
        assert _plan(0.0, jobs=jobs) == Speculation(width=1, depth=1)


def test_drafts_that_are_always_right_go_wide_and_several_deep() -> None:
    plan = _plan(0.995)
    assert plan.width > _MAX_WIDTH // 2
    assert plan.depth == 2
    assert _plan(0.995, stages=4).depth == 4


@pytest.mark.parametrize("jobs", [2, 3, 8])
def test_depth_is_for_one_job_that_has_the_ring_to_itself(jobs: int) -> None:
    for rate in (0.0, 0.5, 0.9, 0.995):
        assert _plan(rate, jobs=jobs, stages=3).depth == 1


@given(_RATES, _COSTS, st.integers(1, 12), st.integers(1, 6), st.integers(1, 40))
def test_the_bounds_hold_whatever_the_figures(
    rate: float, call_rows: float, jobs: int, stages: int, max_width: int
) -> None:
    plan = plan_speculation(
        rate, call_rows=call_rows, jobs=jobs, stages=stages, max_width=max_width
    )
    assert 1 <= plan.width <= max_width
    assert 1 <= plan.depth <= stages


@given(_COSTS, st.integers(1, 8), st.integers(1, 4))
def test_a_better_drafter_is_never_asked_for_less(call_rows: float, jobs: int, stages: int) -> None:
    plans = [
        _plan(rate / 100, call_rows=call_rows, jobs=jobs, stages=stages) for rate in range(100)
    ]
    for worse, better in zip(plans, plans[1:], strict=False):
        # A second frame in flight takes the place of some of the width.
        assert better.width >= worse.width or better.depth > worse.depth


def test_the_cheaper_a_row_the_wider_a_frame() -> None:
    widths = [_plan(0.7, call_rows=cost, jobs=2).width for cost in (1.0, 12.0, 100.0, 4096.0)]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1] == _MAX_WIDTH


def test_the_rate_follows_what_was_seen_and_forgets() -> None:
    rate = DraftRate()
    assert rate.rate == 0.5
    for _ in range(60):
        rate.observe(0, 1)
    assert rate.rate < 0.05
    assert _plan(rate.rate).width == 1
    for _ in range(20):
        rate.observe(4, 0)
    assert 0.9 < rate.rate < 1.0
    assert _plan(rate.rate).width > 4


def test_steps_without_drafts_give_a_failed_drafter_another_try() -> None:
    rate = DraftRate()
    for _ in range(60):
        rate.observe(0, 1)
    steps = 0
    while _plan(rate.rate).width == 1:
        rate.rest()
        steps += 1
        assert steps < 200, "a drafter that failed once is never asked again"
    # Not soon either, or novel text would pay for drafts all the time.
    assert steps > 10


def _seen(rows: list[int], fixed: float, per_row: float) -> CostModel:
    costs = CostModel()
    for count in rows:
        costs.observe(count, fixed + per_row * count)
    return costs


@given(
    st.lists(st.integers(1, 256), min_size=12, max_size=60).filter(lambda rows: len(set(rows)) > 3),
    st.floats(2.0, 2000.0),
    st.floats(1e-5, 1e-2),
)
def test_the_fit_finds_the_ratio_of_a_line(rows: list[int], ratio: float, per_row: float) -> None:
    costs = _seen(rows, ratio * per_row, per_row)
    assert costs.call_rows in (pytest.approx(ratio, rel=0.02), DEFAULT_CALL_ROWS)
    spread = _seen([*rows, *range(1, 240, 4)], ratio * per_row, per_row)
    assert spread.call_rows == pytest.approx(ratio, rel=0.02)


def test_the_fit_follows_a_machine_that_becomes_slower() -> None:
    costs = _seen([1, 5, 9, 40] * 20, 0.03, 0.003)
    for rows in [1, 5, 9, 40] * 100:
        costs.observe(rows, 0.03 + 0.001 * rows)
    assert costs.call_rows == pytest.approx(30, rel=0.05)


@pytest.mark.parametrize(
    ("rows", "fixed", "per_row"),
    [
        ([], 0.03, 0.002),  # nothing seen
        ([1, 50, 9], 0.03, 0.002),  # too few
        ([7] * 100, 0.03, 0.002),  # all alike: no slope to be seen
        ([1, 50, 9] * 30, 0.5, -0.002),  # a row makes a frame faster
        ([1, 50, 9] * 30, -0.03, 0.002),  # a call costs less than nothing
        ([1, 50, 9] * 30, 0.0, 0.0),  # a clock that stands still
    ],
)
def test_the_fit_refuses_nonsense(rows: list[int], fixed: float, per_row: float) -> None:
    assert _seen(rows, fixed, per_row).call_rows == DEFAULT_CALL_ROWS


@pytest.mark.parametrize(("ratio", "bound"), [(0.01, 1.0), (1e6, 4096.0)])
def test_a_fit_beyond_all_machines_is_cut(ratio: float, bound: float) -> None:
    assert _seen([1, 50, 9] * 30, ratio * 0.001, 0.001).call_rows == pytest.approx(bound)


def test_a_drafter_that_thinks_longer_than_it_saves_is_not_asked() -> None:
    cheap = plan_speculation(
        0.9, call_rows=12, jobs=1, stages=2, max_width=_MAX_WIDTH, draft_rows=0.5
    )
    dear = plan_speculation(
        0.9, call_rows=12, jobs=1, stages=2, max_width=_MAX_WIDTH, draft_rows=40.0
    )
    assert 1 < cheap.width < _plan(0.9).width + 1
    assert dear == Speculation(width=1, depth=1)


def test_thinking_time_is_learned_from_question_to_answer() -> None:
    lookup, model = DraftTime(), DraftTime()
    for step in range(200):
        lookup.answered(4, now=float(step))
        model.asked(now=float(step))
        model.asked(now=step + 0.1)  # asked again while it thinks: the time runs on
        model.answered(4, now=step + 0.2)
    assert lookup.per_token_s == 0.0
    assert model.per_token_s == pytest.approx(0.05, rel=0.01)


def test_time_is_told_in_rows() -> None:
    costs = CostModel()
    assert costs.rows_in(1.0) == 0.0
    for rows in (1, 4, 16, 64) * 10:
        costs.observe(rows, 0.002 * (12 + rows))
    assert costs.rows_in(0.2) == pytest.approx(100, rel=0.05)


def test_hours_of_noisy_steps_do_not_forget_what_a_row_costs() -> None:
    """Steps of one row vary by a third; a fit over the latest frames alone took their noise for a row's cost, and a
    prompt beside a stream then came in frames that held the stream up for a second.
    """
    rng = random.Random(5)
    costs = _seen([1, 9, 40, 120, 250] * 8, 0.03, 0.0023)
    for step in range(5000):
        costs.observe(2 if step % 40 == 0 else 1, 0.0323 * rng.uniform(0.7, 1.4))
    assert costs.call_rows == pytest.approx(0.03 / 0.0023, rel=0.2)
