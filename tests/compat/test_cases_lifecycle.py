"""Clients that vanish, fall silent or ask for too much, as others met them: over real sockets, through a proxy.

A vanished client is noticed during prefill, so each of those cases prefills long and asserts that the lane was free
before the prompt's last chunk: else it would pass because the work was done.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.requests import SamplingSpec
from fakering.model import FakeModel
from gateway.chat.byte_tokenizer import END
from gateway.client import Client
from gateway.pb.generation_pb2_grpc import GenerationServiceStub
from gateway.rpc.client_convert import generate_request
from gateway.rpc.interceptors import CallGuard
from gateway.rpc.server import serve_grpc
from gateway.rpc.servicer import GenerationServicer
from gateway.settings import GrpcSettings
from gateway.turns import TextPrompt, TurnDelta, TurnFinished, TurnRequest, TurnStarted

Sites = Callable[..., AbstractAsyncContextManager[Any]]
GREEDY = SamplingSpec(temperature=0.0)
LANGUAGE = FakeModel(258, low=32, high=127, end_token=END)
LANES = 4  # of the served fake ring
LONG = TextPrompt("a long prompt, " * 130)
ROWS = len(LONG.text)
_NO_READ_AHEAD = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))
HELLO = TurnRequest(TextPrompt("hello"), sampling=GREEDY, max_tokens=8)


class Proxy:
    """Hands bytes on between one client and the server, until told how the client leaves."""

    def __init__(self, address: str) -> None:
        self._target = address.rpartition(":")
        self._links: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        finally:
            self._server.close()
            for pump in self._pumps:
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)
            for link in self._links:
                for writer in link:
                    writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        self._links.append((writer, up_writer))
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            self._pumps.append(asyncio.create_task(_pump(source, sink)))

    def leave(self, how: str) -> None:
        """What the server sees of the client: it closes, resets, or only ends its own direction."""
        for pump in self._pumps:
            pump.cancel()
        for _, up in self._links:
            if how == "reset":
                linger = struct.pack("ii", 1, 0)
                up.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                up.transport.abort()
            elif how == "half-close":
                up.write_eof()
            elif how == "close":
                up.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        sink.write(data)
        await sink.drain()


async def _ended(call: Any) -> None:
    """Reads a call to its end, however it ends."""
    try:
        async for _ in call:
            pass
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass


async def answer(client: Client, turn: TurnRequest) -> list[Any]:
    async with client.generate(turn) as stream:
        return [event async for event in stream]


async def _until(it: Any, done: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not done():
            await it.client.rings()  # a call of its own: it shows that others are served meanwhile


async def _idle(it: Any) -> None:
    """Until no job runs or waits."""
    status = it.driver.status
    await _until(it, lambda: not status().running_jobs and not status().waiting_jobs)


LEAVING = ["close", "reset", "half-close"]


@pytest.mark.parametrize("how", LEAVING)
async def test_a_client_that_leaves_in_prefill_frees_its_lane_within_a_chunk(
    site: Sites, how: str
) -> None:
    """Neroued/ninfer#111: a half-closed client holds the only slot during prefill."""
    async with site(endless=True, step_s=0.05) as it:
        proxy = Proxy(it.address)
        async with proxy.open() as address, grpc.aio.insecure_channel(address) as channel:
            turn = TurnRequest(LONG, sampling=GREEDY, max_tokens=500)
            call = GenerationServiceStub(channel).Generate(generate_request(turn))
            started = await call.read()
            assert started.HasField("started")
            assert it.driver.status().running_jobs == 1
            proxy.leave(how)
            await _idle(it)
            counts = it.driver.status().counts
            assert counts.rows < ROWS / 2, "the lane was freed, but only when the work was done"
            call.cancel()
        await answer(it.client, HELLO)


async def test_a_peer_that_vanished_without_a_word_is_given_up(site: Sites) -> None:
    """Neroued/ninfer#111, the silent peer: a pulled cable sends neither FIN nor RST."""
    async with site(endless=True, step_s=0.15, keepalive_s=0.4) as it:
        proxy = Proxy(it.address)
        async with proxy.open() as address, grpc.aio.insecure_channel(address) as channel:
            turn = TurnRequest(LONG, sampling=GREEDY, max_tokens=500)
            call = GenerationServiceStub(channel).Generate(generate_request(turn))
            assert (await call.read()).HasField("started")
            proxy.leave("silently")
            await _idle(it)
            assert it.driver.status().counts.rows < ROWS
            call.cancel()
        await answer(it.client, HELLO)


async def test_a_client_that_pings_through_a_silent_prefill_is_not_thrown_out(site: Sites) -> None:
    """antirez/ds4#151: nothing is sent for long, and the connection must live."""
    async with site(endless=True, step_s=0.15, keepalive_s=0.6) as it:
        pings = (
            ("grpc.keepalive_time_ms", 250),
            ("grpc.keepalive_timeout_ms", 2000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        )
        async with grpc.aio.insecure_channel(it.address, options=pings) as channel:
            turn = TurnRequest(LONG, sampling=GREEDY, max_tokens=2)
            call = GenerationServiceStub(channel).Generate(generate_request(turn))
            events = [event async for event in call]
            assert events[-1].HasField("finished")
            assert events[-1].finished.timings.prefill_s > 1.0


@pytest.mark.parametrize("how", LEAVING)
async def test_clients_that_wait_for_the_whole_answer_and_leave_are_noticed(
    site: Sites, how: str
) -> None:
    """Avarok-Cybersecurity/atlas#368, ROCm/ATOM#1562 and #1589: a non-streaming client leaves, its slot stays."""
    async with site(endless=True, step_s=0.01) as it:
        proxy = Proxy(it.address)
        async with proxy.open() as address, grpc.aio.insecure_channel(address) as channel:
            stub = GenerationServiceStub(channel)
            turns = [
                TurnRequest(TextPrompt(f"{n} long"), sampling=GREEDY) for n in range(2 * LANES)
            ]
            calls = [stub.Generate(generate_request(turn)) for turn in turns]
            status = it.driver.status
            await _until(it, lambda: status().busy_lanes == LANES and status().waiting_jobs > 0)
            proxy.leave(how)
            async with asyncio.timeout(2):
                assert isinstance((await answer(it.client, HELLO))[-1], TurnFinished)
            await _idle(it)
            assert status().busy_lanes == 0
            for call in calls:
                call.cancel()
                await _ended(call)


async def test_a_turn_is_heard_at_once_and_starts_within_a_chunk(site: Sites) -> None:
    """antirez/ds4#151, #224 and #1006: no bytes for minutes in prefill, so the client times out and retries."""
    async with site(endless=True, step_s=0.03) as it:
        turn = TurnRequest(LONG, sampling=GREEDY, max_tokens=1)
        call = it.stub.Generate(generate_request(turn))
        await call.initial_metadata()
        assert it.driver.status().counts.frames == 0, "the headers waited for work"
        started = await call.read()
        assert started.HasField("started")
        # Chunks go on while a message travels; a start that waits for the prefill comes behind all of them.
        assert it.driver.status().counts.rows < ROWS / 2
        call.cancel()
        await _idle(it)


async def test_a_turn_that_waits_for_a_lane_is_heard_too(site: Sites) -> None:
    """1jehuang/jcode#976: silence while the server is busy looks like a dead server."""
    async with site(endless=True, step_s=0.01) as it:
        turns = [TurnRequest(TextPrompt(f"{n}"), sampling=GREEDY) for n in range(LANES + 1)]
        calls = [it.stub.Generate(generate_request(turn)) for turn in turns]
        async with asyncio.timeout(2):
            for call in calls:
                await call.initial_metadata()
        await _until(it, lambda: it.driver.status().waiting_jobs == 1)
        for call in calls:
            call.cancel()
            await _ended(call)


async def test_a_retry_goes_on_from_the_half_prefilled_prompt(site: Sites) -> None:
    """antirez/ds4#1006: the retry of a prompt that was cut off in prefill begins from nothing."""
    async with site(endless=True, step_s=0.02) as it:
        turn = TurnRequest(LONG, sampling=GREEDY, max_tokens=4)
        async with it.client.generate(turn) as stream:
            assert isinstance(await anext(stream), TurnStarted)
        await _idle(it)
        rows = it.driver.status().counts.rows
        assert 0 < rows < ROWS
        started, *deltas, _ = await answer(it.client, turn)
        assert isinstance(started, TurnStarted)
        assert started.cached_prefix >= rows
        ids = tuple(i for event in deltas for i in event.token_ids)
        endless = FakeModel(258, low=32, high=127)
        assert ids == endless.oracle(tuple(LONG.text.encode()), 4)


async def test_withheld_text_is_no_silence(site: Sites) -> None:
    """antirez/ds4#224: nothing is sent while the answer may still turn out to be a stop string."""
    async with site(endless=True, step_s=0.005) as it:
        plain = TurnRequest(TextPrompt("hello"), sampling=GREEDY, max_tokens=40, draft=False)
        events = [e for e in await answer(it.client, plain) if isinstance(e, TurnDelta)]
        text = "".join(event.text for event in events)
        nearly = TurnRequest(
            plain.prompt, sampling=GREEDY, max_tokens=40, draft=False, stop=(text[:30] + "\x01",)
        )
        held = [e for e in await answer(it.client, nearly) if isinstance(e, TurnDelta)]
    assert "".join(event.text for event in held) == text
    silent = [event for event in held if event.token_ids and not event.text]
    assert len(silent) >= 10


def _status(call_error: grpc.aio.AioRpcError) -> tuple[str, bool]:
    return call_error.code().name, bool(call_error.details())


@pytest.mark.parametrize(
    ("megabytes", "status"),
    [(5, "INVALID_ARGUMENT"), (20, "RESOURCE_EXHAUSTED"), (60, "RESOURCE_EXHAUSTED")],
)
async def test_a_message_that_is_too_large_is_refused_before_any_work(
    site: Sites, megabytes: int, status: str
) -> None:
    """grpc/grpc#23388, grpc/grpc.io#1254: a 4 MiB limit on one side only. The same limit holds at both ends here."""
    async with site() as it:
        turn = TurnRequest(TextPrompt("x" * (megabytes * 10**6)))
        for stub in (it.stub, it.client._stub):  # a client without a limit of its own, and ours
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(generate_request(turn)).read()
            assert _status(refused.value) == (status, True)
        status_now = it.driver.status()
        assert (status_now.counts.frames, status_now.waiting_jobs) == (0, 0)
        assert await answer(it.client, HELLO)


async def test_a_stream_cancelled_in_mid_decode_leaves_no_task_and_no_thread(site: Sites) -> None:
    """grpc/grpc#22874: yielding after the client has cancelled blocks for ever."""
    async with site(endless=True) as it:
        await answer(it.client, HELLO)

        async def cancelled(number: int) -> None:
            turn = TurnRequest(TextPrompt(f"{number % 4} x"), sampling=GREEDY)
            call = it.stub.Generate(generate_request(turn))
            for _ in range(2 + number % 3):
                await call.read()
            call.cancel()

        await asyncio.gather(*(cancelled(n) for n in range(4)))
        await _idle(it)
        await it.client.rings()
        tasks, threads = len(asyncio.all_tasks()), threading.active_count()
        for block in range(50):
            await asyncio.gather(*(cancelled(4 * block + n) for n in range(4)))
        await _idle(it)
        await _until(it, lambda: len(asyncio.all_tasks()) <= tasks)
        # The loop's own executor fills up with use; it is bounded.
        assert threading.active_count() <= threads + (os.cpu_count() or 1) + 4
        assert it.driver.status().busy_lanes == 0


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_2000_cancelled_streams_cost_no_memory(site: Sites) -> None:
    """grpc/grpc#43360: aio leaks native memory for each cancelled stream whose handler swallows the cancellation."""
    async with site(endless=True, step_s=0.001) as it:

        async def cancelled() -> None:
            call = it.stub.Generate(generate_request(TurnRequest(TextPrompt("x"))))
            await call.read()
            call.cancel()

        async def cancel_many(count: int) -> int:
            for _ in range(count // 10):
                await asyncio.gather(*(cancelled() for _ in range(10)))
            await _idle(it)
            gc.collect()
            return _resident_bytes()

        warmed = await cancel_many(400)
        halfway = await cancel_many(800)
        end = await cancel_many(800)
    # What a stream holds is some 10 KiB; allocators round up once, so the second half tells.
    assert min(end - halfway, (end - warmed) // 2) / 800 < 1024


async def test_a_handler_and_its_guard_let_a_cancellation_out(
    site: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """grpc/grpc#43360: the call's memory is lost when a handler swallows CancelledError."""
    left: list[type[BaseException]] = []

    def watched(behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def watching(*args: Any) -> Any:
            try:
                return await behaviour(*args)
            except BaseException as error:
                left.append(type(error))
                raise

        return watching

    generate, intercept = GenerationServicer.Generate, CallGuard.intercept_service

    async def intercept_watched(*args: Any) -> Any:
        handler = await intercept(*args)
        if not handler.response_streaming:
            return handler
        return grpc.unary_stream_rpc_method_handler(
            watched(handler.unary_stream), None, handler.response_serializer
        )

    monkeypatch.setattr(GenerationServicer, "Generate", watched(generate))
    monkeypatch.setattr(CallGuard, "intercept_service", intercept_watched)
    async with site(endless=True, step_s=0.001) as it:
        for reads in range(4):
            async with it.client.generate(TurnRequest(TextPrompt("x"))) as stream:
                for _ in range(reads + 1):
                    await anext(stream)
            await _idle(it)
        await _until(it, lambda: len(left) == 8)
    assert set(left) == {asyncio.CancelledError}


async def test_a_reader_that_lags_never_gets_a_message_beyond_the_limit(site: Sites) -> None:
    """grpc/grpc#23388 in the other direction: what merged while a reader lagged must still fit in a message."""
    limit = 32 * 1024
    sampling = SamplingSpec(temperature=0.0, logprobs=20)
    turn = TurnRequest(TextPrompt("x"), sampling=sampling, max_tokens=1500, draft=False)
    async with (
        site(endless=True) as it,
        serve_grpc(it.service, GrpcSettings(max_message_bytes=limit)) as address,
        grpc.aio.insecure_channel(address, options=_NO_READ_AHEAD) as channel,
    ):
        call = GenerationServiceStub(channel).Generate(generate_request(turn))
        await call.read()
        it.driver.drain()  # else the turn would rest while its reader lags
        await _idle(it)  # the answer is complete before the reader goes on
        got = 0
        while (message := await call.read()) is not grpc.aio.EOF:
            got += len(message.delta.token_ids)
        assert got == 1500
