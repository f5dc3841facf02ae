"""Which ring serves a job: the session's own, else the longest usable prefix, else the least
loaded.

A wrong choice costs time, never a token. The router holds sessions' pins and histories; it never
asks what is valid in a lane beyond the ledger's own answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.driver import RingDriver, RingStatus
from coordinator.errors import RingUnavailable
from coordinator.requests import Request, SessionId
from coordinator.ring import RingInfo
from coordinator.sessions import History, SessionTable
from coordinator.streams import JobStream


class Router:
    """Serves one model over `drivers`. All calls come from one event loop."""

    def __init__(self, drivers: Sequence[RingDriver], session_limit: int) -> None:
        self._drivers = {driver.name: driver for driver in drivers}
        self._sessions = SessionTable(session_limit)

    def submit(self, request: Request) -> JobStream:
        """Raises RequestError or BusyError, and then nothing is queued and the session stays where
        it was.
        """
        driver = self._choose(request)
        stream = driver.submit(request)
        if request.session is not None:
            self._sessions.pin(request.session, driver.name)
        return stream

    def info(self) -> RingInfo:
        """What a ring of this router can do; they all serve the same model. Raises RingUnavailable."""
        for status in self.rings():
            if status.info is not None:
                return status.info
        raise RingUnavailable("every ring is loading")

    def rings(self) -> tuple[RingStatus, ...]:
        return tuple(driver.status() for driver in self._drivers.values())

    def history(self, session: SessionId) -> History | None:
        return self._sessions.history(session)

    def remember(self, session: SessionId, history: History) -> None:
        self._sessions.remember(session, history)

    def close_session(self, session: SessionId) -> bool:
        """Cancels the session's jobs and forgets it; False when it was not known."""
        for driver in self._drivers.values():
            driver.close_session(session)
        return self._sessions.forget(session)

    def _choose(self, request: Request) -> RingDriver:
        ready = [driver for driver in self._drivers.values() if driver.status().ready]
        if not ready:
            reasons = {status.reason or "loading" for status in self.rings()}
            raise RingUnavailable("; ".join(sorted(reasons)))
        if request.session is not None:
            pinned = self._sessions.ring(request.session)
            for driver in ready:
                if driver.name == pinned:
                    return driver
        return max(ready, key=lambda driver: _fitness(driver, request))


def _fitness(driver: RingDriver, request: Request) -> tuple[int, int]:
    status = driver.status()
    prefix = driver.usable_prefix(request.prompt) if request.reuse else 0
    return prefix, -(status.running_jobs + status.waiting_jobs)
