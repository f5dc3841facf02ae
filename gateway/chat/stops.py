"""Finds stop strings in text that arrives in pieces, and holds back what may be the start of one.

The result does not depend on how the text was cut: the stop string that is complete first wins, and of
those that end together the longest. It decides nothing about tokens; it only counts what it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that may be sent now; and, once a stop string was found, which one it was.

    `tokens` are those fed so far; with a stop: up to and with the one that completed it.
    """

    text: str
    stop: str | None = None
    tokens: int = 0


class StopMatcher:
    """Feed it one token's text at a time for an exact count. Raises InvalidValue("stop").

    Once a stop string was found, everything that follows is swallowed and the result stays the same.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise InvalidValue("stop", "a stop string must not be empty")
        self._stops = tuple(stops)
        self._reach = max((len(stop) for stop in stops), default=0) - 1
        self._held = ""
        self._tokens = 0
        self._stop: str | None = None

    def feed(self, text: str, tokens: int = 1) -> StopResult:
        if self._stop is not None:
            return self._result("")
        self._tokens += tokens
        text = self._held + text
        found = self._first_in(text)
        if found is not None:
            start, self._stop = found
            self._held = ""
            return self._result(text[:start])
        keep = len(text) - self._held_length(text)
        self._held = text[keep:]
        return self._result(text[:keep])

    def flush(self) -> StopResult:
        """What was held back, when the stream ends without a stop string."""
        held, self._held = self._held, ""
        return self._result(held)

    def _result(self, text: str) -> StopResult:
        return StopResult(text, self._stop, self._tokens)

    def _first_in(self, text: str) -> tuple[int, str] | None:
        hits = [(text.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start, stop) for start, stop in hits if start >= 0]
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop

    def _held_length(self, text: str) -> int:
        """The longest end of the text with which some stop string begins."""
        for length in range(min(self._reach, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
