"""What is a key's own: its rows where keys are isolated, its sessions always, and how much it may use."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import grpc
import openai
import pytest

from coordinator.requests import SamplingSpec, SessionId
from gateway.chat.messages import Message
from gateway.client import Client, error_info
from gateway.turns import ChatPrompt, TextPrompt, TurnRequest, TurnStarted
from tests.compat.guarded import ALICE, BOB, Guarded, guarded
from tests.compat.http_client import until

TALK: Any = [{"role": "user", "content": "What is a ring of stages? " * 8}]
GREEDY = SamplingSpec(temperature=0.0)


async def _said(it: Guarded, key: str, messages: Any = TALK, **more: Any) -> tuple[int, str]:
    """The cached tokens and the answer, over HTTP."""
    async with it.openai(key, max_retries=0) as sdk:
        asked = {"model": "fake", "messages": messages, "max_tokens": 8, "temperature": 0, **more}
        answer = await sdk.chat.completions.create(**asked)
        return answer.usage.prompt_tokens_details.cached_tokens, answer.choices[0].message.content


async def _told(client: Client, text: str, session: str | None = None) -> int:
    """The cached prefix of the same talk, over gRPC."""
    turn = TurnRequest(
        ChatPrompt((Message("user", text),)),
        session=None if session is None else SessionId(session),
        sampling=GREEDY,
        max_tokens=8,
    )
    async with client.generate(turn) as stream:
        started, *_ = [event async for event in stream]
    assert isinstance(started, TurnStarted)
    return started.cached_prefix


async def test_an_isolated_key_reuses_its_own_rows_and_no_others() -> None:
    """A cache that users share tells by its speed what others asked (vllm-project/vllm#16016)."""
    async with guarded(isolate_keys=True) as it, it.grpc(ALICE) as alice, it.grpc(BOB) as bob:
        most = len(TALK[0]["content"])
        cold, said = await _said(it, ALICE)
        assert cold == 0
        assert await _told(bob, TALK[0]["content"]) == 0
        again = await _said(it, BOB)
        assert (again[0] > most, again[1]) == (True, said)
        go_on = [*TALK, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
        assert (await _said(it, ALICE, go_on))[0] > most
        assert await _told(alice, TALK[0]["content"]) > most


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": TALK}),
        ("/v1/completions", {"prompt": TALK[0]["content"]}),
        ("/v1/responses", {"input": TALK}),
        ("/v1/messages", {"messages": TALK}),
    ],
)
async def test_every_dialect_keeps_keys_apart(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    async def cached(it: Guarded, key: str) -> int:
        asked = {**body, "model": "fake", "max_tokens": 4, "stream": stream}
        status, told, _ = await it.http.ask("POST", path, asked, x_api_key=key)
        assert status == 200
        return int(told["x-ringserve-cached-prefix"])

    async with guarded(isolate_keys=True) as it:
        assert [await cached(it, key) for key in (ALICE, BOB)] == [0, 0]
        assert min([await cached(it, key) for key in (ALICE, BOB)]) > len(TALK[0]["content"]) // 2


async def test_without_isolation_keys_share_what_was_computed() -> None:
    async with guarded() as it, it.grpc(BOB) as bob:
        await _said(it, ALICE)
        assert await _told(bob, TALK[0]["content"]) > len(TALK[0]["content"])


async def test_a_session_of_the_same_name_is_each_keys_own() -> None:
    async with guarded() as it, it.grpc(ALICE) as alice, it.grpc(BOB) as bob:
        sessions = it.running.router.rings
        for client in (alice, bob):
            await _told(client, f"I am {client}", "s")
        assert sum(ring.sessions for ring in sessions()) == 2
        await _said(it, ALICE, extra_headers={"x-session-id": "s"})
        await _said(it, BOB, prompt_cache_key="s")
        assert sum(ring.sessions for ring in sessions()) == 2
        assert await alice.close_session(SessionId("s"))
        assert not await alice.close_session(SessionId("s"))
        assert not await alice.close_session(SessionId("bob/s"))
        assert await bob.close_session(SessionId("s"))


async def test_a_key_may_have_so_many_turns_at_once_on_both_fronts_together() -> None:
    async with guarded(key_max_jobs=2) as it, it.grpc(ALICE) as alice, AsyncExitStack() as open_:
        long = TurnRequest(TextPrompt("x"), sampling=GREEDY, max_tokens=3000, ignore_eos=True)
        first = await open_.enter_async_context(alice.generate(long))
        assert isinstance(await anext(first), TurnStarted)
        sdk = await open_.enter_async_context(it.openai(ALICE, max_retries=0))
        asked: Any = {"model": "fake", "messages": TALK, "max_tokens": 3000}
        stream = await sdk.chat.completions.create(
            **asked, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        with pytest.raises(openai.RateLimitError) as refused:
            await sdk.chat.completions.create(**asked)
        assert refused.value.code == "rate_limit_exceeded"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        with pytest.raises(grpc.aio.AioRpcError) as also:
            async with alice.generate(long) as third:
                await anext(third)
        info = error_info(also.value)
        assert also.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert info is not None
        assert (info.reason, info.retry_after_s) == ("RATE_LIMIT_EXCEEDED", 1.0)
        assert (await _said(it, BOB))[1]
        await stream.close()
        await until(lambda: it.running.service.open_turns == 1)
        assert (await _said(it, ALICE))[1]


async def test_a_key_that_used_its_tokens_waits_and_the_others_do_not() -> None:
    async with guarded(key_tokens_per_minute=100) as it, it.grpc(ALICE) as alice:
        assert (await _said(it, ALICE))[1]
        with pytest.raises(openai.RateLimitError) as refused:
            await _said(it, ALICE)
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 200
        with pytest.raises(grpc.aio.AioRpcError) as also:
            await _told(alice, "short")
        assert also.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await _said(it, BOB))[1]


async def test_more_choices_than_a_key_may_have_turns_are_refused_for_good() -> None:
    async with guarded(key_max_jobs=2) as it:
        body = {"messages": TALK[:1], "max_tokens": 2}
        for n, status in ((2, 200), (3, 400)):
            told = await it.http.post(
                "/v1/chat/completions", {**body, "n": n}, authorization=f"Bearer {ALICE}"
            )
            assert told[0] == status, told[2]
        assert told[2]["error"]["param"] == "n"
        assert told[1]["x-should-retry"] == "false"
