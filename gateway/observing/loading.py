"""Remembers how far each stage has loaded, for whoever asks; what is shown on the terminal is passed on unchanged.

It decides nothing. Sinks may be called from other threads.
"""

from __future__ import annotations

import threading

from coordinator.ring import ProgressSink, StageProgress
from gateway.progress import ProgressBoard, SilentBoard


class LoadRecord:
    """Implements ProgressBoard in front of another one."""

    def __init__(self, shown: ProgressBoard | None = None) -> None:
        self._shown = shown or SilentBoard()
        self._stages: dict[str, dict[int, StageProgress]] = {}
        self._lock = threading.Lock()

    def sink(self, ring: str) -> ProgressSink:
        passed_on = self._shown.sink(ring)

        def record(progress: StageProgress) -> None:
            with self._lock:
                self._stages.setdefault(ring, {})[progress.stage] = progress
            passed_on(progress)

        return record

    def note(self, text: str) -> None:
        self._shown.note(text)

    def stages(self, ring: str) -> tuple[StageProgress, ...]:
        """The last that each stage said, by their numbers; none before the first word."""
        with self._lock:
            said = dict(self._stages.get(ring, {}))
        return tuple(said[stage] for stage in sorted(said))
