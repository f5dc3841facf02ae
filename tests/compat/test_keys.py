"""API keys over real sockets: who gets in, what strangers are told, and that no key is ever written down."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

import anthropic
import grpc
import openai
import pytest
from anthropic import AsyncAnthropic
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway.client import error_info
from gateway.http.app import make_app
from gateway.http.status.feed import Feed
from gateway.observing.loading import LoadRecord
from gateway.observing.metrics.exposition import Metrics
from gateway.pb import generation_pb2 as pb
from gateway.progress import SilentBoard
from gateway.rpc.interceptors import OPERATORS_METHODS
from gateway.safety.guard import open_guard
from gateway.safety.settings import SafetySettings
from gateway.server_address import ServerAddress
from gateway.turns import TextPrompt, TurnRequest
from tests.compat.guarded import ALICE, BOB, KEYS, WRONG, guarded

HELLO: Any = [{"role": "user", "content": "Hello"}]
CHAT: Any = {"model": "fake", "messages": HELLO, "max_tokens": 4}
# What probes and browsers ask before anybody could show a key.
OPEN_PATH = re.compile(r"/|/health|/ready|/status/\w+\.(css|js)")


class Posts:
    """Counts what an SDK really sends."""

    def __init__(self, sdk: Any) -> None:
        self.count = 0
        sdk._client.event_hooks["request"].append(self._one)

    async def _one(self, request: Any) -> None:
        self.count += 1


async def test_openais_client_gets_in_with_its_key_and_is_told_once_without() -> None:
    async with guarded() as it:
        async with it.openai(ALICE) as sdk:
            assert (await sdk.chat.completions.create(**CHAT)).usage.completion_tokens > 0
            assert [model.id async for model in sdk.models.list()] == ["fake"]
        for stream in (False, True):
            async with it.openai(WRONG) as sdk:
                posts = Posts(sdk)
                with pytest.raises(openai.AuthenticationError) as refused:
                    await sdk.chat.completions.create(**CHAT, stream=stream)
                assert (refused.value.code, posts.count) == ("invalid_api_key", 1)


async def test_anthropics_client_gets_in_with_its_key_and_is_told_once_without() -> None:
    async with guarded() as it:
        url = f"http://{it.running.http_address}"
        for shown in ({"api_key": ALICE}, {"auth_token": BOB}):
            async with AsyncAnthropic(base_url=url, **shown) as sdk:
                assert (await sdk.messages.create(**CHAT)).usage.output_tokens > 0
        async with AsyncAnthropic(base_url=url, api_key=WRONG) as sdk:
            posts = Posts(sdk)
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await sdk.messages.create(**CHAT)
            assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
            assert posts.count == 1


SHOWN: tuple[tuple[dict[str, str], int], ...] = (
    ({"authorization": f"Bearer {ALICE}"}, 200),
    ({"authorization": f"bearer   {ALICE}"}, 200),
    ({"x_api_key": ALICE}, 200),
    ({"api_key": BOB}, 200),
    ({"authorization": "Bearer none", "x_api_key": ALICE}, 200),
    ({}, 401),
    ({"authorization": "Bearer"}, 401),
    ({"authorization": ALICE}, 401),
    ({"authorization": f"Bearer {WRONG}"}, 401),
    ({"authorization": f"Bearer {ALICE[:-1]}"}, 401),
    ({"authorization": f"Bearer {ALICE}x"}, 401),
    ({"authorization": f"Basic {ALICE}"}, 401),
    ({"x_api_key": "alice"}, 401),
    ({"x_api_key": f"alice {ALICE}"}, 401),
    ({"cookie": ALICE}, 401),
)


async def test_a_key_counts_in_the_headers_that_clients_use_and_only_whole() -> None:
    async with guarded() as it:
        for headers, status in SHOWN:
            got, told, raw = await it.http.ask("GET", "/v1/models", **headers)
            assert got == status, headers
            if status == 401:
                error = json.loads(raw)["error"]
                assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
                assert told["x-should-retry"] == "false"
                assert told["www-authenticate"].startswith("bearer realm=")
                assert b"sk-" not in raw


async def test_every_route_that_is_not_known_to_be_open_asks_for_a_key() -> None:
    async with guarded() as it:
        service: Any = it.running.service
        feed: Any = Feed(lambda: b"")
        app = make_app(service, 1, feed, LoadRecord(SilentBoard()), Metrics("x:", "x"))
        asked = 0
        for route in app.routes:
            path = route.path.replace("{model:path}", "fake")  # type: ignore[attr-defined]
            for method in route.methods:  # type: ignore[attr-defined]
                status, _, _ = await it.http.ask(method, path)
                is_open = OPEN_PATH.fullmatch(path) is not None
                assert (status == 401) is not is_open, (method, path, status)
                asked += 1
        assert asked > 10


async def test_an_open_route_tells_a_stranger_no_more_than_that() -> None:
    async with guarded() as it:
        stranger = json.loads((await it.http.ask("GET", "/ready"))[2])
        alice = json.loads((await it.http.ask("GET", "/ready", x_api_key=ALICE))[2])
        assert stranger == {"status": "ready", "rings": []}
        assert [ring["ring"] for ring in alice["rings"]] == ["ring-0"]


async def test_a_stranger_is_answered_before_the_body_is_there() -> None:
    async with guarded() as it:
        reader, writer = await asyncio.open_connection(it.http.host, it.http.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000\r\n\r\n"
        )
        async with asyncio.timeout(10):
            assert (await it.http.head(reader))[0] == 401
        writer.close()


async def test_a_stranger_with_a_long_prompt_reads_his_answer() -> None:
    """A server that closes on what it does not read resets the connection, and clients try again."""
    long: Any = [{"role": "user", "content": "x" * 8_000_000}]
    async with guarded() as it, it.openai(WRONG) as sdk:
        with pytest.raises(openai.AuthenticationError):
            await sdk.chat.completions.create(model="fake", messages=long)


async def test_a_body_that_is_announced_too_large_is_not_waited_for() -> None:
    async with guarded() as it:
        reader, writer = await asyncio.open_connection(it.http.host, it.http.port)
        head = f"POST /tokenize HTTP/1.1\r\nhost: x\r\nx-api-key: {ALICE}\r\n"
        writer.write(f"{head}content-length: 99999999\r\nexpect: 100-continue\r\n\r\n".encode())
        async with asyncio.timeout(10):
            assert (await it.http.head(reader))[0] == 413
        writer.close()


async def _refusal(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    info = error_info(refused.value)
    assert info is not None
    return refused.value.code().name, info.reason


async def test_grpc_asks_for_a_key_before_it_reads_and_tells_health_to_all() -> None:
    async with guarded() as it, it.grpc(ALICE) as client:
        turn = TurnRequest(TextPrompt("Hello"), max_tokens=3)
        async with client.generate(turn) as stream:
            assert [event async for event in stream]
        assert (await client.model()).name == "fake"
        for key in ("", WRONG):
            async with it.grpc(key) as stranger:
                refused = ("UNAUTHENTICATED", "INVALID_API_KEY")
                assert await _refusal(stranger.model()) == refused
                assert await _refusal(stranger.drain_ring("ring-0")) == refused
                async with stranger.generate(turn) as stream:
                    assert await _refusal(anext(stream)) == refused


async def test_grpc_methods_see_a_key_in_either_header_and_no_message_before_it() -> None:
    async with guarded() as it, it.channel() as channel:
        method = channel.unary_unary("/ringserve.v1.GenerationService/CountTokens")
        malformed = b"\xff\xff\xff"
        assert (await _refusal(method(malformed)))[0] == "UNAUTHENTICATED"
        for metadata in (("x-api-key", ALICE), ("authorization", f"Bearer {ALICE}")):
            told = await _refusal(method(malformed, metadata=(metadata,)))
            assert told == ("INVALID_ARGUMENT", "INVALID_VALUE")


async def test_only_operators_keys_change_the_rings_where_operators_are_named() -> None:
    async with guarded(operators="bob") as it, it.grpc(ALICE) as alice, it.grpc(BOB) as bob:
        refused = ("PERMISSION_DENIED", "PERMISSION_DENIED")
        assert await _refusal(alice.add_ring()) == refused
        assert await _refusal(alice.drain_ring("ring-0")) == refused
        assert await _refusal(alice.pin_prefix(TextPrompt("x"))) == refused
        assert await _refusal(alice.drop_node("00")) == refused
        assert await _refusal(anext(alice.nodes())) == refused
        assert (await alice.rings())[0].ready
        assert await bob.add_ring() == "ring-1"
        assert await bob.drain_ring("ring-1") == 0


def test_every_method_is_known_to_be_an_operators_or_everybodys() -> None:
    everybodys = {"Generate", "CountTokens", "GetModel", "ListRings", "CloseSession"}
    service = pb.DESCRIPTOR.services_by_name["GenerationService"]
    assert {method.name for method in service.methods} == everybodys | OPERATORS_METHODS


async def test_health_and_reflection_are_open() -> None:
    async with guarded() as it, it.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        state = await health.Check(health_pb2.HealthCheckRequest())
        assert state.status == health_pb2.HealthCheckResponse.SERVING
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        async for answer in stub.ServerReflectionInfo(iter([listing])):
            names = [each.name for each in answer.list_services_response.service]
            assert "ringserve.v1.GenerationService" in names


async def test_no_key_is_in_a_log_or_in_what_is_printed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with guarded(isolate_keys=True) as it:
        for key in (ALICE, WRONG):
            await it.http.post("/v1/chat/completions", CHAT, authorization=f"Bearer {key}")
            await it.http.post("/v1/chat/completions", b"{", x_api_key=key)
            async with it.grpc(key) as client:
                with pytest.raises(grpc.aio.AioRpcError):
                    await client.drain_ring("none")
        printed = caplog.text + repr(it)
    safety = SafetySettings(api_keys=KEYS)
    guard = open_guard(safety)
    printed += repr(safety) + repr(guard) + repr(vars(guard.keyring))
    printed += repr(ServerAddress("x", ALICE))
    assert "sk-" not in printed
