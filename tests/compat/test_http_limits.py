"""How much of an HTTP connection a stranger can use up: its head, its time, and how many of them there are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from gateway.http.server import serve_http
from gateway.settings import HttpSettings
from tests.compat.http_client import Http

if TYPE_CHECKING:
    from tests.compat.conftest import Site

Making = Callable[..., AbstractAsyncContextManager[Http]]


@pytest.fixture
def limited(site: Callable[..., AbstractAsyncContextManager[Site]]) -> Making:
    @asynccontextmanager
    async def make(**limits: Any) -> AsyncIterator[Http]:
        settings = HttpSettings(drain_s=1.0, **limits)
        async with site() as fake, serve_http(fake.service, settings) as address:
            yield Http(address)

    return make


async def test_a_request_behind_another_has_its_time_and_no_more(limited: Making) -> None:
    async with limited(request_s=0.2) as client:
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(
            b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
            b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{"
        )
        async with asyncio.timeout(4):  # uvicorn gives an idle connection 5 seconds
            assert (await client.head(reader))[0] == 200
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b'{"status":"ok"}'
        writer.close()


async def test_a_head_that_is_too_long_is_refused(limited: Making) -> None:
    async with limited() as client:
        status, _, _ = await client.ask("GET", "/health", x_long="x" * 1000)
        assert status == 200
        reader, writer = await client.opened("GET", "/health", x_long="x" * 1_000_000)
        with contextlib.suppress(ConnectionError):  # where what it sent was never read
            assert not (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_connection_too_many_is_turned_away_and_the_next_is_served(
    limited: Making,
) -> None:
    async with limited(max_connections=2) as client:
        first = await asyncio.open_connection(client.host, client.port)
        assert (await client.ask("GET", "/health"))[0] == 200
        second = await asyncio.open_connection(client.host, client.port)
        async with asyncio.timeout(10):
            await _until_status(client, 503)
            status, headers, told = await client.post("/v1/messages", {})
            assert (status, headers["retry-after"]) == (529, "5")
            assert told["error"]["type"] == "overloaded_error"
            for _, writer in (first, second):
                writer.close()
                await writer.wait_closed()
            await _until_status(client, 200)


async def test_who_was_connected_before_one_too_many_is_served_on(limited: Making) -> None:
    """The one that was turned away is not kept, however it would like to be."""
    ask = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    async with limited(max_connections=1) as client, asyncio.timeout(4):  # idle ones have 5 seconds
        before, one = await asyncio.open_connection(client.host, client.port)
        one.write(ask)
        assert (await client.head(before))[0] == 200
        assert await before.readexactly(15) == b'{"status":"ok"}'
        beyond, two = await asyncio.open_connection(client.host, client.port)
        two.write(ask)
        assert (await client.head(beyond))[0] == 503
        await beyond.read()
        one.write(ask)
        assert (await client.head(before))[0] == 200
        for writer in (one, two):
            writer.close()


async def _until_status(client: Http, status: int) -> None:
    """What was opened or closed before may not have reached the server yet."""
    while (await client.ask("GET", "/health"))[0] != status:
        pass
