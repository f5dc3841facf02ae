"""Which ring serves a job: the session's own, then one with a lane to spare, then the one with the
longest usable prefix, then the least loaded. A session moves when its ring is lost, draining or
overloaded, or heals while another one has a lane, and is told so.

A wrong choice costs time, never a token. The router holds sessions' pins and histories; it never
asks what is valid in a lane beyond the ledger's own answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from coordinator.chain_records import NodeStatus
from coordinator.counts import RingCounts
from coordinator.driver import RingDriver
from coordinator.errors import BusyError, InvalidSetting, InvalidValue, RingUnavailable
from coordinator.foresight import Wish
from coordinator.frames import NodeId
from coordinator.lanes import LaneStatus
from coordinator.overload import MOST_RETRY_S, UNSEEN_LOADING_S, clamped
from coordinator.requests import Request, SessionId
from coordinator.ring import RingInfo
from coordinator.sessions import History, SessionTable
from coordinator.status import RingState, RingStatus
from coordinator.streams import JobStream

# Fewer rows than this are prefilled within one step of anything else: no reason to prefer a busy ring.
_LEAST_PREFIX = 16


@dataclass(frozen=True, slots=True)
class RingNode:
    ring: str
    node: NodeStatus


class Router:
    """Serves one model over `drivers`. All calls come from one event loop."""

    def __init__(self, drivers: Sequence[RingDriver], session_limit: int) -> None:
        self._drivers: dict[str, RingDriver] = {}
        self._sessions = SessionTable(session_limit)
        self._gone = RingCounts()  # of the rings that were removed
        for driver in drivers:
            self.add(driver)

    def add(self, driver: RingDriver) -> None:
        """Takes a ring of the same model in, started or not. Raises InvalidSetting for a name in use."""
        if driver.name in self._drivers:
            raise InvalidSetting("ring", f"there is a ring {driver.name} already")
        self._drivers[driver.name] = driver

    def drain(self, name: str) -> bool:
        """The ring takes no more jobs and its sessions move on their next turn; False for no such ring."""
        driver = self._drivers.get(name)
        if driver is not None:
            driver.drain()
        return driver is not None

    def remove(self, name: str) -> RingDriver | None:
        """Forgets a ring, which the caller then stops; None for no such ring."""
        driver = self._drivers.pop(name, None)
        if driver is not None:
            self._gone = self._gone.plus(driver.status().counts)
        return driver

    def submit(self, request: Request) -> JobStream:
        """Raises RequestError or BusyError; the session then stays where it was."""
        refused: BusyError | None = None
        for driver in self._candidates(request):
            try:
                stream = driver.submit(self._marked(request, driver))
            except BusyError as busy:
                sooner = refused is None or busy.retry_after_s < refused.retry_after_s
                refused = busy if sooner else refused
                continue
            if request.session is not None:
                self._sessions.pin(request.session, driver.name)
            return stream
        raise refused or self._unavailable()

    def info(self) -> RingInfo:
        """What a ring of this router can do; they all serve the same model. Raises RingUnavailable."""
        for status in self.rings():
            if status.info is not None:
                return status.info
        raise self._unavailable()

    def rings(self) -> tuple[RingStatus, ...]:
        return tuple(driver.status() for driver in self._drivers.values())

    def counts(self) -> RingCounts:
        """Of all rings there were: what has been counted stays counted when a ring goes."""
        return reduce(RingCounts.plus, (each.counts for each in self.rings()), self._gone)

    def lanes(self, ring: str, most: int) -> tuple[LaneStatus, ...]:
        """RingDriver.lanes; none for no such ring."""
        driver = self._drivers.get(ring)
        return () if driver is None else driver.lanes(most)

    def history(self, session: SessionId) -> History | None:
        return self._sessions.history(session)

    def remember(self, session: SessionId, history: History) -> None:
        self._sessions.remember(session, history)

    def remakes_rows(self, session: SessionId) -> bool:
        """Whether the session's ring has use for wishes whose rows it holds: RingDriver.remakes_rows."""
        driver = self._drivers.get(self._sessions.ring(session) or "")
        return driver is not None and driver.remakes_rows

    def foresee(self, wish: Wish) -> None:
        """Tells the session's ring what its next prompt begins with."""
        driver = self._drivers.get(self._sessions.ring(wish.session) or "")
        if driver is not None:
            driver.foresee(wish)

    def close_session(self, session: SessionId) -> bool:
        """Cancels the session's jobs and forgets it; False when it was not known."""
        for driver in self._drivers.values():
            driver.close_session(session)
        return self._sessions.forget(session)

    # The chain stores, for operators

    def nodes(self, ring: str | None = None) -> Iterator[RingNode]:
        """What the rings, or the one of that name, keep. In no order. Raises InvalidValue."""
        if ring is not None and ring not in self._drivers:
            raise InvalidValue("ring", f"no ring {ring!r} runs here")
        for driver in tuple(self._drivers.values()):
            if ring in (None, driver.name):
                yield from (RingNode(driver.name, node) for node in driver.nodes())

    def pin(self, prefix: tuple[int, ...], tenant: str = "") -> tuple[str, ...]:
        """The rings that keep the tenant's prefix from now on. Raises InvalidValue or RingUnavailable if none does."""
        pinned: list[str] = []
        refused: InvalidValue | None = None
        for driver in self._drivers.values():
            if not driver.status().ready:
                continue
            try:
                driver.pin(prefix, tenant)
            except InvalidValue as error:
                refused = refused or error
                continue
            pinned.append(driver.name)
        if not pinned:
            raise refused or self._unavailable()
        return tuple(pinned)

    def drop_node(self, node: NodeId) -> bool:
        """Drops it on every ring; False when none has it."""
        return any([driver.drop_node(node) for driver in self._drivers.values()])

    @property
    def back_s(self) -> float:
        """Until a ring may take jobs again, where none takes any; as far as can be said."""
        return clamped(min(map(_back_s, self.rings()), default=MOST_RETRY_S))

    def _unavailable(self) -> RingUnavailable:
        reasons = {status.reason or "loading" for status in self.rings()}
        why = "; ".join(sorted(reasons)) or "there is none"
        return RingUnavailable(why, retry_after_s=self.back_s)

    def _marked(self, request: Request, driver: RingDriver) -> Request:
        pinned = None if request.session is None else self._sessions.ring(request.session)
        return request if pinned in (None, driver.name) else replace(request, moved=True)

    def _candidates(self, request: Request) -> list[RingDriver]:
        """The rings that could serve it, the best first. A ring whose queue is full is passed over.

        Behind those that are ready come those that heal: a turn waits there rather than be refused. A session waits
        for its own ring, unless a ready one has a lane for it now.
        """
        takers = [driver for driver in self._drivers.values() if _takes_jobs(driver.status())]
        pinned = None if request.session is None else self._sessions.ring(request.session)
        idle_lane = any(_has_idle_lane(driver.status()) for driver in takers)

        def fitness(driver: RingDriver) -> tuple[bool, bool, bool, int, int]:
            status = driver.status()
            serves = status.ready or (driver.name == pinned and not idle_lane)
            # A pin is worth a prefill, and not a wait behind more jobs than the ring has lanes.
            stays = driver.name == pinned and not (idle_lane and _is_overloaded(status))
            held = driver.usable_prefix(request.prompt, request.tenant) if request.reuse else 0
            prefix = held if held >= _LEAST_PREFIX else 0
            # Where every lane is some session's, the longest prefix would cost one of them its rows.
            roomy = status.free_lanes > status.waiting_jobs
            load = status.running_jobs + status.waiting_jobs
            return serves, stays, roomy, prefix, -load

        return sorted(takers, key=fitness, reverse=True)


def _takes_jobs(status: RingStatus) -> bool:
    return status.ready or (status.recovering and not status.draining)


def _has_idle_lane(status: RingStatus) -> bool:
    """Now: of a ring that heals, nobody knows when."""
    info = status.info
    return info is not None and status.ready and status.running_jobs < info.lanes


def _back_s(ring: RingStatus) -> float:
    if ring.state is RingState.DOWN:
        return MOST_RETRY_S
    # 0: it has not begun to load, or its coordinator has not heard yet that it heals.
    return UNSEEN_LOADING_S if ring.state is RingState.DRAINING else ring.back_s or UNSEEN_LOADING_S


def _is_overloaded(status: RingStatus) -> bool:
    return status.info is not None and status.waiting_jobs > status.info.lanes
