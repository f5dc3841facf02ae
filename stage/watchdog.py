"""Tells a stage's process that nobody wants it any more: whoever probed it has stopped doing so.

Decides how long a silence has lasted. Only what passes while this process is awake counts: a machine, or a whole
ring, that was stopped and goes on loses nothing. What is done about a silence is its caller's business.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# Questions in the time that a silence may last: what is slept through between two of them counts as one step.
_STEPS = 10


class Watchdog:
    """Armed by the first probe. One thread asks every `step_s`; probes come in others."""

    def __init__(self, fence_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self.step_s = fence_s / _STEPS
        self._fence_s = fence_s
        self._now = now
        self._lock = threading.Lock()
        self._armed = self._held = False
        self._silent_s = 0.0
        self._asked_at = now()

    def heard(self) -> None:
        with self._lock:
            # A probe that was on its way when a hold began arms nothing.
            self._armed = not self._held
            self._silent_s = 0.0

    def hold(self) -> None:
        """From now on a silence is to be expected."""
        with self._lock:
            self._held, self._armed = True, False

    def release(self) -> None:
        """The next probe arms it again."""
        with self._lock:
            self._held = False

    def is_fenced(self) -> bool:
        with self._lock:
            now = self._now()
            awake_s = min(now - self._asked_at, 2 * self.step_s)
            self._asked_at = now
            self._silent_s = self._silent_s + awake_s if self._armed else 0.0
            return self._silent_s >= self._fence_s
