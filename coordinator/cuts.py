"""Where a prompt is cut into prefill chunks.

Where rows are bit-identical however they are cut, into chunks that keep every stage busy. Elsewhere by the
cut plan: a pure, prefix-stable function of length and message boundaries. A prompt that extends another has
the other's cuts up to its end, so cold and warm runs cut alike and a hit merely skips a prefix of the plan.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from coordinator.config import SchedulerSettings

# What a call costs before its first row, in rows: reading the weights, and the calls themselves.
# SmolLM2's slices on one CPU core: about 25 ms and 2 ms a row.
CALL_COST_ROWS = 12


def cut_plan(
    n_tokens: int, boundaries: Sequence[int], *, chunk_rows: int, min_chunk_rows: int
) -> tuple[int, ...]:
    """The rising ends of the chunks; the last one is `n_tokens`.

    A message boundary ends a chunk unless the chunk would have fewer than `min_chunk_rows` rows;
    within a message, chunks of `chunk_rows` are counted from the last cut.
    """
    return (*_inner_cuts(n_tokens, boundaries, chunk_rows, min_chunk_rows), n_tokens)


def planned_cuts(
    settings: SchedulerSettings, n_tokens: int, boundaries: Sequence[int]
) -> tuple[int, ...]:
    """The cut plan by a ring's settings."""
    return cut_plan(
        n_tokens,
        boundaries,
        chunk_rows=settings.chunk_rows,
        min_chunk_rows=settings.min_chunk_rows,
    )


def _inner_cuts(
    n_tokens: int, boundaries: Sequence[int], chunk_rows: int, min_chunk_rows: int
) -> Iterator[int]:
    last = 0
    for boundary in boundaries:
        if boundary >= n_tokens:
            break
        while boundary - last > chunk_rows:
            last += chunk_rows
            yield last
        if boundary - last >= min_chunk_rows:
            last = boundary
            yield last
    while n_tokens - last > chunk_rows:
        last += chunk_rows
        yield last


def even_cuts(start: int, end: int, *, stages: int, chunk_rows: int) -> tuple[int, ...]:
    """The ends of equal chunks of rows [start, end), enough of them to keep all stages busy.

    For rings whose rows do not depend on the cuts. n chunks through S stages take (n + S - 1) steps of
    f + rows / n each, f being a call's fixed cost; the least is at n = sqrt((S - 1) * rows / f).
    """
    rows = end - start
    for_overlap = round(math.sqrt((stages - 1) * rows / CALL_COST_ROWS))
    chunks = min(max(for_overlap, math.ceil(rows / chunk_rows), 1), rows)
    return tuple(start + rows * (n + 1) // chunks for n in range(chunks))


def next_cut(cuts: Sequence[int], row: int) -> int:
    """The end of the chunk that holds `row`; raises IndexError behind the plan's end."""
    return cuts[bisect_right(cuts, row)]
