"""Who asks, as far as a request's headers tell: which session, and whose. It decides what a session is called."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.requests import SessionId


@dataclass(frozen=True, slots=True)
class Asker:
    """`session`: from a header; `caller`: the name of the key that was shown; `tenant`: whose rows may be reused."""

    session: str | None = None
    caller: str = ""
    tenant: str = ""

    def owner(self, *named: str | None) -> SessionId | None:
        """The session: of the header, else the first of those that the body names. Two callers' are never the same."""
        name = next((each for each in (self.session, *named) if each), None)
        if name is None:
            return None
        return SessionId(f"{self.caller}/{name}" if self.caller else name)
