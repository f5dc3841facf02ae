"""As little of an HTTP client as shows what is on the wire, and when. For tests."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Http:
    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.host, self.port = host, int(port)
        self.receive_bytes: int | None = None  # that the system takes of an unread answer

    async def opened(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        raw_socket = socket.socket()
        raw_socket.setblocking(False)
        if self.receive_bytes is not None:
            # Before it connects: a window that was wide once stays wide.
            raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_bytes)
        await asyncio.get_running_loop().sock_connect(raw_socket, (self.host, self.port))
        reader, writer = await asyncio.open_connection(sock=raw_socket)
        raw = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(raw)}"]
        lines += ["connection: close", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + raw)
        await writer.drain()
        return reader, writer

    async def head(self, reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
        raw = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = raw.strip().split("\r\n")
        return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines)

    async def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        reader, writer = await self.opened(method, path, body, **headers)
        try:
            status, given = await self.head(reader)
            raw = await reader.read()
        finally:
            writer.close()
        return status, given, unchunked(raw) if "transfer-encoding" in given else raw

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
        status, given, raw = await self.ask("POST", path, body, **headers)
        return status, given, json.loads(raw)

    async def events(self, path: str, body: Any, **headers: str) -> list[Any]:
        status, given, raw = await self.ask("POST", path, body, **headers)
        assert (status, given["content-type"].split(";")[0]) == (200, "text/event-stream")
        lines = [line for line in raw.decode().split("\n\n") if line and not line.startswith(":")]
        return [
            each if each == "[DONE]" else json.loads(each)
            for each in (line.removeprefix("data: ") for line in lines)
        ]


def unchunked(raw: bytes) -> bytes:
    parts = []
    while raw:
        size, _, rest = raw.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        raw = rest[int(size, 16) + 2 :]
    return b"".join(parts)


async def until(holds: Callable[[], bool]) -> None:
    """Waits for what another task or the other side of a socket does; nominally 10 seconds."""
    for _ in range(5_000):
        if holds():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never came to hold")
