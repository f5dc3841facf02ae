"""Remembers the turns of late, running and ended: how long each took, what it reused and how it ended.

It holds no text and no session's name: a session is known by a digest that means nothing outside this process.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from types import MappingProxyType

from coordinator.requests import FinishReason, Miss, SessionId
from gateway.observing.observers import ABORT, TurnWatch, outcome
from gateway.turns import TurnDelta, TurnEvent, TurnFinished, TurnRequest, TurnStarted

KEPT_TURNS = 50
_DIGEST_BYTES = 3
_OUTCOMES: Mapping[str, str] = MappingProxyType(
    {
        FinishReason.STOP.value: "complete",
        FinishReason.LENGTH.value: "length limit",
        ABORT: "client left",
    }
)


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn. What is not known yet, or never was, is None."""

    number: int
    asked_at: float  # seconds since 1970
    session: str | None  # its digest
    ring: str | None
    lane: int | None
    prompt_tokens: int | None
    cached_prefix: int | None
    miss: Miss | None
    ttft_s: float | None  # from the question to the first token
    generated_tokens: int
    tokens_per_s: float | None  # behind the first ones
    drafted: int | None
    accepted: int | None
    outcome: str | None  # in words; None: it runs


class RecentTurns:
    """Implements TurnObserver. `wall` gives seconds since 1970; `key` sets the sessions' digests."""

    def __init__(
        self,
        kept: int = KEPT_TURNS,
        wall: Callable[[], float] = time.time,
        key: bytes | None = None,
    ) -> None:
        self._wall = wall
        self._key = secrets.token_bytes(16) if key is None else key
        self._kept = kept
        self._opened = 0
        self._running: dict[int, _Watch] = {}
        self._ended: deque[TurnRecord] = deque(maxlen=kept)

    def opened(self, turn: TurnRequest, at_s: float) -> TurnWatch:
        self._opened += 1
        session = None if turn.session is None else self.digest(turn.session)
        watch = _Watch(self._opened, self._wall(), session, at_s, self._end)
        self._running[watch.number] = watch
        return watch

    def _end(self, watch: _Watch) -> None:
        if self._running.pop(watch.number, None) is not None:
            self._ended.appendleft(watch.record())

    def digest(self, session: SessionId) -> str:
        """Names a session without telling its name, which may be a person's."""
        name = session.encode("utf-8", "surrogatepass")
        return blake2b(name, digest_size=_DIGEST_BYTES, key=self._key).hexdigest()

    def last(self) -> tuple[TurnRecord, ...]:
        """Those asked for last come first; no more than are kept, and of these all that run."""
        running = [watch.record() for watch in islice(reversed(self._running.values()), self._kept)]
        ended = islice(self._ended, self._kept - len(running))
        return tuple(sorted((*running, *ended), key=lambda turn: -turn.number))


class _Watch:
    def __init__(
        self,
        number: int,
        asked_at: float,
        session: str | None,
        at_s: float,
        end: Callable[[_Watch], None],
    ) -> None:
        self.number = number
        self._asked_at = asked_at
        self._session = session
        self._opened_s = at_s
        self._end = end
        self._started: TurnStarted | None = None
        self._finished: TurnFinished | None = None
        self._first_s: float | None = None
        self._last_s = at_s
        self._first_tokens = self._tokens = 0
        self._outcome: str | None = None

    def told(self, event: TurnEvent, at_s: float) -> None:
        match event:
            case TurnStarted():
                self._started = event
            case TurnDelta():
                self._count(len(event.token_ids), at_s)
            case TurnFinished():
                self._finished = event

    def _count(self, tokens: int, at_s: float) -> None:
        if not tokens:
            return
        self._tokens += tokens
        self._last_s = at_s
        if self._first_s is None:
            self._first_s, self._first_tokens = at_s, tokens

    def ended(self, error: BaseException | None, at_s: float) -> None:
        self._outcome = _words(self._finished, error)
        self._end(self)

    def record(self) -> TurnRecord:
        started, finished = self._started, self._finished
        timings = None if finished is None else finished.timings
        return TurnRecord(
            number=self.number,
            asked_at=self._asked_at,
            session=self._session,
            ring=None if started is None else started.ring,
            lane=None if started is None else started.lane,
            prompt_tokens=None if started is None else started.prompt_tokens,
            cached_prefix=None if started is None else started.cached_prefix,
            miss=None if started is None else started.miss,
            ttft_s=None if self._first_s is None else self._first_s - self._opened_s,
            generated_tokens=self._tokens,
            tokens_per_s=self._speed(),
            drafted=None if timings is None else timings.drafted,
            accepted=None if timings is None else timings.accepted,
            outcome=self._outcome,
        )

    def _speed(self) -> float | None:
        """Of the tokens behind those that came first: what came before them was prefill."""
        behind = self._tokens - self._first_tokens
        seconds = self._last_s - (self._first_s or self._last_s)
        return behind / seconds if behind and seconds > 0 else None


def _words(finished: TurnFinished | None, error: BaseException | None) -> str:
    if finished is not None and finished.calls:
        return "tool calls"
    said = outcome(finished, error)
    return _OUTCOMES.get(said, said.replace("_", " "))
