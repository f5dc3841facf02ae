"""The rings of a process while it serves: announced, started, added, drained and ended.

Decides the rings' names and when a drained one is stopped. It knows no kind of ring: launch.py says how one is made.
Which ring serves a turn is the router's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from coordinator.driver import RingDriver
from coordinator.errors import InvalidValue
from coordinator.ring import ProgressSink
from coordinator.router import Router
from gateway.standing import ring_name

log = logging.getLogger(__name__)

# How often a draining ring is asked whether its last turn has ended.
_IDLE_CHECK_S = 0.1


def _nothing(_: str) -> None:
    """Rings end with their process, or before."""


class RingSet:
    """Owns the rings of one process from start to end. All calls come from one event loop."""

    def __init__(
        self,
        router: Router,
        make: Callable[[str], RingDriver],
        progress: Callable[[str], ProgressSink],
        check_room: Callable[[], None],
        settle_s: float = 0.0,
        prefix: str = "ring",
        dissolve: Callable[[str], None] = _nothing,
    ) -> None:
        """`check_room` raises SetupError when this machine has no memory for one more ring; it may take a while.

        `settle_s`: what a ring gets, behind its last turn, to write back the rows of idle lanes.
        `dissolve`: is told of a ring that is stopped for good, not only by this process.
        """
        self._prefix = prefix
        self._dissolve = dissolve
        self._router = router
        self._make = make
        self._progress = progress
        self._check_room = check_room
        self._settle_s = settle_s
        self._drivers: dict[str, RingDriver] = {}
        self._named = 0
        # Two rings that load at once would both take the memory that there is for one.
        self._starting = asyncio.Lock()
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()

    def announce(self, count: int) -> None:
        """Makes the first rings known, so that clients hear of them while they load."""
        for _ in range(count):
            driver = self._make(self._next_name())
            self._drivers[driver.name] = driver
            self._router.add(driver)

    async def start(self) -> None:
        """Starts what was announced, one after another. Raises SetupError."""
        async with self._starting:
            for driver in tuple(self._drivers.values()):
                await driver.start(self._progress(driver.name))

    async def add(self) -> str:
        """One more ring; its name, once it takes jobs. Raises SetupError and then, or cancelled, leaves nothing."""
        async with self._starting:
            await asyncio.to_thread(self._check_room)
            driver = self._make(self._next_name())
            await driver.start(self._progress(driver.name))
            self._drivers[driver.name] = driver
            self._router.add(driver)
        log.info("added ring=%s", driver.name)
        return driver.name

    def drain(self, name: str) -> int:
        """The ring takes no more jobs and is stopped after its last one; how many it has. Raises InvalidValue."""
        driver = self._drivers.get(name)
        if driver is None or driver.status().info is None:
            raise InvalidValue("name", f"no ring {name!r} runs here")
        self._router.drain(name)
        if name not in self._ending:
            log.info("draining ring=%s", name)
            self._ending[name] = asyncio.create_task(self._end(driver), name=f"{name}-drain")
        status = driver.status()
        return status.running_jobs + status.waiting_jobs

    async def stop(self, *, at_once: bool = False) -> None:
        """Ends all rings, and the jobs that they still have. `at_once`, or cancelled, it waits for nothing else."""
        self._stopping.set()
        if at_once:
            self._settle_s = 0.0
        try:
            await asyncio.gather(*self._ending.values(), return_exceptions=True)
            await asyncio.gather(*(each.settle(self._settle_s) for each in self._drivers.values()))
        finally:
            # At once: whoever is cancelled meanwhile still ends them all.
            await asyncio.gather(*(driver.stop() for driver in self._drivers.values()))

    async def _end(self, driver: RingDriver) -> None:
        while not (driver.idle or self._stopping.is_set()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _IDLE_CHECK_S)
        try:
            await driver.settle(self._settle_s)
        finally:
            await self._stop(driver)

    async def _stop(self, driver: RingDriver) -> None:
        self._router.remove(driver.name)
        if not self._stopping.is_set():
            self._dissolve(driver.name)
        try:
            await driver.stop()
        finally:
            del self._drivers[driver.name], self._ending[driver.name]
        log.info("ended ring=%s", driver.name)

    def _next_name(self) -> str:
        """Never used twice: a session's pin to a ring that has gone must not mean another one."""
        name = ring_name(self._prefix, self._named)
        self._named += 1
        return name
