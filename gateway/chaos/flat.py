"""Whether something that was looked at for a long time grows. Pure.

The rule: a straight line is laid through the last two thirds of the values (the first third is for caches to fill, and
for what is loaded late), and drawn out over the whole time. What it rises by is too much when it is more than may be,
and when the values do not swing so much that they could have risen by chance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_SHARE = 0.05
_SETTLED = 1 / 3
# Fewer say nothing.
_LEAST_VALUES = 6
# How many standard errors a rise has to be worth.
_SURE = 3.0


@dataclass(frozen=True, slots=True)
class Growth:
    """`rise`: over the whole time, by the line; negative where it falls. `error`: its standard error."""

    role: str  # of the process
    what: str
    mean: float
    rise: float
    error: float
    most: float  # that it may rise by

    @property
    def is_flat(self) -> bool:
        return self.rise < self.most or self.rise < _SURE * self.error

    def __str__(self) -> str:
        allowed = f"from about {self.mean:.3g}: {self.most:.3g} may be"
        return f"{self.role}: {self.what} rises by {self.rise:.3g} over the run, {allowed}"


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much may come on top in a run: a twentieth of the mean, but `few` always and never more than `a_minute`."""

    few: float
    a_minute: float = math.inf

    def most(self, mean: float, minutes: float) -> float:
        return max(self.few, min(_MOST_SHARE * mean, self.a_minute * minutes))


def growth(
    role: str,
    what: str,
    times_s: Sequence[float],
    values: Sequence[float],
    allowance: Allowance,
) -> Growth | None:
    """None: there are too few values."""
    begin = int(len(values) * _SETTLED)
    late, late_values = times_s[begin:], values[begin:]
    if len(late) < _LEAST_VALUES:
        return None
    mean, took_s = statistics.fmean(late_values), times_s[-1] - times_s[0]
    slope, at_zero = statistics.linear_regression(late, late_values)
    off = sum((y - at_zero - slope * x) ** 2 for x, y in zip(late, late_values, strict=True))
    spread = statistics.pvariance(late) * len(late)
    error = math.sqrt(off / (len(late) - 2) / spread)
    most = allowance.most(mean, took_s / 60)
    return Growth(role, what, mean, slope * took_s, error * took_s, most)
