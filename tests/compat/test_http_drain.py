"""While the server drains, what runs goes on and everybody else is told when to come again."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from gateway.http.server import serve_http
from gateway.settings import HttpSettings
from tests.compat.http_client import Http, unchunked

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from tests.compat.conftest import Site

_BODY = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "temperature": 0}


async def test_a_draining_server_still_answers_and_takes_no_turn(
    site: Callable[..., AbstractAsyncContextManager[Site]],
) -> None:
    async with site(endless=True, step_s=0.01) as fake, AsyncExitStack() as stack:
        http = await stack.enter_async_context(_served(fake))
        reader, writer = await http.opened(
            "POST", "/v1/chat/completions", {**_BODY, "max_tokens": 60}
        )
        await http.head(reader)
        draining = asyncio.create_task(stack.aclose())
        while (await http.ask("GET", "/ready"))[0] == 200:
            assert not draining.done()
        assert (await http.post("/ready", {}))[0] == 405
        status, headers, told = await http.ask("GET", "/ready")
        assert (status, b"draining" in told) == (503, True)
        assert (await http.ask("GET", "/health"))[0] == 200
        for path, status in (("/v1/chat/completions", 503), ("/v1/messages", 529)):
            refused, headers, _ = await http.post(path, {**_BODY, "max_tokens": 5})
            assert (refused, headers["retry-after"]) == (status, "1")
        assert unchunked(await reader.read()).endswith(b"data: [DONE]\n\n"), "what ran has ended"
        writer.close()
        async with asyncio.timeout(5):
            await draining


async def test_turns_that_do_not_end_are_ended(
    site: Callable[..., AbstractAsyncContextManager[Site]],
) -> None:
    async with site(endless=True, step_s=0.02) as fake, asyncio.timeout(10):
        async with _served(fake, drain_s=0.2) as http:
            reader, writer = await http.opened("POST", "/v1/chat/completions", _BODY)
            await http.head(reader)
            whole = asyncio.create_task(
                http.post("/v1/messages", {**_BODY, "max_tokens": 900, "stream": False})
            )
            await _two_run(fake)
        last = unchunked(await reader.read()).strip().split(b"\n\n")[-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "ring_unavailable"
        writer.close()
        status, headers, told = await whole
        assert (status, told["error"]["type"], headers["retry-after"]) == (
            529,
            "overloaded_error",
            "1",
        )


async def _two_run(fake: Site) -> None:
    for _ in range(5_000):
        if fake.driver.status().running_jobs == 2:
            return
        await asyncio.sleep(0.002)
    raise AssertionError("they never ran")


class _served:
    """The service behind HTTP."""

    def __init__(self, fake: Site, drain_s: float = 30.0) -> None:
        self._front: Any = serve_http(fake.service, HttpSettings(drain_s=drain_s))

    async def __aenter__(self) -> Http:
        return Http(await self._front.__aenter__())

    async def __aexit__(self, *error: object) -> None:
        await self._front.__aexit__(*error)
