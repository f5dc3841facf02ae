"""The frames that are on their way: which is due next, and how many more may go out. It sends nothing."""

from __future__ import annotations

from collections.abc import Collection

from coordinator.frames import Frame, Seq
from coordinator.jobs import Phase

# Frames in flight beyond one a stage, so that no stage waits for the coordinator's turn-around.
_SPARE_FRAMES = 1


class Flight:
    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._frames: dict[Seq, Frame] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._frames)

    def __contains__(self, seq: Seq) -> bool:
        return seq in self._frames

    @property
    def frames(self) -> Collection[Frame]:
        return self._frames.values()

    @property
    def oldest(self) -> Frame | None:
        """Whose reply is due next."""
        return next(iter(self._frames.values()), None)

    @property
    def computing(self) -> int:
        """Frames that stages compute rows for; others cost no time to speak of."""
        return sum(bool(frame.segments) for frame in self._frames.values())

    def add(self, frame: Frame) -> None:
        self._frames[frame.seq] = frame

    def take(self, seq: Seq) -> Frame:
        """The frame that was answered."""
        return self._frames.pop(seq)

    def clear(self) -> None:
        self._frames.clear()

    def has_room(self, phases: Collection[Phase], *, waiting: bool) -> bool:
        """Whether one more may be computed. `phases`: of the jobs with a lane; `waiting`: others want one.

        A spare frame hides the turn-around; beside a decoding job it would be one more to wait for.
        """
        mixed = len(phases) > 1 or (Phase.DECODE in phases and waiting)
        return self.computing < self._stages + (0 if mixed else _SPARE_FRAMES)
