"""Runs the turns of one request: whole or streamed, with what happens when its client leaves or an error comes late.

A turn ends with its request: whoever leaves early cancels. Nothing here knows of wires other than server-sent events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gateway.chat.parts import AnswerPart
from gateway.errors import is_internal
from gateway.http.draining import Draining
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
    draining: Draining = request.state.draining
    try:
        waited: set[asyncio.Future[Any]] = {every, left, draining.over}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not every.done():
            draining.check()
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
    service: GenerationService, turns: Sequence[TurnRequest]
) -> AsyncGenerator[Told, None]:
    """The events of all choices as they come. Raises what the service raises."""
    queue: asyncio.Queue[Told | BaseException | None] = asyncio.Queue(_AHEAD)
    tasks = [asyncio.create_task(_pass_on(service, n, t, queue)) for n, t in enumerate(turns)]
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
    service: GenerationService,
    index: int,
    turn: TurnRequest,
    queue: asyncio.Queue[Told | BaseException | None],
) -> None:
    try:
        async with aclosing(service.generate(turn)) as events:
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
    events = merged(service, _named(turns, request))
    coming: asyncio.Future[Told | None] = asyncio.ensure_future(anext(events, None))
    draining: Draining = request.state.draining
    try:
        await _either(coming, draining, _FIRST_EVENT_S)
        told = coming.result() if coming.done() else None
    except BaseException:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await events.aclose()
        raise
    first = None if told is None else told.event
    headers = started_headers(first) if isinstance(first, TurnStarted) else {}
    body = _sent(coming, events, wire, request)
    return StreamingResponse(
        body, media_type="text/event-stream", headers={**_STREAM_HEADERS, **headers}
    )


async def _sent(
    coming: asyncio.Future[Told | None],
    events: AsyncGenerator[Told, None],
    wire: StreamWire,
    request: Request,
) -> AsyncIterator[bytes]:
    """`coming`: the first of the events, or None for their end, as it is awaited already."""
    async with aclosing(events):
        try:
            silence = _Silence()
            async for told in _with_silence(coming, events, silence, request.state.draining):
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


async def _either(
    coming: asyncio.Future[Told | None], draining: Draining, timeout_s: float
) -> bool:
    """Waits for the event, but not beyond the server's end. Whether it has come."""
    waited: set[asyncio.Future[Any]] = {coming, draining.over}
    await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return coming.done()


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
    draining: Draining,
) -> AsyncIterator[Told | None]:
    """The events, and None when the silence must be broken."""
    try:
        while True:
            left = silence.left()
            if not left:
                yield None
                continue
            if not await _either(coming, draining, left):
                draining.check()
                continue
            told = coming.result()
            if told is None:
                return
            yield told
            coming = asyncio.ensure_future(anext(events, None))
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
