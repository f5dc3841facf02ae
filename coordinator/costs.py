"""What frames cost the stages, learned from the replies' own times.

Decides nothing. A frame costs a fixed part and one for each row; how many rows the fixed part is worth differs by
two orders of magnitude between a CPU core, where a row costs a twelfth of a call, and a GPU, where a hundred are free.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

from coordinator.frames import Frame, Reply, SegmentKind
from coordinator.jobs import Phase

# SmolLM2's slices on one CPU core: 30 ms a call and 2.3 ms a row (1 to 512 rows at row 512, float32).
DEFAULT_CALL_ROWS = 12.0
# Bounds for a fit of noisy times.
_LEAST, _MOST = 1.0, 4096.0
# How much of a new time is believed at once: depth of context and neighbours change the costs, and a time alone
# is off by a third (23 to 47 ms for one and the same step on two busy cores).
_BLEND = 0.05
# The same for the shares of a stretch: a prompt's chunks become dearer while it grows, and a stream waits for them.
_HURRY = 0.1
# Frames of about one size before their time is believed.
_ENOUGH = 3
# Sizes this far apart tell a call's cost from a row's; nearer ones tell their noise.
_LEAST_SPREAD = 4.0


# How much longer than frames of its size have taken a frame may take. At the end of a long context attention makes
# rows three times as dear as at its beginning (1.9 at row 2,048 of SmolLM2), and neighbours as much again.
_PATIENCE = 10.0
# The first frames of a large model on a slow device: nobody knows what they take.
_PATIENCE_UNSEEN = 4.0


class Costs:
    """Both models of one ring, fed by its replies."""

    def __init__(self, stages: int) -> None:
        self.frames = CostModel()
        self._stretch = StretchModel()
        self._stages = stages
        self._latest: deque[int] = deque(maxlen=stages)  # rows of the frames that a step waits for

    def learn(self, frame: Frame, reply: Reply, phases: Collection[Phase]) -> None:
        """`phases`: what the ring's jobs were doing meanwhile."""
        seconds = [timing.compute_s for timing in reply.timings]
        if frame.alone:
            return  # computed by more cores than frames that share the ring
        if not seconds or reply.refusals or not frame.rows or min(seconds) <= 0.0:
            return
        self.frames.observe(frame.rows, sum(seconds) / len(seconds))
        self._latest.append(frame.rows)
        kinds = {segment.kind for segment in frame.segments}
        if SegmentKind.VERIFY not in kinds:
            return  # nobody waits for it
        step_s = sum(
            timing.queue_s + timing.compute_s + timing.transfer_s for timing in reply.timings
        )
        if SegmentKind.PREFILL in kinds:
            self._stretch.observe_beside(step_s / sum(map(self.frames.seconds, self._latest)))
        elif Phase.PREFILL not in phases:
            self._stretch.observe_alone(step_s / (self._stages * self.frames.seconds(frame.rows)))

    def deadline_s(self, frame: Frame, least_s: float) -> float:
        """How long the reply to a frame may take: so many seconds beyond a multiple of what frames of its size took;
        before any was seen, a multiple of the seconds.
        """
        expected = self.frames.seconds(frame.rows) * self._stages
        return least_s + _PATIENCE * expected if expected else _PATIENCE_UNSEEN * least_s

    def rows_per_s(self, rows: int) -> float:
        """What the ring prefills in frames of so many rows, while all its stages are busy; 0 before any was seen."""
        seconds = self.frames.seconds(rows)
        return rows / seconds if seconds else 0.0

    def stretched_rows(self, stretch: float, decoding: int) -> int:
        """The rows that a frame may have for `decoding` jobs to wait no longer than they must."""
        step_rows = math.ceil(decoding / self._stages)
        return self._stretch.rows(stretch, call_rows=self.frames.call_rows, step_rows=step_rows)


class _Size:
    """What frames of about one size took: their mean rows and seconds."""

    def __init__(self) -> None:
        self.n = 0
        self.rows = self.seconds = 0.0

    def add(self, rows: int, seconds: float) -> None:
        self.n += 1
        share = max(1.0 / self.n, _BLEND)
        self.rows += (rows - self.rows) * share
        self.seconds += (seconds - self.seconds) * share

    @property
    def weight(self) -> float:
        """How many frames its means rest on."""
        return min(self.n, 1.0 / _BLEND)


class CostModel:
    """A line through (rows, seconds), fitted over sizes that double.

    Each size forgets by its own frames only. Were the latest frames all that counts, an hour of one-row steps would
    leave nothing but their noise to tell a row's cost from.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._call_rows = DEFAULT_CALL_ROWS

    def observe(self, rows: int, seconds: float) -> None:
        self._sizes.setdefault(rows.bit_length(), _Size()).add(rows, seconds)
        self._fit()

    @property
    def call_rows(self) -> float:
        """How many rows cost as much as a call without rows."""
        return self._call_rows

    def seconds(self, rows: int) -> float:
        """What a frame of so many rows takes on a stage; 0 before anything was seen."""
        return (self._call_rows + rows) * self._row_s

    def rows_in(self, seconds: float) -> float:
        """How many more rows a stage could compute in that time."""
        return seconds / self._row_s if self._row_s > 0.0 else 0.0

    @property
    def _row_s(self) -> float:
        sizes = self._sizes.values()
        units = sum((self._call_rows + size.rows) / size.seconds for size in sizes if size.seconds)
        return len(sizes) / units if units else 0.0

    def _fit(self) -> None:
        """Least squares of the relative errors. Frames that are all alike tell nothing of the slope: what was
        known then stands.
        """
        sizes = [size for size in self._sizes.values() if size.n >= _ENOUGH and size.seconds > 0.0]
        if not sizes:
            return
        least, most = min(s.rows for s in sizes), max(s.rows for s in sizes)
        if most < least * _LEAST_SPREAD:
            return
        # fixed * p + slope * q = 1 for each size, where p = 1 / seconds and q = rows / seconds.
        p = sum(s.weight / s.seconds for s in sizes)
        q = sum(s.weight * s.rows / s.seconds for s in sizes)
        pp = sum(s.weight / s.seconds**2 for s in sizes)
        qq = sum(s.weight * (s.rows / s.seconds) ** 2 for s in sizes)
        pq = sum(s.weight * s.rows / s.seconds**2 for s in sizes)
        fixed = p * qq - q * pq
        slope = q * pp - p * pq
        if slope > 0.0 and fixed > 0.0:
            self._call_rows = min(max(fixed / slope, _LEAST), _MOST)


class StretchModel:
    """How much longer than expected a decoding job's step takes alone, and beside prefills.

    Stages that compute at once slow each other down, and frames wait for each other, so what a step takes beside
    others is measured there and not derived from what it takes alone. Both are shares of what the cost model
    expects of as many frames as there are stages: a model that learns changes neither.
    """

    def __init__(self) -> None:
        self._alone = 1.0
        self._beside = 1.0

    def observe_alone(self, share: float) -> None:
        """`share`: seconds taken over seconds expected."""
        self._alone += (share - self._alone) * _HURRY

    def observe_beside(self, share: float) -> None:
        """The same of a step among prefill chunks."""
        self._beside += (share - self._beside) * _HURRY

    def rows(self, stretch: float, *, call_rows: float, step_rows: int) -> int:
        """Rows of one frame so that a step, which is as many frames as stages, takes at most `stretch` times
        as long as alone.
        """
        allowed = stretch * self._alone / self._beside * (call_rows + step_rows)
        return int(allowed - call_rows)
