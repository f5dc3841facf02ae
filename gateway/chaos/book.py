"""What the streams were told, and what the storm did to them: pauses, answers to be checked, streams that were lost.

Pure bookkeeping. It keeps no prompt twice and no stream's times beyond its end, so hours of traffic cost no memory.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gateway.chaos.storm import Fault, Planned
from gateway.chaos.traffic import Ask, Step


@dataclass(frozen=True, slots=True)
class Played:
    """One turn that has ended. Times are perf_counter's."""

    stream: int
    step: Step
    ring: str  # empty: it never started
    sent_s: float
    ended_s: float
    arrivals_s: tuple[float, ...]  # one a piece of the answer
    tokens: tuple[int, ...]
    cached_prefix: int = 0
    refused: int = 0  # how often it was asked again: no ring took it, or its gateway died
    cut_off: tuple[tuple[int, ...], ...] = ()  # what had come then
    recovering: int = 0  # how often it was told that its ring heals
    error: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A fault as it struck."""

    number: int
    fault: Fault
    ring: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Hit:
    """A fault met a stream. `pause_s`: None where the stream had no token yet, or got none any more."""

    number: int
    stream: int
    ask: Ask
    tokens: tuple[int, ...]
    pause_s: float | None
    lost: bool
    told: bool  # that its ring heals
    elsewhere: bool  # it ran on another ring than the one that was struck


@dataclass(slots=True)
class Book:
    marks: list[Mark] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    # How often each answer was given to an ask; the cold ring will say which one is right.
    answers: dict[Ask, Counter[tuple[int, ...]]] = field(default_factory=dict)
    # Of answers that were cut off and asked again, likewise.
    beginnings: dict[Ask, Counter[tuple[int, ...]]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    streams: int = 0
    refused: int = 0
    reused_tokens: int = 0
    prompt_tokens: int = 0

    def struck(self, planned: Planned, at_s: float, *, ring: str) -> None:
        self.marks.append(Mark(planned.number, planned.fault, ring, at_s))

    def ended(self, played: Played) -> None:
        self.streams += 1
        self.refused += played.refused
        if played.error:
            told = f"stream {played.stream} ({played.step.kind}) on {played.ring or 'no ring'}"
            self.lost.append(f"{told}: {played.error}")
        else:
            self._answered(played)
        for place, mark in enumerate(self.marks):
            if played.sent_s <= mark.at_s < played.ended_s:
                self.hits.append(self._hit(played, place, mark))

    def _answered(self, played: Played) -> None:
        ask = played.step.ask
        self.answers.setdefault(ask, Counter())[played.tokens] += 1
        for tokens in played.cut_off:
            self.beginnings.setdefault(ask, Counter())[tokens] += 1
        self.reused_tokens += played.cached_prefix
        self.prompt_tokens += len(ask.prompt)

    def _hit(self, played: Played, place: int, mark: Mark) -> Hit:
        times = [float("-inf"), *(each.at_s for each in self.marks), float("inf")]
        pause = pause_s(played.arrivals_s, times[place + 1], (times[place], times[place + 2]))
        return Hit(
            number=mark.number,
            stream=played.stream,
            ask=played.step.ask,
            tokens=played.tokens,
            pause_s=None if played.error else pause,
            lost=bool(played.error),
            told=played.recovering > 0,
            elsewhere=played.ring not in ("", mark.ring),
        )


def pause_s(
    arrivals_s: Sequence[float],
    at_s: float,
    between: tuple[float, float] = (float("-inf"), float("inf")),
) -> float | None:
    """The longest gap between two arrivals from a fault on, less the stream's usual gap. None without two of them.

    `between`: when the faults before and behind it struck. A gap that another one lies in begins with this one, or is
    not this one's.
    """
    before_s, behind_s = between
    gaps = [*pairwise(arrivals_s)]
    around = [(a, b) for a, b in gaps if at_s < b <= behind_s]
    if not around or arrivals_s[0] > at_s:
        return None
    longest = max(around, key=lambda gap: gap[1] - gap[0])
    others = [b - a for a, b in gaps if (a, b) != longest]
    usual = statistics.median(others) if others else 0.0
    begin = longest[0] if longest[0] > before_s else at_s
    return max(0.0, longest[1] - begin - usual)
