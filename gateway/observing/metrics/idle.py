"""The share of the last minute that each stage of a ring did not compute.

It knows what the ring had computed whenever somebody looked; several that look do not disturb each other.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0


class IdleWindow:
    def __init__(self, now: float, busy_s: tuple[float, ...]) -> None:
        self._seen: deque[tuple[float, tuple[float, ...]]] = deque([(now, busy_s)])

    def ratios(self, now: float, busy_s: tuple[float, ...]) -> tuple[float, ...]:
        """One a stage. `busy_s`: the seconds that each has computed in all. Nothing before time has passed."""
        while len(self._seen) > 1 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        then, before = self._seen[0]
        if now > self._seen[-1][0]:
            self._seen.append((now, busy_s))
        if now <= then:
            return ()
        shares = ((busy - was) / (now - then) for busy, was in zip(busy_s, before, strict=True))
        # A frame's time is counted when its reply comes: in a short window that may be more than passed.
        return tuple(min(max(1.0 - share, 0.0), 1.0) for share in shares)
