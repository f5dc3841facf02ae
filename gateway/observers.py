"""Who may watch turns: metrics, logs, traces and the status page. They see every event and change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.turns import TurnEvent, TurnRequest


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
