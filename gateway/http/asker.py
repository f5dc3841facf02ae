"""Who asks, as far as a request's headers tell: which session, and whose. It decides what a session is called, and
whose a turn is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.requests import SessionId
from gateway.safety.guard import session_of
from gateway.turns import TurnRequest


@dataclass(frozen=True, slots=True)
class Asker:
    """`session`: from a header; `caller`: the name of the key that was shown; `tenant`: whose rows may be reused."""

    session: str | None = None
    caller: str = ""
    tenant: str = ""

    def owner(self, *named: str | None) -> SessionId | None:
        """The session: of the header, else the first of those that the body names. Two callers' are never the same."""
        name = next((each for each in (self.session, *named) if each), None)
        return session_of(self.caller, name)

    def owned(self, turns: Sequence[TurnRequest]) -> list[TurnRequest]:
        """The turns as this caller's. Their sessions have been named already."""
        return [replace(turn, caller=self.caller, tenant=self.tenant) for turn in turns]
