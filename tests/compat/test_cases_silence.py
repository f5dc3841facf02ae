"""Clients that fall silent during a long prefill, and clients that bear the server's own silence.

A proxy stands between client and server: it ends the client's side in each way a socket can, and reads the HTTP/2
frames that pass. What the ring wrote for a prompt is taken from the frames sent into it, not from what the server says.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import pytest

from coordinator.frames import Frame, SegmentKind
from coordinator.requests import SamplingSpec, SessionId
from fakering.model import FakeModel
from fakering.ring import FakeRing
from gateway.pb.generation_pb2_grpc import GenerationServiceStub
from gateway.rpc.client_convert import generate_request
from gateway.turns import TextPrompt, TurnRequest

Sites = Callable[..., AbstractAsyncContextManager[Any]]
GREEDY = SamplingSpec(temperature=0.0)
ENDLESS = FakeModel(258, low=32, high=127)  # what an endless site speaks
LANES = 4  # of the served fake ring
STAGES = 2
LONG = TextPrompt("a long prompt, " * 130)
IDS = tuple(LONG.text.encode())
COUNT = 4
TALK = SessionId("talk")
# What the peer's end looks like to the server: at once, or only when a ping stays unanswered.
TOLD = ["close", "reset", "SHUT_WR"]
UNTOLD = ["SHUT_RD", "silence"]
DATA, PING, GOAWAY, ACK = 0, 6, 7, 1


class Http2Frames:
    """The (type, flags) of each HTTP/2 frame of one direction, however the bytes are cut."""

    def __init__(self, preface: int) -> None:
        self.seen: list[tuple[int, int]] = []
        self._skip = preface
        self._bytes = b""

    def feed(self, data: bytes) -> None:
        self._bytes += data
        while len(self._bytes) >= self._skip + 9:
            header = self._bytes[self._skip : self._skip + 9]
            self.seen.append((header[3], header[4]))
            self._bytes = self._bytes[self._skip :]
            self._skip = 9 + int.from_bytes(header[:3])

    def count(self, kind: int, flags: int) -> int:
        return self.seen.count((kind, flags))


class Proxy:
    """Hands bytes on between one client and the server, until told how the client ends."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: list[asyncio.Task[None]] = []
        self.connections = 0
        self.sent = Http2Frames(preface=24)  # by the client
        self.received = Http2Frames(preface=0)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for pump in self._pumps:
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)
            for writer in self._writers:
                writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up = await asyncio.open_connection(self._host, int(self._port))
        self.connections += 1
        self._writers += (writer, up)
        self._pumps += (
            asyncio.create_task(_pump(reader, up, self.sent)),
            asyncio.create_task(_pump(up_reader, writer, self.received)),
        )

    def end(self, how: str) -> None:
        """What the server sees of the client's socket. The connection must be the first one."""
        up = self._writers[1]
        for pump in self._pumps:
            pump.cancel()
        match how:
            case "close":
                up.close()
            case "reset":
                linger = struct.pack("ii", 1, 0)
                up.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                up.transport.abort()
            case "SHUT_WR":
                up.get_extra_info("socket").shutdown(socket.SHUT_WR)
            case "SHUT_RD":
                up.get_extra_info("socket").shutdown(socket.SHUT_RD)
            case "silence":
                pass  # the socket stays open, as behind a pulled cable


async def _pump(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, frames: Http2Frames
) -> None:
    while data := await source.read(1 << 16):
        frames.feed(data)
        sink.write(data)
        await sink.drain()


class Sent:
    """The frames that went into fake rings."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def chunks(self) -> list[tuple[int, int]]:
        """The (start, end) of each prefill segment of LONG, in the order of sending."""
        return list(self._chunks())

    def _chunks(self) -> Iterator[tuple[int, int]]:
        for frame in self.frames:
            for segment in frame.segments:
                is_ours = segment.tokens == IDS[segment.start : segment.end]
                if segment.kind is SegmentKind.PREFILL and is_ours:
                    yield segment.start, segment.end

    def written(self) -> int:
        return self.chunks()[-1][1]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    log, submit = Sent(), FakeRing.submit

    def recorded(ring: FakeRing, frame: Frame) -> None:
        log.frames.append(frame)
        submit(ring, frame)

    monkeypatch.setattr(FakeRing, "submit", recorded)
    return log


def turn(prompt: TextPrompt = LONG, count: int = COUNT, **more: Any) -> Any:
    return generate_request(TurnRequest(prompt, sampling=GREEDY, max_tokens=count, **more))


async def _started(call: Any) -> Any:
    message = await call.read()
    assert message.HasField("started")
    return message.started


async def _tokens(call: Any) -> tuple[int, ...]:
    """The rest of a call that has started; it must end well."""
    tokens: list[int] = []
    while not (message := await call.read()).HasField("finished"):
        tokens += message.delta.token_ids
    return tuple(tokens)


async def _until(it: Any, done: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not done():
            await it.client.rings()


async def _idle(it: Any) -> None:
    status = it.driver.status
    await _until(it, lambda: not status().running_jobs and not status().waiting_jobs)


class Neighbour:
    """An endless stream on a connection of its own."""

    def __init__(self, stub: Any, text: str) -> None:
        self._prompt = TextPrompt(text)
        self.call = stub.Generate(turn(self._prompt, 500))
        self.tokens: list[int] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        await _started(self.call)
        while True:
            self.tokens += (await self.call.read()).delta.token_ids

    async def leave(self) -> None:
        assert not self._reading.done(), "the stream was broken off"
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self.call.cancel()
        ids = tuple(self._prompt.text.encode())
        assert tuple(self.tokens) == ENDLESS.oracle(ids, len(self.tokens))


@asynccontextmanager
async def _neighbours(it: Any) -> AsyncIterator[list[Neighbour]]:
    """Streams in all lanes but one; on leaving, each must have gone on, with the right tokens."""
    streams = [Neighbour(it.stub, f"{n} beside") for n in range(LANES - 1)]
    await _until(it, lambda: all(stream.tokens for stream in streams))
    epoch = it.driver.status().epoch
    yield streams
    before = [len(stream.tokens) for stream in streams]
    await _until(it, lambda: all(len(s.tokens) > n for s, n in zip(streams, before, strict=True)))
    for stream in streams:
        await stream.leave()
    status = it.driver.status()
    assert (status.epoch, status.counts.refusals) == (epoch, 0)


async def _next_in_line(it: Any, how: str, sent: Sent) -> tuple[float, int]:
    """Ends the client that prefills in the last free lane, while another client waits for one.

    Returns the seconds until the waiting turn had that lane, and the chunks sent for nobody meanwhile.
    """
    proxy, clock = Proxy(it.address), asyncio.get_running_loop().time
    async with proxy.open() as address, grpc.aio.insecure_channel(address) as channel:
        call = GenerationServiceStub(channel).Generate(turn())
        lane = (await _started(call)).lane
        waiting = it.stub.Generate(turn(TextPrompt("next"), 1))
        await _until(it, lambda: it.driver.status().waiting_jobs == 1)
        ended, chunks = clock(), len(sent.chunks())
        proxy.end(how)
        async with asyncio.timeout(5):
            assert (await _started(waiting)).lane == lane
        freed = clock() - ended
        assert sent.written() < len(IDS), "the lane was freed, but only when the work was done"
        await _tokens(waiting)
        call.cancel()
    return freed, len(sent.chunks()) - chunks


@pytest.mark.parametrize("how", TOLD)
async def test_a_client_that_ends_in_prefill_hands_its_lane_on_within_a_chunk(
    site: Sites, sent: Sent, how: str
) -> None:
    """Neroued/ninfer#111: a client that is gone holds the only slot until its prefill is done."""
    step_s = 0.06
    async with site(endless=True, step_s=step_s) as it, _neighbours(it):
        freed, chunks = await _next_in_line(it, how, sent)
    # One is sent as the client ends; another may be by the time the server has heard of it.
    assert chunks <= 2
    assert freed < (STAGES + 1) * step_s + 0.3


@pytest.mark.parametrize("how", UNTOLD)
async def test_a_peer_that_no_longer_answers_hands_its_lane_on_within_the_keepalive_time(
    site: Sites, sent: Sent, how: str
) -> None:
    """Neroued/ninfer#111: a client that reads no more, or that a pulled cable cut off, sends nothing at all."""
    step_s, keepalive_s = 0.06, 0.3
    async with site(endless=True, step_s=step_s, keepalive_s=keepalive_s) as it:
        async with _neighbours(it) as streams:
            before = [len(stream.tokens) for stream in streams]
            freed, _ = await _next_in_line(it, how, sent)
            assert all(len(s.tokens) > n for s, n in zip(streams, before, strict=True))
    assert freed < 2 * keepalive_s + (STAGES + 1) * step_s + 0.5


async def test_a_client_that_pings_every_second_is_not_thrown_out_by_the_default_settings(
    site: Sites,
) -> None:
    """antirez/ds4#151: nothing is sent for long; a client that pings meanwhile gets "too many pings"."""
    pings = (
        ("grpc.keepalive_time_ms", 300),  # gRPC stretches it to a second when there is no data
        ("grpc.keepalive_timeout_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    async with site(endless=True, step_s=0.29) as it:
        proxy = Proxy(it.address)
        async with (
            proxy.open() as address,
            grpc.aio.insecure_channel(address, options=pings) as channel,
        ):
            call = GenerationServiceStub(channel).Generate(turn(count=1))
            await _started(call)
            said, pinged = proxy.received.count(DATA, 0), proxy.sent.count(PING, 0)
            # By its own rules a server forgives two.
            await _until(it, lambda: proxy.received.count(PING, ACK) >= pinged + 4)
            assert proxy.received.count(DATA, 0) == said, "the server was not silent"
            assert await _tokens(call) == ENDLESS.oracle(IDS, 1)
        assert proxy.connections == 1
        assert proxy.received.count(GOAWAY, 0) == 0


async def test_a_client_that_waits_in_silence_is_pinged_and_kept(site: Sites) -> None:
    """antirez/ds4#224: what finds a vanished peer must not take a patient one for it."""
    async with site(endless=True, step_s=0.06, keepalive_s=0.2) as it:
        proxy = Proxy(it.address)
        async with proxy.open() as address, grpc.aio.insecure_channel(address) as channel:
            call = GenerationServiceStub(channel).Generate(turn(count=1))
            await _started(call)
            said, pinged = proxy.received.count(DATA, 0), proxy.received.count(PING, 0)
            await _until(it, lambda: proxy.received.count(PING, 0) >= pinged + 2)
            assert proxy.received.count(DATA, 0) == said, "the server was not silent"
            assert await _tokens(call) == ENDLESS.oracle(IDS, 1)
        assert proxy.connections == 1
        assert proxy.sent.count(PING, ACK) >= 2


async def test_a_retry_after_a_cancel_in_mid_prefill_computes_no_row_again(
    site: Sites, sent: Sent
) -> None:
    """antirez/ds4#1006: the retry of a prompt that was cut off in prefill begins from nothing."""
    async with site(endless=True, step_s=0.02) as it:
        call = it.stub.Generate(turn(session=TALK))
        await _started(call)
        await _until(it, lambda: it.driver.status().counts.rows > 0)
        call.cancel()
        await _idle(it)
        written = sent.written()
        assert 0 < written < len(IDS)
        retry = it.stub.Generate(turn(session=TALK))
        assert (await _started(retry)).cached_prefix == written
        tokens = await _tokens(retry)
        _assert_tiled(sent.chunks())
        cold = it.stub.Generate(turn(reuse=False))
        assert (await _started(cold)).cached_prefix == 0
        assert tokens == await _tokens(cold) == ENDLESS.oracle(IDS, COUNT)


def _assert_tiled(chunks: list[tuple[int, int]]) -> None:
    """Each row of LONG was prefilled once; the last one, from which the first token comes, perhaps again."""
    last = (len(IDS) - 1, len(IDS))
    chunks = [chunk for chunk in chunks if chunk != last]
    assert [start for start, _ in chunks] == [0, *(end for _, end in chunks[:-1])]
    assert chunks[-1][1] == len(IDS)


async def test_a_client_whose_patience_is_short_gets_there_by_retrying(
    site: Sites, sent: Sent
) -> None:
    """antirez/ds4#1006, 1jehuang/jcode#976: a client times out in prefill and retries, for ever."""
    async with site(endless=True, step_s=0.04) as it:
        tries = 0
        async with asyncio.timeout(8):
            while (tokens := await _within(it, 0.25)) is None:
                tries += 1
                await _idle(it)
        assert tries > 0, "the prefill was too short to time out"
        assert tokens == ENDLESS.oracle(IDS, 1)
        _assert_tiled(sent.chunks())


async def _within(it: Any, timeout_s: float) -> tuple[int, ...] | None:
    """The answer's first token, or None if the deadline came first."""
    call = it.stub.Generate(turn(count=1), timeout=timeout_s)
    try:
        await _started(call)
        return await _tokens(call)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        return None


async def test_a_retry_does_not_wait_until_the_lost_connection_is_given_up(
    site: Sites, sent: Sent
) -> None:
    """antirez/ds4#1006: the client has gone over to a new connection, and its old call is still prefilled."""
    async with site(endless=True, step_s=0.03, keepalive_s=0.4) as it:
        proxy = Proxy(it.address)
        async with proxy.open() as address, grpc.aio.insecure_channel(address) as channel:
            lost = GenerationServiceStub(channel).Generate(turn(session=TALK))
            lane = (await _started(lost)).lane
            await _until(it, lambda: it.driver.status().counts.rows > 0)
            proxy.end("silence")
            written = sent.written()
            retry = it.stub.Generate(turn(session=TALK))
            started = await _started(retry)
            assert started.lane != lane, "the lost call had ended: this shows nothing"
            assert started.cached_prefix >= written
            assert await _tokens(retry) == ENDLESS.oracle(IDS, COUNT)
            await _idle(it)
            lost.cancel()
