"""Whether something that was looked at for a long time grows. Pure.

The rule: a straight line is laid through the last two thirds of the values (the first third is for caches to fill, and
for what is loaded late), and drawn out over the whole time. What it rises by must be less than a twentieth of the mean,
or than a few pieces where pieces are counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_SHARE = 0.05
_SETTLED = 1 / 3
# Fewer say nothing.
_LEAST_VALUES = 6


@dataclass(frozen=True, slots=True)
class Growth:
    """`rise`: over the whole time, by the line; negative where it falls."""

    what: str
    mean: float
    rise: float
    most: float  # that it may rise by

    @property
    def is_flat(self) -> bool:
        return self.rise < self.most

    def __str__(self) -> str:
        return f"{self.what} rises by {self.rise:.3g} over the run, from about {self.mean:.3g}: {self.most:.3g} may be"


def growth(
    what: str, times_s: Sequence[float], values: Sequence[float], few: float = 0.0
) -> Growth | None:
    """None: there are too few values. `few`: so much may come on top whatever the mean is."""
    begin = int(len(values) * _SETTLED)
    late, late_values = times_s[begin:], values[begin:]
    if len(late) < _LEAST_VALUES:
        return None
    mean = statistics.fmean(late_values)
    slope = statistics.linear_regression(late, late_values).slope
    return Growth(what, mean, slope * (times_s[-1] - times_s[0]), max(_MOST_SHARE * mean, few))
