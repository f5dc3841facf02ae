"""How turns end with their server: who asks while it drains, who outlasts that, and who reads nothing."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.client import Client, ErrorInfo, error_info
from gateway.http.server import serve_http
from gateway.observing.sights import Sights
from gateway.rpc.server import serve_grpc
from gateway.settings import GrpcSettings, HttpSettings
from gateway.turns import TextPrompt, TurnFinished, TurnRequest
from tests.compat.healing import HeldUp
from tests.compat.http_client import Http, until
from tests.compat.overloaded import GREEDY, Place, crowded_place

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ENDLESS = TurnRequest(TextPrompt("x"), sampling=GREEDY)
WORDY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "long"}],
    "stream": True,
    "temperature": 0,
    "logprobs": True,
    "top_logprobs": 20,
}
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


class Leaving:
    """A front that is left when it is told to, or cancelled."""

    def __init__(self, front: Any) -> None:
        self._front = front
        self._leave = asyncio.Event()
        self.address = ""
        self.task = asyncio.create_task(self._served())

    async def _served(self) -> None:
        async with self._front as self.address:
            await self._leave.wait()

    async def listens(self) -> Leaving:
        await until(lambda: bool(self.address))
        return self

    def leave(self) -> None:
        self._leave.set()

    async def has_ended(self) -> None:
        async with asyncio.timeout(15):
            await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def leaving(front: Any) -> AsyncIterator[Leaving]:
    it = await Leaving(front).listens()
    try:
        yield it
    finally:
        it.leave()
        await it.has_ended()


def refused(error: BaseException | None) -> tuple[str, ErrorInfo]:
    assert isinstance(error, grpc.aio.AioRpcError)
    info = error_info(error)
    assert info is not None, error
    return error.code().name, info


async def said(client: Client, turn: TurnRequest) -> list[Any]:
    async with client.generate(turn) as stream:
        return [event async for event in stream]


async def test_while_it_drains_grpc_says_so_takes_no_turn_and_ends_what_runs() -> None:
    async with (
        crowded_place(step_s=0.002) as place,
        leaving(serve_grpc(place.service, GrpcSettings(drain_s=30.0))) as front,
        Client(front.address) as client,
        Client(front.address) as other,
    ):
        health = health_pb2_grpc.HealthStub(client._channel)
        question = health_pb2.HealthCheckRequest()
        watch = health.Watch(question)
        assert (await watch.read()).status == SERVING
        turn = TurnRequest(TextPrompt("x"), sampling=GREEDY, max_tokens=400)
        running = asyncio.create_task(said(client, turn))
        await until(lambda: place.driver.status().running_jobs == 1)
        front.leave()
        assert (await watch.read()).status == NOT_SERVING
        assert (await health.Check(question)).status == NOT_SERVING
        for each in (client, other):
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await said(each, ENDLESS)
            status, info = refused(late.value)
            assert (status, info.reason) == ("UNAVAILABLE", "RING_UNAVAILABLE")
            assert info.metadata["why"] == "the server is draining"
            assert info.retry_after_s == 1.0
            assert (await each.rings())[0].running_jobs == 1, "operators still look"
        assert not running.done()
        assert isinstance((await running)[-1], TurnFinished)
        assert await watch.read() is grpc.aio.EOF
        await front.has_ended()


@pytest.mark.parametrize("how", ["time is up", "a second signal", "while it heals"])
async def test_a_turn_that_the_server_ends_is_told_so_and_counted_as_that(how: str) -> None:
    """Not as one whose client left."""
    drain_s = 0.1 if how == "time is up" else 30.0
    async with (
        crowded_place(step_s=0.002, kind=HeldUp) as place,
        leaving(serve_grpc(place.service, GrpcSettings(drain_s=drain_s))) as front,
        Client(front.address) as client,
    ):
        running = asyncio.create_task(said(client, ENDLESS))
        await until(lambda: place.driver.status().running_jobs == 1)
        if how == "while it heals":
            place.ring.lose_next(stage=1)
            await place.ring.heals.wait()
        front.leave()
        if drain_s > 1.0:
            await until(lambda: place.service.draining)
            front.task.cancel()
        await front.has_ended()
        ended = (await asyncio.gather(running, return_exceptions=True))[0]
        place.ring.may_heal.set()
        status, info = refused(ended)
        assert (status, info.reason, info.retry_after_s) == ("UNAVAILABLE", "RING_UNAVAILABLE", 1.0)
        assert isinstance(ended, grpc.aio.AioRpcError)
        assert ended.details() == "the server ended before the answer was complete"
        assert place.figure('request_errors_total{code="ring_unavailable"}') == 1
        assert place.figure('request_success_total{finished_reason="abort"}') == 0


async def test_readers_that_read_nothing_do_not_hold_up_the_end_and_cost_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        crowded_place(unread_tokens=32, unread_s=60.0) as place,
        leaving(_http(place, drain_s=0.1, unread_s=60.0)) as front,
    ):
        writers = [await _unread(front.address, WORDY) for _ in range(2)]
        await until(lambda: place.driver.status().resting_jobs == 2)
        caplog.clear()
        front.leave()
        await front.has_ended()
        for writer in writers:
            writer.transport.abort()
        await until(lambda: place.is_idle)
        assert place.figure('request_errors_total{code="ring_unavailable"}') == 2
    lines = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert [each.name for each in lines] == ["gateway.http.server"]
    assert "cut off 2 connections" in lines[0].getMessage()


@pytest.mark.parametrize("tokens", [None, 1200])
async def test_a_slow_reader_of_http_is_counted_as_one(tokens: int | None) -> None:
    """Whether its job ended early, or came to its end before anybody saw that nobody read."""
    most = 32 if tokens is None else 100_000
    async with (
        crowded_place(unread_tokens=most, unread_s=0.3) as place,
        leaving(_http(place, drain_s=1.0, unread_s=0.3)) as front,
    ):
        body = WORDY if tokens is None else {**WORDY, "max_tokens": tokens}
        writer = await _unread(front.address, body)
        await until(lambda: bool(place.service.open_turns))
        await until(lambda: place.is_idle)
        writer.transport.abort()
        assert place.figure('request_errors_total{code="slow_reader"}') == 1
        assert place.figure('request_success_total{finished_reason="abort"}') == 0


def _http(place: Place, **settings: Any) -> Any:
    return serve_http(place.service, HttpSettings(**settings), Sights(metrics=place.metrics))


async def _unread(address: str, body: Any) -> Any:
    client = Http(address)
    client.receive_bytes = 4096
    _, writer = await client.opened("POST", "/v1/chat/completions", body)
    writer.transport.pause_reading()
    return writer
