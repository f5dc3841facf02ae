"""One line a turn, when it has ended: what it was, what it reused, how long it took. Never what was said in it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from coordinator.requests import SessionId, Timings
from gateway.observing.observers import TurnWatch, outcome
from gateway.turns import (
    TurnDelta,
    TurnEvent,
    TurnFinished,
    TurnRecovering,
    TurnRequest,
    TurnStarted,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TurnLine:
    """What is not known, since the turn ended before, is None. `outcome`: gateway/observing/observers.py's words."""

    request_id: str
    session: str | None  # its digest
    outcome: str
    total_s: float
    generated_tokens: int
    ttft_s: float | None = None
    ring: str | None = None
    lane: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    miss: str | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    drafted: int | None = None
    accepted: int | None = None
    recoveries: int | None = None  # of its ring, meanwhile


class TurnLog:
    """A TurnObserver. `digest` names a session without telling its name."""

    def __init__(self, digest: Callable[[SessionId], str]) -> None:
        self._digest = digest

    def opened(self, turn: TurnRequest, at_s: float) -> TurnWatch:
        session = None if turn.session is None else self._digest(turn.session)
        return _LoggedTurn(turn.request_id, session, at_s)


class _LoggedTurn:
    def __init__(self, request_id: str, session: str | None, opened_s: float) -> None:
        self._request_id = request_id
        self._session = session
        self._opened_s = opened_s
        self._started: TurnStarted | None = None
        self._finished: TurnFinished | None = None
        self._first_s: float | None = None
        self._tokens = 0
        self._recoveries = 0

    def told(self, event: TurnEvent, at_s: float) -> None:
        match event:
            case TurnDelta():
                self._tokens += len(event.token_ids)
                if self._first_s is None and event.token_ids:
                    self._first_s = at_s
            case TurnStarted():
                self._started = event
            case TurnRecovering():
                self._recoveries += 1
            case TurnFinished():
                self._finished = event

    def ended(self, error: BaseException | None, at_s: float) -> None:
        if log.isEnabledFor(logging.INFO):
            log.info("turn", extra={"fields": self._line(error, at_s)})

    def _line(self, error: BaseException | None, at_s: float) -> TurnLine:
        first_s = self._first_s
        line = TurnLine(
            request_id=self._request_id,
            session=self._session,
            outcome=outcome(self._finished, error),
            total_s=_seconds(at_s - self._opened_s),
            generated_tokens=self._tokens,
            ttft_s=None if first_s is None else _seconds(first_s - self._opened_s),
            recoveries=self._recoveries or None,
        )
        if self._started is not None:
            line = _with_start(line, self._started)
        return line if self._finished is None else _with_timings(line, self._finished.timings)


def _with_start(line: TurnLine, started: TurnStarted) -> TurnLine:
    return replace(
        line,
        ring=started.ring,
        lane=started.lane,
        prompt_tokens=started.prompt_tokens,
        cached_tokens=started.cached_prefix,
        miss=None if started.miss is None else started.miss.kind.value,
    )


def _with_timings(line: TurnLine, took: Timings) -> TurnLine:
    return replace(
        line,
        queue_s=_seconds(took.queue_s),
        prefill_s=_seconds(took.prefill_s),
        decode_s=_seconds(took.decode_s),
        drafted=took.drafted,
        accepted=took.accepted,
    )


def _seconds(seconds: float) -> float:
    """To the microsecond: more is noise."""
    return round(seconds, 6)
