"""The turns that a service has, from the moment they are asked for: also those that no ring knows of yet.

It lets a closing session take back a turn whose prompt is still being read. It ends no job: the router does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from coordinator.errors import Cancelled
from coordinator.requests import SessionId

T = TypeVar("T")


class OpenTurn:
    def __init__(self, session: SessionId | None) -> None:
        self.session = session
        self.started = False  # it had its lane
        self.closed = False  # its session was closed: it leaves no history
        self._reading: asyncio.Future[Any] | None = None

    async def read(self, future: asyncio.Future[T]) -> T:
        """Waits for the prompt. Raises Cancelled once the session was closed, and what the future raises."""
        self._reading = future
        read = await future
        if self.closed:
            raise Cancelled
        return read

    def close(self) -> None:
        self.closed = True
        if self._reading is not None and not self._reading.done():
            self._reading.set_exception(Cancelled())


class OpenTurns:
    def __init__(self) -> None:
        self._turns: set[OpenTurn] = set()
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return len(self._turns)

    @contextmanager
    def opened(self, session: SessionId | None) -> Iterator[OpenTurn]:
        turn = OpenTurn(session)
        self._turns.add(turn)
        self._none.clear()
        try:
            yield turn
        finally:
            self._turns.discard(turn)
            if not self._turns:
                self._none.set()

    async def idle(self) -> None:
        """Returns when there is none."""
        await self._none.wait()

    def close(self, session: SessionId) -> bool:
        """Closes the session's turns; whether there were any."""
        turns = [turn for turn in self._turns if turn.session == session]
        for turn in turns:
            turn.close()
        return bool(turns)
