"""Plays the streams over gRPC, as clients would: one turn after the other, each to its end.

Decides when a turn is asked again (no ring took it, and the server says so; or its gateway has died, and another one is
to come) and when a stream counts as lost: on any other error. It checks no answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc

from coordinator.errors import InvalidSetting
from coordinator.requests import SessionId
from gateway.chaos.book import Book, Played
from gateway.chaos.options import StormOptions
from gateway.chaos.traffic import Ask, Chatter, Encode, Step, longest_head
from gateway.client import Client, error_info
from gateway.turns import (
    TokenPrompt,
    TurnDelta,
    TurnFinished,
    TurnRecovering,
    TurnRequest,
    TurnStarted,
)

_LONGEST_RETRY_S = 0.5
# Of a lane, for a turn's new words and its answer.
_TURN_ROWS = 512


@dataclass(slots=True)
class _Turn:
    """One that runs."""

    sent_s: float
    ring: str = ""
    arrivals_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cut_off: list[tuple[int, ...]] = field(default_factory=list)
    cached_prefix: int = 0
    recovering: int = 0
    finished: bool = False

    def begin_again(self) -> None:
        """What has come so far comes once more; when it came stays."""
        if self.tokens:
            self.cut_off.append(tuple(self.tokens))
        self.ring, self.tokens = "", []


class Player:
    """`patience_s`: for how long a turn is asked again while no ring takes it, and how long one may last. `returns`:
    waits until somebody serves again where a gateway has died; None: that is nothing to come back from.
    """

    def __init__(
        self,
        client: Client,
        book: Book,
        patience_s: float,
        returns: Callable[[], Awaitable[Client]] | None = None,
    ) -> None:
        self.running: dict[int, _Turn] = {}  # by stream
        self._client = client
        self._book = book
        self._patience_s = patience_s
        self._returns = returns
        self._over = asyncio.Event()

    @asynccontextmanager
    async def talking(
        self, options: StormOptions, encode: Encode, max_rows: int
    ) -> AsyncIterator[None]:
        """Streams talk until the block is left, and then end their turns. Raises InvalidSetting."""
        shape = replace(options.shape, rows=max_rows - _TURN_ROWS)
        needed = longest_head(encode, shape) + _TURN_ROWS
        if needed > max_rows:
            raise InvalidSetting("max_rows", f"conversations need {needed}, got {max_rows}")
        async with asyncio.TaskGroup() as streams:
            for n in range(options.streams):
                streams.create_task(self._talk(n, Chatter(options.seed, n, encode, shape)))
            yield
            self._over.set()

    async def _talk(self, stream: int, chatter: Chatter) -> None:
        while not self._over.is_set():
            step = chatter.next()
            played = await self._play(stream, step)
            self._book.ended(played)
            if not played.error:
                chatter.answered(step, played.tokens)

    async def _play(self, stream: int, step: Step) -> Played:
        turn, refused, error = _Turn(time.perf_counter()), 0, ""
        self.running[stream] = turn
        while True:
            client = self._client
            try:
                await self._ask(client, step, turn)
            except grpc.aio.AioRpcError as failed:
                error = await self._failed(failed, turn, client)
                if not error:
                    refused += 1
                    turn.begin_again()
                    continue
            break
        del self.running[stream]
        if not (error or turn.finished):
            error = "the stream ended without a word"
        return Played(
            stream=stream,
            step=step,
            ring=turn.ring,
            sent_s=turn.sent_s,
            ended_s=time.perf_counter(),
            arrivals_s=tuple(turn.arrivals_s),
            tokens=tuple(turn.tokens),
            cached_prefix=turn.cached_prefix,
            refused=refused,
            recovering=turn.recovering,
            cut_off=tuple(turn.cut_off),
            error=error,
        )

    async def _failed(self, failed: grpc.aio.AioRpcError, turn: _Turn, client: Client) -> str:
        """What is wrong; empty, behind a wait: it is to be asked again."""
        told = f"{failed.code().name}: {failed.details()}"
        if time.perf_counter() - turn.sent_s > self._patience_s:
            return told
        info = error_info(failed)
        if info is None and self._returns is not None:
            self._client = await self._returns()
            # The same one: its gateway lives, and has lost the stream.
            return told if self._client is client else ""
        if info is None or info.retry_after_s is None or turn.tokens:
            return told
        await asyncio.sleep(min(info.retry_after_s, _LONGEST_RETRY_S))
        return ""

    async def _ask(self, client: Client, step: Step, turn: _Turn) -> None:
        session = SessionId(step.session)
        request = request_of(step.ask, session=session, timeout_s=2 * self._patience_s)
        async with client.generate(request) as stream:
            async for event in stream:
                match event:
                    case TurnStarted():
                        turn.ring, turn.cached_prefix = event.ring, event.cached_prefix
                    case TurnDelta() if event.token_ids:
                        turn.arrivals_s.append(time.perf_counter())
                        turn.tokens.extend(event.token_ids)
                    case TurnRecovering():
                        turn.recovering += 1
                    case TurnFinished():
                        turn.finished = True


def request_of(
    ask: Ask,
    *,
    session: SessionId | None = None,
    cold: bool = False,
    timeout_s: float | None = None,
) -> TurnRequest:
    """`cold`: every row is computed, and no token is drafted."""
    return TurnRequest(
        TokenPrompt(ask.prompt),
        session=session,
        sampling=ask.sampling,
        max_tokens=ask.max_tokens,
        ignore_eos=True,
        reuse=not cold,
        draft=ask.draft and not cold,
        timeout_s=timeout_s,
    )
