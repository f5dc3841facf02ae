"""A stage's lease in its process: calls come in any threads, and time passes.

Decides what happens when another gateway takes the stage over: turns of the one before are over, and its call that
waits for the end of this process comes back, so that gateways that died leave nothing behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from stage.lease import Lease, Owner, Tenure
from stage.runner import Runner


class Tenancy:
    def __init__(
        self, lease_s: float, runner: Runner, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._lease = Lease(lease_s)
        self._runner = runner
        self._now = now
        self._lock = threading.Lock()
        self._over: Future[Owner] = Future()
        self._last: str | None = None  # who has had it last

    def claim(self, owner: Owner, ended: str = "") -> Tenure | None:
        """As Lease.claim."""
        with self._lock:
            held = self._lease.claim(owner, self._now(), ended)
            if held is None:
                self._change_to(owner)
            return held

    def renew(self, owner: str) -> bool:
        with self._lock:
            return self._lease.renew(owner, self._now())

    def release(self, owner: str) -> None:
        with self._lock:
            self._lease.release(owner)

    def tenure(self) -> Tenure | None:
        with self._lock:
            return self._lease.tenure(self._now())

    def wait(self) -> Owner:
        """Until another gateway takes the stage over: that one."""
        with self._lock:
            over = self._over
        return over.result()

    def _change_to(self, owner: Owner) -> None:
        last, self._last = self._last, owner.id
        if last not in (None, owner.id):
            self._runner.take_over()
            self._over.set_result(owner)
            self._over = Future()
