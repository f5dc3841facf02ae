"""Medians, percentiles and rounding, the same in every report."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

_P95 = 0.95


def median(values: Iterable[float | None]) -> float | None:
    """None of nothing; values that are None do not count."""
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 2) if known else None


def p95(values: Iterable[float | None]) -> float | None:
    """The nearest rank: a value that was measured."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    rank = -(-len(known) * _P95 // 1)
    return round(known[int(rank) - 1], 2)


def ratio(part: float | None, whole: float | None) -> float | None:
    return round(part / whole, 3) if part is not None and whole else None
