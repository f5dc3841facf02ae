"""Where replies and the news of a loss wait for the coordinator's event loop.

Decides nothing but order: replies come out as they came in, those of earlier epochs are dropped, and once the ring is
lost every call says so, until an epoch is opened. Any thread may put something in; only the loop's own tasks take out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from coordinator.errors import RingLost
from coordinator.frames import Epoch, Reply
from stage.messages import ReplyMessage


class ReplyQueue:
    """Belongs to the running loop that made it. `on_lost` runs there at an epoch's first loss."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._replies: deque[Reply] = deque()
        self._changed = asyncio.Event()
        self._epoch = Epoch(0)
        self._lost: RingLost | None = None

    # From any thread

    def push(self, message: ReplyMessage) -> None:
        self._call(lambda: self._add(message))

    def lose(self, stage: int | None, reason: str, opened: Epoch | None = None) -> None:
        """`opened`: the epoch that it was lost in; of an earlier one it is no news. None: of whichever there is."""
        self._call(lambda: self._fail_in(opened, stage, reason))

    # On the loop

    def open_epoch(self, epoch: Epoch) -> None:
        """What was lost has been replaced; whoever waits for a reply waits on."""
        self._epoch = epoch
        self._replies.clear()
        self._lost = None

    @property
    def epoch(self) -> Epoch:
        return self._epoch

    @property
    def loss(self) -> str | None:
        return None if self._lost is None else str(self._lost)

    def check(self) -> None:
        """Raises RingLost once the ring is lost."""
        if self._lost is not None:
            # A new one each time: an exception that is raised twice drags both tracebacks along.
            raise type(self._lost)(self._lost.stage, self._lost.reason)

    def fail(self, stage: int | None, reason: str) -> None:
        self.end(RingLost(stage, reason))

    def end(self, lost: RingLost) -> None:
        if self._lost is None:
            self._lost = lost
            self._changed.set()
            self._on_lost()

    async def next(self) -> Reply:
        while True:
            self.check()
            if self._replies:
                return self._replies.popleft()
            self._changed.clear()
            await self._changed.wait()

    def _fail_in(self, opened: Epoch | None, stage: int | None, reason: str) -> None:
        if opened in (None, self._epoch):
            self.fail(stage, reason)

    def _add(self, message: ReplyMessage) -> None:
        if message.opened == self._epoch:
            self._replies.append(message.reply)
            self._changed.set()

    def _call(self, action: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more
