"""More than a ring can do, over real sockets: everybody is served or told when to come back, and no reader holds up
others.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest

from coordinator.requests import SamplingSpec
from gateway.client import error_info
from gateway.rpc.servicer import SERVICE_NAME
from gateway.turns import TextPrompt, TurnDelta, TurnRequest
from tests.compat.guarded import guarded
from tests.compat.http_client import until
from tests.compat.overloaded import (
    GREEDY,
    Place,
    asking,
    by_chat,
    by_grpc,
    by_message,
    crowded_place,
)

WIRES = (by_chat, by_message, by_grpc)
BUSY = ("429 queue_full", "529 overloaded_error", "RESOURCE_EXHAUSTED QUEUE_FULL")
# Twenty alternatives a token: an answer that lies unread fills the sockets' buffers soon.
WORDY = SamplingSpec(temperature=0.0, logprobs=20)
WORDS: dict[str, Any] = {"temperature": 0, "logprobs": True, "top_logprobs": 20}
LONG = TurnRequest(TextPrompt("long"), sampling=WORDY)


async def test_two_hundred_clients_of_two_lanes_are_served_or_told_when_to_come_back() -> None:
    """On three wires at once, and nobody is told anything else. How good the times are that they are told is seen in
    virtual time: tests/simulation/test_overload.py.
    """
    served: list[str] = []
    told: list[float] = []

    async def client(place: Place, number: int) -> None:
        wire = WIRES[number % len(WIRES)]
        while (answer := await wire(place, f"number {number} " * 4, 6)).text is None:
            assert answer.status in BUSY, answer
            assert answer.retry_after_s is not None
            assert 1.0 <= answer.retry_after_s <= 60.0
            told.append(answer.retry_after_s)
            await asyncio.sleep(answer.retry_after_s)
        served.append(answer.text)

    async with crowded_place(step_s=0.001, queue_limit=32) as place:
        for wire in WIRES:
            await wire(place, "the first turns tell what turns take", 6)
        await asyncio.gather(*(client(place, number) for number in range(200)))
        assert place.is_idle
        shed = place.figure('requests_shed_total{reason="jobs"}')
    assert [len(text) for text in served] == [6] * 200
    assert len(told) == shed > 50


async def others_go_on(place: Place) -> None:
    """Beside whoever does not read: same answers, and in no more time than they need."""
    for wire in WIRES:
        async with asyncio.timeout(20):
            answer = await wire(place, "others", 40)
        assert answer.text is not None
        assert len(answer.text) == 40


async def test_a_grpc_client_that_reads_nothing_loses_its_turn_and_nobody_else_notices() -> None:
    async with crowded_place(unread_tokens=32, unread_s=1.5) as place:
        async with place.client.generate(LONG) as stream:
            await anext(stream)
            await until(lambda: place.driver.status().resting_jobs == 1)
            await others_go_on(place)
            assert place.figure("num_requests_paused") == 1
            await until(lambda: place.driver.status().counts.slow_readers == 1)
            await until(lambda: place.is_idle)
            assert place.driver.status().busy_lanes == 0
            # What was sent before comes first; then it is told why there is no more.
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                async with asyncio.timeout(20):
                    [event async for event in stream]
        info = error_info(ended.value)
        assert info is not None
        assert (ended.value.code().name, info.reason) == ("ABORTED", "SLOW_READER")
        assert place.figure("slow_readers_total") == 1
        assert place.figure('request_errors_total{code="slow_reader"}') == 1


async def test_a_grpc_client_that_pauses_gets_every_token() -> None:
    turn = TurnRequest(TextPrompt("pause"), sampling=WORDY, max_tokens=2500)
    async with crowded_place(unread_tokens=32, unread_s=60.0) as place:
        async with place.client.generate(turn) as stream:
            await anext(stream)
            await until(lambda: place.driver.status().resting_jobs == 1)
            got = [event async for event in stream if isinstance(event, TurnDelta)]
        tokens = tuple(token for event in got for token in event.token_ids)
        again = TurnRequest(TextPrompt("pause"), sampling=GREEDY, max_tokens=2500)
        async with place.client.generate(again) as stream:
            right = [event async for event in stream if isinstance(event, TurnDelta)]
        assert tokens == tuple(token for event in right for token in event.token_ids)
        assert place.driver.status().counts.pauses >= 1
        assert place.driver.status().counts.slow_readers == 0


async def test_an_http_client_that_reads_nothing_loses_its_turn_and_nobody_else_notices() -> None:
    async with crowded_place(unread_tokens=32, unread_s=1.5) as place:
        place.http.receive_bytes = 4096
        body = {"messages": [{"role": "user", "content": "long"}], "stream": True, **WORDS}
        _, writer = await place.http.opened("POST", "/v1/chat/completions", body)
        writer.transport.pause_reading()
        await until(lambda: place.driver.status().resting_jobs == 1)
        place.http.receive_bytes = None
        await others_go_on(place)
        await until(lambda: place.driver.status().counts.slow_readers == 1)
        assert place.driver.status().busy_lanes == 0
        await until(lambda: place.is_idle)
        writer.transport.abort()


async def test_more_choices_than_can_ever_run_and_wait_are_refused_for_good() -> None:
    """A retry would find no more room. As many as there is room for are served."""
    async with crowded_place(queue_limit=3) as place:
        body = {**asking("choices", 5), "n": 6}
        status, headers, told = await place.http.post("/v1/chat/completions", body)
        assert (status, told["error"]["param"]) == (400, "n")
        assert headers["x-should-retry"] == "false"
        status, _, told = await place.http.post("/v1/chat/completions", {**body, "n": 5})
        assert (status, len(told["choices"])) == (200, 5)


async def test_a_strangers_grpc_message_is_never_read() -> None:
    """He is answered before it has come: what he sends of it is no byte of our memory."""
    async with guarded() as it, it.channel() as channel:
        call = channel.stream_stream(f"/{SERVICE_NAME}/Generate")()
        async with asyncio.timeout(20):
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_bytes_of_requests_are_bounded_and_small_ones_always_find_room() -> None:
    """A turn's bytes are counted until its answer has ended."""
    size = 300_000
    endless = asking("endless", 8000, size)
    async with crowded_place(step_s=0.01, request_bytes=700_000) as place:
        opened = [
            await place.http.opened("POST", "/v1/chat/completions", endless) for _ in range(2)
        ]
        await until(lambda: place.driver.status().running_jobs == 2)
        for wire, status in zip(WIRES, BUSY, strict=True):
            answer = await wire(place, "big", 1, size)
            assert answer.status == status
            assert answer.retry_after_s is not None
        assert place.figure('requests_shed_total{reason="bytes"}') == 3
        small = [asyncio.create_task(wire(place, "small", 1)) for wire in WIRES]
        await until(lambda: place.driver.status().waiting_jobs == 3)
        opened[0][1].transport.abort()
        assert all([(await each).text for each in small])
        for wire in WIRES:
            assert (await wire(place, "big", 1, size)).text
        opened[1][1].transport.abort()
        await until(lambda: place.service.intake.bytes == 0)


async def test_a_body_that_is_one_too_many_is_read_to_its_end_and_not_kept() -> None:
    """Else its client, which is still sending, finds its connection closed and no answer."""
    async with crowded_place(request_bytes=1_000_000) as place:
        reader, writer = await asyncio.open_connection(place.http.host, place.http.port)
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n\r\n"
        writer.write(head.encode() + b"x" * 3_000_000)
        await writer.drain()
        await until(lambda: place.figure('requests_shed_total{reason="bytes"}') == 1)
        assert place.service.intake.bytes == 0
        writer.write(b"x" * 2_000_000)
        async with asyncio.timeout(20):
            status, headers = await place.http.head(reader)
            told = json.loads(await reader.readexactly(int(headers["content-length"])))
        assert (status, headers["retry-after"].isdecimal()) == (429, True)
        assert told["error"]["code"] == "queue_full"
        writer.close()
