"""The life of a gRPC server and its calls: loading, full, cancelled, late, broken, draining."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coordinator.errors import CannotListen
from coordinator.requests import SamplingSpec, SessionId
from gateway.client import error_info
from gateway.pb import generation_pb2 as pb
from gateway.pb.generation_pb2_grpc import GenerationServiceStub
from gateway.rpc.client_convert import generate_request
from gateway.rpc.server import serve_grpc
from gateway.rpc.servicer import SERVICE_NAME
from gateway.settings import GrpcSettings
from gateway.turns import TextPrompt, TurnRequest

Sites = Callable[..., AbstractAsyncContextManager[Any]]
GREEDY = SamplingSpec(temperature=0.0)
HELLO = TurnRequest(TextPrompt("hello"), sampling=GREEDY, max_tokens=8)


async def test_a_full_queue_says_when_to_come_back(site: Sites) -> None:
    async with site(endless=True, step_s=0.005, queue_limit=1) as it:
        turn = TurnRequest(TextPrompt("x"), sampling=GREEDY)
        calls = [it.stub.Generate(generate_request(turn)) for _ in range(8)]
        running = {asyncio.create_task(_drained(call)) for call in calls}
        ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for call in calls:
            call.cancel()
        await asyncio.wait(running)
        refused = ended.pop().exception()
        assert isinstance(refused, grpc.aio.AioRpcError)
        info = error_info(refused)
        assert info is not None
        assert (refused.code().name, info.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert info.retry_after_s is not None
        assert info.retry_after_s > 0


async def _drained(call: Any) -> None:
    if not hasattr(call, "read"):
        await call
        return
    async for _ in call:
        pass


async def test_a_ring_that_loads_is_unavailable_and_not_serving(site: Sites) -> None:
    async with site(start=False) as it:
        assert await _health(it) == "NOT_SERVING"
        for call in (
            it.stub.Generate(generate_request(HELLO)),
            it.stub.GetModel(pb.GetModelRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await _drained(call)
            info = error_info(refused.value)
            assert info is not None
            assert (refused.value.code().name, info.reason) == ("UNAVAILABLE", "RING_UNAVAILABLE")
        await it.driver.start(lambda _: None)
        assert await _health(it) == "SERVING"
        await _drained(it.stub.Generate(generate_request(HELLO)))


async def _health(it: Any, service: str = SERVICE_NAME) -> str:
    stub = health_pb2_grpc.HealthStub(it.channel)
    got = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(got.status)


async def test_health_knows_the_server_and_the_service_and_no_other(site: Sites) -> None:
    async with site() as it:
        assert await _health(it, "") == await _health(it) == "SERVING"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _health(it, "other.Service")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_is_told_of_the_end_and_does_not_hold_it_up(site: Sites) -> None:
    async with asyncio.timeout(20):
        async with site(drain_s=60.0) as it:
            channel = grpc.aio.insecure_channel(it.address)
            request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
            call = health_pb2_grpc.HealthStub(channel).Watch(request)
            first = await call.read()
        rest = await _rest(call)
        await channel.close()
    state = health_pb2.HealthCheckResponse
    assert [m.status for m in (first, *rest)] == [state.SERVING, state.NOT_SERVING]


async def _rest(call: Any) -> list[Any]:
    """What a call still brings; gRPC lets nobody mix read() and iteration."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def test_reflection_lists_our_service(site: Sites) -> None:
    async with site() as it:
        stub = reflection_pb2_grpc.ServerReflectionStub(it.channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        call.cancel()
        assert SERVICE_NAME in [s.name for s in answer.list_services_response.service]


async def test_leaving_a_stream_frees_the_lane(site: Sites) -> None:
    async with site(endless=True, step_s=0.001) as it:
        async with it.client.generate(TurnRequest(TextPrompt("x"))) as stream:
            await anext(stream)
            assert it.driver.status().running_jobs == 1
        await _quiet(it)


async def _quiet(it: Any) -> None:
    """Until no job runs or waits: a cancellation takes effect at the next frame."""
    async with asyncio.timeout(5):
        while any(ring.running_jobs or ring.waiting_jobs for ring in await it.client.rings()):
            pass


async def test_200_cancelled_streams_leave_tasks_lanes_and_queue_as_they_were(site: Sites) -> None:
    async with site(endless=True, step_s=0.001) as it:
        await _drained(it.stub.Generate(generate_request(HELLO)))
        await it.client.rings()
        tasks, before = len(asyncio.all_tasks()), it.driver.status()

        async def leave(reads: int) -> None:
            turn = TurnRequest(TextPrompt(f"prompt {reads}" * 9), session=SessionId("s"))
            async with it.client.generate(turn) as stream:
                for _ in range(reads):
                    await anext(stream)

        for _ in range(10):
            # Four get a lane; the others leave the queue. Some leave before anything came.
            await asyncio.gather(*(leave(n % 4) for n in range(20)))
        await _quiet(it)
        after = it.driver.status()
        assert (after.busy_lanes, after.waiting_jobs) == (before.busy_lanes, before.waiting_jobs)
        async with asyncio.timeout(5):
            while len(asyncio.all_tasks()) > tasks:
                await it.client.rings()
        await _drained(it.stub.Generate(generate_request(HELLO)))


async def test_a_deadline_is_kept_and_named(site: Sites) -> None:
    async with site(endless=True, step_s=0.002) as it:
        request = generate_request(TurnRequest(TextPrompt("x")))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _drained(it.stub.Generate(request, timeout=0.05))
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await _quiet(it)


async def test_a_bug_is_logged_and_not_told(site: Sites, caplog: pytest.LogCaptureFixture) -> None:
    async with site() as it:
        it.service.info = lambda: {}["secret"]  # type: ignore[method-assign]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await it.client.model()
        error = refused.value
        info = error_info(error)
        assert (error.code().name, error.details()) == ("INTERNAL", "internal error")
        assert info is not None
        assert info.reason == "INTERNAL_ERROR"
        (record,) = [r for r in caplog.records if r.name == "gateway.rpc.interceptors"]
        assert info.metadata["request_id"] in record.getMessage()
        assert record.exc_info is not None


async def test_a_request_id_is_taken_or_made_and_always_sent_back(site: Sites) -> None:
    async with site() as it:
        sent_ids = []
        for message, metadata in (
            (generate_request(HELLO, "mine"), ()),
            (generate_request(HELLO), (("x-request-id", "theirs"),)),
            (generate_request(HELLO, "bad\nid " + "x" * 300), ()),
            (generate_request(HELLO), ()),
        ):
            call = it.stub.Generate(message, metadata=metadata)
            sent = dict(await call.initial_metadata())
            sent_ids.append(sent["x-request-id"])
            await _drained(call)
        assert sent_ids[:2] == ["mine", "theirs"]
        assert sent_ids[2].startswith("badid")
        assert len(sent_ids[2]) <= 128
        assert len(sent_ids[3]) == 32


async def test_a_port_that_is_taken_is_refused(site: Sites) -> None:
    async with site() as it:
        port = int(it.address.rpartition(":")[2])
        with pytest.raises(CannotListen, match="give another one with --grpc-port"):
            async with serve_grpc(it.service, GrpcSettings(port=port)):
                pass


async def test_the_terminal_client_holds_a_conversation(site: Sites) -> None:
    async with site() as it:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from gateway.cli.app import main; main()", "chat"),
            *("--address", it.address, "--max-tokens", "9"),
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        async with asyncio.timeout(30):
            said, _ = await process.communicate(b"hello\n\nmore\n")
    cached = re.findall(rb"\[\d+ tokens, (\d+) cached\]", said)
    assert process.returncode == 0
    assert len(cached) == 2
    assert int(cached[0]) == 0 < int(cached[1])
    assert said.count(b"tokens/s]") == 2
    assert b"> " not in said  # nobody sees a prompt on a pipe


async def test_a_drain_lets_a_running_turn_end(site: Sites) -> None:
    turn = TurnRequest(TextPrompt("x"), sampling=GREEDY, max_tokens=60)
    async with site(endless=True, step_s=0.002, drain_s=30.0) as it:
        channel = grpc.aio.insecure_channel(it.address)
        call = GenerationServiceStub(channel).Generate(generate_request(turn))
        first = await call.read()
    rest = await _rest(call)
    assert first.HasField("started")
    assert rest[-1].HasField("finished")
    await channel.close()
