"""Who is refused while sending reads why, whether the connection stays or not."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from gateway.http import lingering

LIMIT = 1_000_000
SENT = 6_000_000
ONE_ONE, ONE_ZERO = "HTTP/1.1", "HTTP/1.0"


def sent_whole(port: int, version: str, *headers: str) -> bytes:
    """All of a request before anything is read of its answer, as simple clients do it."""
    lines = [f"POST /v1/completions {version}", "host: x", f"content-length: {SENT}", *headers]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as there:
        there.sendall("\r\n".join([*lines, "", ""]).encode() + b"x" * SENT)
        return there.recv(12)


@pytest.mark.parametrize(
    ("version", "headers"),
    [(ONE_ONE, ()), (ONE_ONE, ("connection: close",)), (ONE_ZERO, ())],
)
async def test_who_sends_too_much_reads_that_it_was_too_much(
    http: Any, version: str, headers: tuple[str, ...]
) -> None:
    async with http(max_body_bytes=LIMIT) as (client, _):
        for _ in range(5):
            told = await asyncio.to_thread(sent_whole, client.port, version, *headers)
            assert told == b"HTTP/1.1 413"


async def test_a_client_that_goes_on_and_on_is_answered_all_the_same(
    http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lingering, "_LONGEST_S", 0.1)
    async with http(max_body_bytes=LIMIT) as (client, it), asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(client.host, client.port)
        head = f"POST /v1/completions HTTP/1.0\r\nhost: x\r\ncontent-length: {SENT}\r\n\r\n"
        writer.write(head.encode() + b"x" * 1000)
        assert (await client.head(reader))[0] == 413
        assert it.service.intake.bytes == 0
        writer.close()


async def test_who_asks_before_sending_is_told_at_once(http: Any) -> None:
    async with http(max_body_bytes=LIMIT) as (client, _), asyncio.timeout(3):
        reader, writer = await asyncio.open_connection(client.host, client.port)
        lines = ["POST /v1/completions HTTP/1.1", "host: x", f"content-length: {SENT}"]
        lines += ["connection: close", "expect: 100-continue", "", ""]
        writer.write("\r\n".join(lines).encode())
        assert (await client.head(reader))[0] == 413
        writer.close()
