"""What frames cost the stages, learned from the replies' own times.

Decides nothing. A frame costs a fixed part and one for each row; how many rows the fixed part is worth differs by
two orders of magnitude between a CPU core, where a row costs a twelfth of a call, and a GPU, where a hundred are free.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from coordinator.frames import Frame, Reply, SegmentKind
from coordinator.jobs import Phase

# SmolLM2's slices on one CPU core: 30 ms a call and 2.3 ms a row (1 to 512 rows at row 512, float32).
DEFAULT_CALL_ROWS = 12.0
# Bounds for a fit of noisy times.
_LEAST, _MOST = 1.0, 4096.0
# A frame's weight falls to a third within 50 frames: depth of context and neighbours change the costs.
_FORGET = 0.98
# How much of a new time is believed at once.
_BLEND = 0.1
# Variance of the rows, in squares of their mean, from which on a slope is more than noise.
_LEAST_SPREAD = 0.25
# Frames before the fit is believed.
_ENOUGH = 8.0


class Costs:
    """Both models of one ring, fed by its replies."""

    def __init__(self, stages: int) -> None:
        self.frames = CostModel()
        self._stretch = StretchModel()
        self._stages = stages

    def learn(self, frame: Frame, reply: Reply, phases: Collection[Phase]) -> None:
        """`phases`: what the ring's jobs were doing meanwhile."""
        seconds = [timing.compute_s for timing in reply.timings]
        if frame.alone:
            return  # computed by more cores than frames that share the ring
        if not seconds or reply.refusals or not frame.rows or min(seconds) <= 0.0:
            return
        self.frames.observe(frame.rows, sum(seconds) / len(seconds))
        prefills = any(segment.kind is SegmentKind.PREFILL for segment in frame.segments)
        if prefills and Phase.DECODE in phases:
            self._stretch.observe_beside(frame.rows + self.frames.call_rows, max(seconds))
        elif not prefills and Phase.PREFILL not in phases:
            self._stretch.observe_alone(sum(seconds))

    def stretched_rows(self, stretch: float, decoding: int) -> int:
        """The rows that a frame may have for `decoding` jobs to wait no longer than they must."""
        step_rows = math.ceil(decoding / self._stages)
        return self._stretch.rows(
            stretch, call_rows=self.frames.call_rows, step_rows=step_rows, stages=self._stages
        )


class CostModel:
    """A least-squares line through (rows, seconds), with exponential forgetting."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._call_rows = DEFAULT_CALL_ROWS

    def observe(self, rows: int, seconds: float) -> None:
        for name, value in (
            ("_n", 1.0),
            ("_x", rows),
            ("_y", seconds),
            ("_xx", rows * rows),
            ("_xy", rows * seconds),
        ):
            setattr(self, name, getattr(self, name) * _FORGET + value)
        self._fit()

    @property
    def call_rows(self) -> float:
        """How many rows cost as much as a call without rows."""
        return self._call_rows

    def _fit(self) -> None:
        """Frames that are all alike tell nothing of the slope: what was known then stands."""
        spread = self._n * self._xx - self._x * self._x
        if self._n < _ENOUGH or spread < self._x * self._x * _LEAST_SPREAD:
            return
        slope = (self._n * self._xy - self._x * self._y) / spread
        fixed = (self._y - slope * self._x) / self._n
        if slope > 0.0 and fixed > 0.0:
            self._call_rows = min(max(fixed / slope, _LEAST), _MOST)

    def rows_in(self, seconds: float) -> float:
        """How many more rows a stage could compute in that time."""
        if self._y <= 0.0:
            return 0.0
        row_s = self._y / (self._n * self.call_rows + self._x)
        return seconds / row_s


class StretchModel:
    """How long a decoding job's step takes alone and beside prefills, as the stages' own times tell.

    Stages that compute at once slow each other down, so what a frame costs beside others is measured there
    and not derived from what it costs alone.
    """

    def __init__(self) -> None:
        self._alone_s: float | None = None  # a step without prefills: one frame through all stages
        self._rate: float | None = (
            None  # rows (with the call's) a second, on the slowest stage, beside prefills
        )

    def observe_alone(self, seconds: float) -> None:
        self._alone_s = _blend(self._alone_s, seconds)

    def observe_beside(self, rows: float, seconds: float) -> None:
        self._rate = _blend(self._rate, rows / seconds)

    def rows(self, stretch: float, *, call_rows: float, step_rows: int, stages: int) -> int:
        """Rows of one frame so that a step, which is as many frames as stages, takes at most `stretch` times
        as long as alone. Before anything was measured: by the fixed cost alone.
        """
        if self._alone_s is None or self._rate is None:
            return int(stretch * (call_rows + step_rows) - call_rows)
        return int(stretch * self._alone_s / stages * self._rate - call_rows)


def _blend(known: float | None, new: float) -> float:
    return new if known is None else known + (new - known) * _BLEND
