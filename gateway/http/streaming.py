"""Runs the turns of one request: whole or streamed, with what happens when its client leaves or an error comes late.

A turn ends with its request: whoever leaves early cancels. Nothing here knows of wires other than server-sent events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from coordinator.errors import SlowReader
from gateway.chat.parts import AnswerPart
from gateway.errors import is_internal
from gateway.http.connection import UNREAD
from gateway.service import GenerationService
from gateway.turns import (
    TurnDelta,
    TurnEvent,
    TurnFinished,
    TurnRecovering,
    TurnRequest,
    TurnStarted,
)

log = logging.getLogger(__name__)

# Seconds without a byte, whatever goes on, before a comment tells proxies and clients that somebody is at work: clients
# were seen to lose patience from 5 on.
KEEP_ALIVE_S = 4.0
_KEEP_ALIVE = b": keep-alive\n\n"
# At once, for whoever looks at the bytes. To a dialect's clients it is nothing: none of them knows such an event.
_RECOVERING = b": recovering\n\n"
# Seconds that a stream's headers wait for its first event, so that what is refused is refused with a status.
_FIRST_EVENT_S = 2.0
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
# Events that a choice may be ahead of its reader; then its turn waits, and merges what comes. Few: each may be of many
# tokens, and what waits in the turn's own stream is what lets its job rest.
_AHEAD = 8


class ClientGone(Exception):
    """The client left before its answer was whole."""


@dataclass(frozen=True, slots=True)
class Collected:
    """One choice's events, all of them."""

    started: TurnStarted
    deltas: tuple[TurnDelta, ...]
    finished: TurnFinished

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def parts(self) -> tuple[AnswerPart, ...]:
        return tuple(part for delta in self.deltas for part in delta.parts)


@dataclass(frozen=True, slots=True)
class Told:
    """An event of one choice."""

    index: int
    event: TurnEvent


async def collect(
    service: GenerationService, turns: Sequence[TurnRequest], request: Request
) -> list[Collected]:
    """Every choice, whole. Raises what the service raises, and ClientGone."""
    named = _named(turns, request)
    answers = [asyncio.create_task(_collected(service, turn)) for turn in named]
    every = asyncio.gather(*answers)
    left = asyncio.create_task(_left(request))
    try:
        waited: set[asyncio.Future[Any]] = {every, left}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not every.done():
            raise ClientGone
        return every.result()
    finally:
        for task in (*answers, left):
            task.cancel()
        await asyncio.gather(*answers, left, every, return_exceptions=True)


def _named(turns: Sequence[TurnRequest], request: Request) -> list[TurnRequest]:
    """The turns of any dialect, with whose they are and what ties them to their request in logs and traces."""
    request_id, parent = request.state.request_id, request.headers.get("traceparent", "")
    owned = request.state.asker.owned(turns)
    return [replace(turn, request_id=request_id, traceparent=parent) for turn in owned]


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _collected(service: GenerationService, turn: TurnRequest) -> Collected:
    started, finished, deltas = None, None, []
    async with aclosing(service.generate(turn)) as events:
        async for event in events:
            match event:
                case TurnStarted():
                    started = event
                case TurnDelta():
                    deltas.append(event)
                case TurnFinished():
                    finished = event
    assert started is not None
    assert finished is not None
    return Collected(started, tuple(deltas), finished)


async def merged(
    service: GenerationService,
    turns: Sequence[TurnRequest],
    gone: Callable[[], SlowReader | None],
) -> AsyncGenerator[Told, None]:
    """The events of all choices as they come. Raises what the service raises. `gone`: as the service wants it."""
    queue: asyncio.Queue[Told | BaseException | None] = asyncio.Queue(_AHEAD)
    choices = [service.generate(turn, gone) for turn in turns]
    tasks = [asyncio.create_task(_pass_on(n, each, queue)) for n, each in enumerate(choices)]
    try:
        running = len(tasks)
        while running:
            told = await queue.get()
            if isinstance(told, BaseException):
                raise told
            if told is None:
                running -= 1
            else:
                yield told
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_on(
    index: int,
    choice: AsyncGenerator[TurnEvent, None],
    queue: asyncio.Queue[Told | BaseException | None],
) -> None:
    try:
        async with aclosing(choice) as events:
            async for event in events:
                await queue.put(Told(index, event))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


class StreamWire(Protocol):
    """One streamed request in one dialect: what goes out for each event. Keeps what it needs to end well."""

    def said(self, told: Told) -> bytes:
        """Server-sent events, or nothing. It is not told of recoveries."""
        ...

    def silent(self) -> bytes:
        """After each KEEP_ALIVE_S without a word."""
        return _KEEP_ALIVE

    def failed(self, error: Exception, request_id: str) -> bytes:
        """The last thing that is sent: no client may take the answer for whole."""
        ...

    def ended(self) -> bytes: ...


def data(body: Any, event: str = "") -> bytes:
    """One server-sent event; `event` is its name, where a dialect has names."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + msgspec.json.encode(body) + b"\n\n"


def started_headers(started: TurnStarted) -> dict[str, str]:
    headers = {
        "x-ringserve-ring": started.ring,
        "x-ringserve-cached-prefix": str(started.cached_prefix),
    }
    if started.miss is not None:
        headers["x-ringserve-miss"] = started.miss.kind.value
    return headers


async def streamed(
    service: GenerationService, turns: Sequence[TurnRequest], wire: StreamWire, request: Request
) -> Response:
    """The answer as server-sent events. Raises what the service raises before its first event, or soon."""
    events = merged(service, _named(turns, request), partial(_unread, request))
    coming: asyncio.Future[Told | None] = asyncio.ensure_future(anext(events, None))
    try:
        await asyncio.wait((coming,), timeout=_FIRST_EVENT_S)
        told = coming.result() if coming.done() else None
    except BaseException:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await events.aclose()
        raise
    first = None if told is None else told.event
    headers = started_headers(first) if isinstance(first, TurnStarted) else {}
    return _Streamed(_sent(coming, events, wire, request), {**_STREAM_HEADERS, **headers})


def _unread(request: Request) -> SlowReader | None:
    """Why its turns are closed, when its connection was given up since nobody read."""
    unread_s = getattr(request.state, UNREAD, None)
    return None if unread_s is None else SlowReader(unread_s)


class _Streamed(StreamingResponse):
    """Ends its turns with itself. Starlette's own leaves that to the garbage collector, and would interrupt their ends
    again and again.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self.stream_response(send))
        left = asyncio.create_task(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait((sending, left), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            left.cancel()
            await asyncio.gather(sending, left, return_exceptions=True)
            await self._events.aclose()


async def _sent(
    coming: asyncio.Future[Told | None],
    events: AsyncGenerator[Told, None],
    wire: StreamWire,
    request: Request,
) -> AsyncGenerator[bytes, None]:
    """`coming`: the first of the events, or None for their end, as it is awaited already."""
    silence = _Silence()
    async with aclosing(events), aclosing(_with_silence(coming, events, silence)) as heard:
        try:
            async for told in heard:
                sent = _bytes(told, wire)
                if sent:
                    yield sent
                if sent or told is None:
                    silence.broken()
        except Exception as error:
            request_id = request.state.request_id
            if is_internal(error):
                log.exception("request_id=%s: a stream broke off", request_id)
            yield wire.failed(error, request_id)
            return
    yield wire.ended()


def _bytes(told: Told | None, wire: StreamWire) -> bytes:
    if told is None:
        return wire.silent()
    return _RECOVERING if isinstance(told.event, TurnRecovering) else wire.said(told)


class _Silence:
    """How long nothing was sent: events may come all the while, such as tokens of a call that is held back."""

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self.broken()

    def broken(self) -> None:
        self._since = self._now()

    def left(self) -> float:
        return max(0.0, self._since + KEEP_ALIVE_S - self._now())


async def _with_silence(
    coming: asyncio.Future[Told | None],
    events: AsyncGenerator[Told, None],
    silence: _Silence,
) -> AsyncGenerator[Told | None, None]:
    """The events, and None when the silence must be broken."""
    try:
        while True:
            left = silence.left()
            if not left:
                yield None
                continue
            await asyncio.wait((coming,), timeout=left)
            if not coming.done():
                continue
            told = coming.result()
            if told is None:
                return
            yield told
            coming = asyncio.ensure_future(anext(events, None))
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
