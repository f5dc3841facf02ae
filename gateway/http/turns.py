"""Runs the turns of one request: whole or streamed, with what happens when its client leaves or an error comes late.

A turn ends with its request: whoever leaves early cancels. Nothing here knows of wires other than server-sent events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request

from coordinator.requests import Usage
from gateway.errors import is_internal
from gateway.http.chat_answer import Answering, Collected
from gateway.http.errors import error_body
from gateway.service import GenerationService
from gateway.turns import TurnDelta, TurnEvent, TurnFinished, TurnRequest, TurnStarted

log = logging.getLogger(__name__)

# Seconds of silence before a comment tells proxies and clients that somebody is at work.
KEEP_ALIVE_S = 10.0
_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"
# Events that a choice may be ahead of its reader; then its turn waits, and merges what comes.
_AHEAD = 64


class ClientGone(Exception):
    """The client left before its answer was whole."""


@dataclass(frozen=True, slots=True)
class Told:
    """An event of one choice."""

    index: int
    event: TurnEvent


async def collect(
    service: GenerationService, turns: Sequence[TurnRequest], request: Request
) -> list[Collected]:
    """Every choice, whole. Raises what the service raises, and ClientGone."""
    answers = [asyncio.create_task(_collected(service, turn)) for turn in turns]
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


async def sent(
    coming: asyncio.Future[Told | None],
    events: AsyncGenerator[Told, None],
    answering: Answering,
    *,
    include_usage: bool,
) -> AsyncIterator[bytes]:
    """Server-sent events; an error comes in band, and without [DONE], so that nobody takes the answer for whole.

    `coming`: the first of the events, or None for their end, as it is awaited already.
    """
    used: dict[int, Usage] = {}
    async with aclosing(events):
        try:
            async for told in _with_silence(coming, events):
                if told is None:
                    yield _KEEP_ALIVE
                    continue
                if isinstance(told.event, TurnFinished):
                    used[told.index] = told.event.usage
                chunk = _chunk(told, answering)
                if chunk is not None:
                    yield _event(chunk)
        except Exception as error:
            if is_internal(error):
                log.exception("a stream broke off")
            yield _event(error_body(error))
            return
    if include_usage:
        yield _event(answering.usage_chunk([used[index] for index in sorted(used)]))
    yield _DONE


def _chunk(told: Told, answering: Answering) -> dict[str, Any] | None:
    match told.event:
        case TurnStarted():
            return answering.opening(told.index)
        case TurnDelta():
            return answering.piece(told.index, told.event)
        case TurnFinished():
            return answering.ending(told.index, told.event)


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


async def _with_silence(
    coming: asyncio.Future[Told | None], events: AsyncGenerator[Told, None]
) -> AsyncIterator[Told | None]:
    """The events, and None for each KEEP_ALIVE_S of waiting."""
    try:
        while True:
            done, _ = await asyncio.wait({coming}, timeout=KEEP_ALIVE_S)
            if not done:
                yield None
                continue
            told = coming.result()
            if told is None:
                return
            yield told
            coming = asyncio.ensure_future(anext(events, None))
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
