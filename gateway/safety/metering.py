"""Charges turns to the keys that asked for them. What a key may use is quotas.py's; nothing is stopped here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gateway.safety.keys import Caller
from gateway.safety.quotas import Admitted, Quotas
from gateway.turns import TurnDelta, TurnEvent, TurnRequest, TurnStarted


class Meter:
    """One turn's. What is reused costs nothing."""

    def __init__(self, admitted: Admitted | None) -> None:
        self._admitted = admitted

    def told(self, event: TurnEvent) -> None:
        if self._admitted is None:
            return
        match event:
            case TurnStarted():
                self._admitted.used(event.prompt_tokens - event.cached_prefix)
            case TurnDelta():
                self._admitted.used(len(event.token_ids))


@contextmanager
def metered(quotas: Quotas | None, turn: TurnRequest) -> Iterator[Meter]:
    """The turn runs inside. Raises RateLimited before it begins."""
    if quotas is None:
        yield Meter(None)
        return
    with quotas.admit(Caller(turn.caller, turn.tenant)) as admitted:
        yield Meter(admitted)
