"""Who may watch turns: metrics, logs, traces and the status page. They see every event and change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from coordinator.errors import Cancelled, RingserveError
from gateway.turns import TurnEvent, TurnFinished, TurnRequest

ABORT = "abort"  # the client left, or its session was closed; vLLM's word


class TurnWatch(Protocol):
    """One turn, from when it was asked for. Called on the event loop: each call takes microseconds and never raises."""

    def told(self, event: TurnEvent, at_s: float) -> None: ...

    def ended(self, error: BaseException | None, at_s: float) -> None:
        """The last call. `error`: GeneratorExit or CancelledError when the client left; None: it ended as it should."""
        ...


class TurnObserver(Protocol):
    """`at_s`, here and there: seconds on the service's clock."""

    def opened(self, turn: TurnRequest, at_s: float) -> TurnWatch: ...


class Watches:
    """A turn's watches as one."""

    def __init__(self, watches: Sequence[TurnWatch]) -> None:
        self._watches = watches

    def told(self, event: TurnEvent, at_s: float) -> None:
        for watch in self._watches:
            watch.told(event, at_s)

    def ended(self, error: BaseException | None, at_s: float) -> None:
        for watch in self._watches:
            watch.ended(error, at_s)


@contextmanager
def watching(
    observers: Sequence[TurnObserver],
    turn: TurnRequest,
    now: Callable[[], float],
    why: Callable[[BaseException], BaseException],
) -> Iterator[Watches]:
    """The turn runs inside; however it ends, its watches are told. `why`: what ended it, by what was raised."""
    watches = Watches([each.opened(turn, now()) for each in observers])
    try:
        yield watches
    except BaseException as error:
        watches.ended(why(error), now())
        raise
    watches.ended(None, now())


def outcome(finished: TurnFinished | None, error: BaseException | None) -> str:
    """How a turn ended, in one of a few words: stop, length, abort or an error's code."""
    if finished is not None:
        return finished.reason.value
    if isinstance(error, GeneratorExit | asyncio.CancelledError | Cancelled):
        return ABORT
    return error.code if isinstance(error, RingserveError) else RingserveError.code
