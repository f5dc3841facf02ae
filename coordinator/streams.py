"""What a caller holds of a job: an async stream of its events that cancels the job when it is left.

Deltas merge while the reader lags. What is unread is told to readers.py, by which the job rests before it is much.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from coordinator.errors import Cancelled, RingserveError
from coordinator.frames import JobId
from coordinator.readers import Reader
from coordinator.requests import Finished, JobEvent, Recovering, Started, TokenDelta

# Tokens of one event. With 20 log-probabilities each they are 17 kB on the wire, far below a message's limit.
_MOST_TOKENS = 64


class JobStream:
    """Yields Started, then deltas, between them Recovering when its ring heals, then Finished. Raises the job's error
    behind the last decided token.
    """

    def __init__(
        self,
        job: JobId,
        reader: Reader,
        end: Callable[[JobId, RingserveError], None],
        satisfy: Callable[[JobId], None],
    ) -> None:
        self.job = job
        self.reader = reader
        self._end_job = end
        self._satisfy = satisfy
        self._started: Started | None = None
        self._delta: TokenDelta | None = None
        self._recovering: Recovering | None = None
        self._end: Finished | RingserveError | None = None
        self._over = False
        self._news = asyncio.Event()

    async def __aenter__(self) -> JobStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Ends the job, if it has not ended; its rows stay reusable."""
        self.end(Cancelled())

    def end(self, error: RingserveError) -> None:
        """The same; the reader is told why, behind what it has not read yet."""
        if self._end is None:
            self._end_job(self.job, error)

    @property
    def error(self) -> RingserveError | None:
        """Why the job ended early, whether its reader has come to it or not."""
        return self._end if isinstance(self._end, RingserveError) else None

    def finish_now(self) -> Finished:
        """Ends the job where it is, for a caller that has what it wanted, and tells usage and
        timings.

        Raises the job's error if it failed before.
        """
        if self._end is None:
            self._satisfy(self.job)
        if isinstance(self._end, Finished):
            self._over = True
            return self._end
        raise self._end or Cancelled()

    def __aiter__(self) -> JobStream:
        return self

    async def __anext__(self) -> JobEvent:
        while not self._over:
            event = self._take()
            if event is not None:
                return event
            self._news.clear()
            await self._news.wait()
        raise StopAsyncIteration

    def _take(self) -> JobEvent | None:
        event: JobEvent | None
        if self._started is not None:
            event, self._started = self._started, None
            self.reader.took(0)
            return event
        if self._delta is not None:
            event, self._delta = _split(self._delta)
            self.reader.took(len(event.tokens))
            return event
        if self._recovering is not None:
            event, self._recovering = self._recovering, None
            self.reader.took(0)
            return event
        if self._end is None:
            return None
        self._over = True
        if isinstance(self._end, RingserveError):
            raise self._end
        return self._end

    # Called by the driver

    def put(self, event: JobEvent) -> None:
        match event:
            case Started():
                self._started, self._recovering = event, None
            case TokenDelta(tokens, logprobs):
                old = self._delta or TokenDelta(())
                self._delta = TokenDelta(old.tokens + tokens, old.logprobs + logprobs)
                self._recovering = None  # news that came too late for its reader
                self.reader.came(len(tokens))
            case Recovering():
                self._recovering = event
            case Finished():
                self._end, self._recovering = event, None
                self.reader.release()
        self._news.set()

    def fail(self, error: RingserveError) -> None:
        self._end = error
        self.reader.release()
        self._news.set()


def _split(delta: TokenDelta) -> tuple[TokenDelta, TokenDelta | None]:
    """What goes out now, and the rest."""
    if len(delta.tokens) <= _MOST_TOKENS:
        return delta, None
    now, rest = slice(_MOST_TOKENS), slice(_MOST_TOKENS, None)
    return (
        TokenDelta(delta.tokens[now], delta.logprobs[now]),
        TokenDelta(delta.tokens[rest], delta.logprobs[rest]),
    )
