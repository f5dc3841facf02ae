"""Many streams at once, with readers that lag and clients that leave in every way: nobody else notices, nothing stays.

Neroued/ninfer#111 (a half-closed client held the only slot through its prefill) and Avarok-Cybersecurity/atlas#368,
ROCm/ATOM#1562 (a client that left without reading held one for ever).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any

import pytest

from fakering.ring import FakeRing
from tests.compat.http_client import unchunked, until

if TYPE_CHECKING:
    from coordinator.frames import Frame
    from tests.compat.conftest import Site
    from tests.compat.http_client import Http

Making = Any
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

# Python's objects that 200 streams may leave: what 20 sessions' rows and caches of modules take, not 200 streams'.
BLOCKS_LEFT = 10_000
# Seconds of a fake frame where it matters which frame a client leaves in.
STEP_S = 0.05
# What a pipeline of two stages has in flight, and one that went out before the socket's end was seen.
FRAMES_LATE = 3


def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    raw: socket.socket = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _half_close(writer: asyncio.StreamWriter) -> None:
    writer.write_eof()


LEAVING = {"close": _close, "reset": _reset, "half-close": _half_close}


def _body(text: str = "Hello", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "temperature": 0, "stream": True, **more}


def _idle(site: Site) -> bool:
    status = site.driver.status()
    busy = status.running_jobs + status.waiting_jobs + status.busy_lanes
    return not busy and not site.service.open_turns


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[Frame]:
    """Every frame that a fake ring was given."""
    sent: list[Frame] = []
    submit = FakeRing.submit

    def counted(ring: FakeRing, frame: Frame) -> None:
        sent.append(frame)
        submit(ring, frame)

    monkeypatch.setattr(FakeRing, "submit", counted)
    return sent


async def _asked(client: Http, body: dict[str, Any]) -> Streams:
    return await client.opened("POST", "/v1/chat/completions", body)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("leave", LEAVING)
async def test_a_lane_is_free_within_a_frame_of_its_client_leaving_in_prefill(
    http: Making, frames: list[Frame], leave: str, *, streamed: bool
) -> None:
    async with http(endless=True, step_s=STEP_S) as (client, site):
        _, writer = await _asked(client, _body("x" * 1900, stream=streamed))
        await until(lambda: len(frames) >= 3)
        sent = len(frames)
        LEAVING[leave](writer)
        await until(lambda: _idle(site))
        assert len(frames) - sent <= FRAMES_LATE, "14 frames hold the whole prompt"
        writer.close()


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("leave", LEAVING)
async def test_a_lane_is_free_within_a_frame_of_its_client_leaving_in_decode(
    http: Making, frames: list[Frame], leave: str, *, streamed: bool
) -> None:
    async with http(endless=True, step_s=STEP_S) as (client, site):
        _, writer = await _asked(client, _body(stream=streamed))
        await until(lambda: len(frames) >= 6)
        sent = len(frames)
        LEAVING[leave](writer)
        await until(lambda: _idle(site))
        assert len(frames) - sent <= FRAMES_LATE
        writer.close()


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("leave", LEAVING)
async def test_who_leaves_the_queue_never_gets_a_lane(
    http: Making, frames: list[Frame], leave: str, *, streamed: bool
) -> None:
    async with http(endless=True, step_s=STEP_S) as (client, site):
        running = [await _asked(client, _body(f"number {n}")) for n in range(4)]
        await until(lambda: site.driver.status().running_jobs == 4)
        _, writer = await _asked(client, _body("waiting", stream=streamed))
        await until(lambda: site.driver.status().waiting_jobs == 1)
        LEAVING[leave](writer)
        await until(lambda: site.driver.status().waiting_jobs == 0)
        assert site.driver.status().running_jobs == 4
        for _, each in (*running, (None, writer)):
            each.close()
        await until(lambda: _idle(site))


async def test_who_does_not_read_is_given_up_and_its_turn_ends(http: Making) -> None:
    async with http(endless=True, unread_s=0.2) as (client, site):
        client.receive_bytes = 4096
        reader, writer = await _asked(client, _body(logprobs=True, top_logprobs=20))
        writer.transport.pause_reading()
        await until(lambda: site.service.open_turns == 1)
        await until(lambda: site.service.open_turns == 0)
        writer.transport.resume_reading()
        assert not (await _until_cut(reader)).rstrip().endswith(b"[DONE]")
        writer.close()


async def test_a_request_that_never_arrives_is_given_up(http: Making) -> None:
    async with http(request_s=0.2) as (client, _):
        for begun in (b"", b"POST /v1/chat", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"):
            reader, writer = await asyncio.open_connection(client.host, client.port)
            writer.write(begun)
            assert await _until_cut(reader) == b""
            writer.close()


async def _until_cut(reader: asyncio.StreamReader) -> bytes:
    """What came before the connection was given up."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(65536):
            parts.append(part)
    return b"".join(parts)


def _said(raw: bytes) -> str:
    lines = [line for line in raw.decode().splitlines() if line.startswith("data: {")]
    choices = [json.loads(line.removeprefix("data: "))["choices"] for line in lines]
    return "".join(each[0]["delta"].get("content", "") for each in choices if each)


async def _read_slowly(reader: asyncio.StreamReader, rng: random.Random) -> bytes:
    parts = []
    while part := await reader.read(rng.choice((64, 512, 4096))):
        parts.append(part)
        await asyncio.sleep(0.01)
    return b"".join(parts)


async def _leaves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, how: str) -> None:
    rng = random.Random(how)
    await reader.read(rng.choice((1, 400, 2000)))
    LEAVING[how](writer)


async def test_two_hundred_streams_of_all_manners_disturb_nobody(http: Making) -> None:
    tokens = 80
    async with http(endless=True, queue_limit=256) as (client, site):
        want: dict[int, str] = {}
        for n in range(20):
            _, _, raw = await client.ask(
                "POST", "/v1/chat/completions", _body(f"q{n}", max_tokens=tokens)
            )
            want[n] = _said(raw)
        gc.collect()
        before = sys.getallocatedblocks()
        tasks_before = len(asyncio.all_tasks())
        rng = random.Random(5)

        async def one(n: int) -> None:
            manner = ("fast", "slow", "close", "reset", "half-close")[n % 5]
            reader, writer = await _asked(client, _body(f"q{n % 20}", max_tokens=tokens))
            try:
                if manner in LEAVING:
                    await _leaves(reader, writer, manner)
                    return
                assert (await client.head(reader))[0] == 200
                slowly = manner == "slow"
                raw = unchunked(await (_read_slowly(reader, rng) if slowly else reader.read()))
                assert raw.endswith(b"data: [DONE]\n\n")
                assert _said(raw) == want[n % 20]
            finally:
                writer.close()

        async with asyncio.timeout(100):
            await asyncio.gather(*(one(n) for n in range(200)))
        await until(lambda: _idle(site))
        await until(lambda: len(asyncio.all_tasks()) <= tasks_before)
        gc.collect()
        assert sys.getallocatedblocks() - before < BLOCKS_LEFT
