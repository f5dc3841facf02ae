"""Shows snapshots to several viewers: one is made for all of them, twice a second, and only while somebody looks.

A viewer that reads slowly misses snapshots and delays nobody; how many may look is bounded. What a snapshot says is
not decided here; nor is when a viewer that reads nothing at all is given up, which is its connection's to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.errors import TooManyViewers

log = logging.getLogger(__name__)

_EVERY_S = 0.5
_MOST_VIEWERS = 32
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
    "x-content-type-options": "nosniff",
}


class Viewer:
    """Holds the newest snapshot that was not sent yet, and no other."""

    def __init__(self) -> None:
        self._newest: bytes | None = None
        self._closed = False
        self._changed = asyncio.Event()

    def show(self, snapshot: bytes) -> None:
        self._newest = snapshot
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    async def next(self) -> bytes | None:
        """None: there is nothing more to see."""
        await self._changed.wait()
        self._changed.clear()
        snapshot, self._newest = self._newest, None
        return None if self._closed else snapshot


class Feed:
    """`make`: one snapshot, encoded. All calls come from one event loop."""

    def __init__(
        self,
        make: Callable[[], bytes],
        *,
        every_s: float = _EVERY_S,
        most_viewers: int = _MOST_VIEWERS,
    ) -> None:
        self._make = make
        self._every_s = every_s
        self._most_viewers = most_viewers
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._newest: bytes | None = None  # while somebody looks
        self._closed = False

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    def current(self) -> bytes:
        """What the viewers saw last; made now when there are none."""
        return self._make() if self._newest is None else self._newest

    def check_room(self) -> None:
        """Raises TooManyViewers."""
        if len(self._viewers) >= self._most_viewers:
            raise TooManyViewers(self._most_viewers)

    @contextmanager
    def watched(self) -> Iterator[Viewer]:
        """One more viewer, who sees the current snapshot at once. Raises TooManyViewers."""
        self.check_room()
        viewer = Viewer()
        if self._closed:
            viewer.close()
            yield viewer
            return
        self._viewers.add(viewer)
        self._look()
        if self._newest is not None:
            viewer.show(self._newest)
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._look_away()

    def close(self) -> None:
        """Lets all viewers go, for good: the server wants to end."""
        self._closed = True
        for viewer in self._viewers:
            viewer.close()

    def _look(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._show(), name="status-page")

    def _look_away(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = self._newest = None

    async def _show(self) -> None:
        while True:
            self._show_one()
            await asyncio.sleep(self._every_s)

    def _show_one(self) -> None:
        try:
            snapshot = self._make()
        except Exception:
            # The rim: who looks on must not harm what is looked at; the page says that nothing comes.
            log.exception("no snapshot for the status page")
            return
        self._newest = snapshot
        for viewer in self._viewers:
            viewer.show(snapshot)


class FeedResponse(Response):
    """The snapshots as server-sent events, until the viewer leaves or is let go."""

    def __init__(self, feed: Feed) -> None:
        self.status_code = 200
        self.background = None
        self._feed = feed
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.watched() as viewer:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            sending = asyncio.create_task(self._send(viewer, send))
            leaving = asyncio.create_task(_left(receive))
            try:
                await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                sending.cancel()
                leaving.cancel()
                await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send(self, viewer: Viewer, send: Send) -> None:
        while (snapshot := await viewer.next()) is not None:
            body = b"data: " + snapshot + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
