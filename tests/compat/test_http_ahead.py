"""Clients that send on before they have their answer: they get every answer, and they may still leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.compat.http_client import until

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
PROBE = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def _request(body: Any, *headers: str) -> bytes:
    raw = json.dumps(body).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: x", f"content-length: {len(raw)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + raw


async def test_requests_in_a_row_are_answered_in_their_order(http: Any) -> None:
    async with http() as (client, _):
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(
            _request({**CHAT, "max_tokens": 3}) + PROBE + _request({**CHAT, "n": 0}) + PROBE
        )
        statuses = []
        for _ in range(4):
            status, headers = await client.head(reader)
            await reader.readexactly(int(headers["content-length"]))
            statuses.append(status)
        writer.close()
    assert statuses == [200, 200, 400, 200]


@pytest.mark.parametrize("ahead", [PROBE, b"\r\n", b"\0\0", b"x" * 2_000_000])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_sent_on_and_left_ends_its_turn(
    http: Any, ahead: bytes, stream: bool
) -> None:
    async with http(endless=True, step_s=0.005) as (client, site):
        _, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(_request({**CHAT, "stream": stream}))
        await until(lambda: site.service.rings()[0].running_jobs > 0)
        writer.write(ahead)
        writer.close()
        await until(lambda: not site.service.open_turns)


async def test_what_no_client_may_send_ends_its_stream_alone(
    http: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with http(endless=True, step_s=0.005) as (client, site):
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(_request({**CHAT, "stream": True}, "connection: close"))
        await reader.readuntil(b"data: ")
        writer.write(b"more")
        await until(lambda: not site.service.open_turns)
        writer.close()
        status, _, _ = await client.ask("GET", "/health")
    assert status == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
