"""That the server is to end: from when on it takes no more turns, and when those that run have had their time."""

from __future__ import annotations

import asyncio

from coordinator.errors import RingUnavailable


class Draining:
    """Said by the server; `begun` and `over` once each."""

    def __init__(self) -> None:
        self.begun = False
        self._over: asyncio.Future[None] | None = None

    @property
    def over(self) -> asyncio.Future[None]:
        """Done when no running turn may go on. To be waited for beside others, not to be cancelled."""
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
        return self._over

    def end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def check(self) -> None:
        """Raises RingUnavailable once it is over."""
        if self.over.done():
            raise RingUnavailable("the server has stopped")
