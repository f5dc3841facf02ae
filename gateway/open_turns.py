"""The turns that a service has, from the moment they are asked for: also those that no ring knows of yet.

It lets a closing session, and a server that ends, take back a turn whose prompt is still being read. Sessions' jobs it
does not end: the router does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from coordinator.errors import Cancelled, RingserveError, ServerEnded
from coordinator.requests import SessionId
from coordinator.streams import JobStream

T = TypeVar("T")


class OpenTurn:
    def __init__(self, session: SessionId | None) -> None:
        self.session = session
        self.started = False  # it had its lane
        self.closed = False  # its session was closed: it leaves no history
        self.stream: JobStream | None = None  # once a ring has its job
        self._ended: RingserveError | None = None
        self._reading: asyncio.Future[Any] | None = None

    async def read(self, future: asyncio.Future[T]) -> T:
        """Waits for the prompt. Raises what ended the turn meanwhile, and what the future raises."""
        self._reading = future
        read = await future
        if self._ended is not None:
            raise self._ended
        return read

    def close(self) -> None:
        self.closed = True
        self._stop_reading(Cancelled())

    def end(self, error: RingserveError) -> None:
        self._stop_reading(error)
        if self.stream is not None:
            self.stream.end(error)

    def _stop_reading(self, error: RingserveError) -> None:
        self._ended = error
        if self._reading is not None and not self._reading.done():
            self._reading.set_exception(error)

    def why(self, error: BaseException) -> BaseException:
        """What ended the turn: who closes it may have been slower to hear of that than its job."""
        if not isinstance(error, GeneratorExit | asyncio.CancelledError):
            return error
        ended = None if self.stream is None else self.stream.error
        return ended or error


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

    def end(self) -> None:
        """Ends all of them, wherever they are: the server has no more time."""
        for turn in tuple(self._turns):
            turn.end(ServerEnded())

    def close(self, session: SessionId) -> bool:
        """Closes the session's turns; whether there were any."""
        turns = [turn for turn in self._turns if turn.session == session]
        for turn in turns:
            turn.close()
        return bool(turns)
