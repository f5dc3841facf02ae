"""The cut plan is a prefix-stable function that covers the prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cuts import cut_plan, even_cuts, next_cut

_PROMPTS = st.integers(1, 400).flatmap(
    lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=12).map(sorted))
)


def _plan(n: int, boundaries: list[int]) -> tuple[int, ...]:
    return cut_plan(n, boundaries, chunk_rows=32, min_chunk_rows=8)


@given(_PROMPTS)
def test_a_plan_covers_the_prompt_in_chunks_of_bounded_size(prompt: tuple[int, list[int]]) -> None:
    n, boundaries = prompt
    cuts = _plan(n, boundaries)
    assert cuts[-1] == n
    widths = [end - start for start, end in zip((0, *cuts), cuts, strict=False)]
    assert all(0 < width <= 32 for width in widths)
    assert all(width >= 8 for width in widths[:-1])


@given(_PROMPTS, st.integers(1, 200))
def test_an_extended_prompt_keeps_the_cuts(prompt: tuple[int, list[int]], more: int) -> None:
    n, boundaries = prompt
    shorter = _plan(n, boundaries)
    longer = _plan(n + more, [*boundaries, n])
    assert longer[: len(shorter) - 1] == shorter[:-1]


def test_a_message_boundary_is_a_cut_and_a_tiny_message_is_not() -> None:
    assert _plan(60, [20, 22, 50]) == (20, 50, 60)


def test_the_chunk_of_a_row_ends_at_the_next_cut() -> None:
    cuts = (20, 50, 60)
    assert [next_cut(cuts, row) for row in (0, 19, 20, 59)] == [20, 20, 50, 60]
    with pytest.raises(IndexError):
        next_cut(cuts, 60)


@given(st.integers(0, 300), st.integers(1, 3000), st.integers(1, 6))
def test_even_cuts_cover_the_rows_in_bounded_chunks(start: int, rows: int, stages: int) -> None:
    cuts = even_cuts(start, start + rows, stages=stages, chunk_rows=128)
    widths = [end - begin for begin, end in zip((start, *cuts), cuts, strict=False)]
    assert cuts[-1] == start + rows
    assert all(0 < width <= 128 for width in widths)
    assert max(widths) - min(widths) <= 1


def test_a_short_suffix_is_cut_for_two_stages_and_not_for_one() -> None:
    assert even_cuts(500, 560, stages=1, chunk_rows=128) == (560,)
    assert even_cuts(500, 560, stages=2, chunk_rows=128) == (530, 560)
