"""What a client may send over gRPC, and what it is answered, over real sockets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from coordinator.requests import MissKind, SamplingSpec, SessionId
from fakering.model import FakeModel
from gateway.chat.byte_tokenizer import END
from gateway.chat.messages import Message, Tool, ToolCall
from gateway.client import Client, error_info
from gateway.pb import generation_pb2 as pb
from gateway.rpc import convert
from gateway.rpc.client_convert import generate_request
from gateway.rpc.servicer import SERVICE_NAME
from gateway.turns import (
    ChatPrompt,
    TextPrompt,
    TokenPrompt,
    TurnDelta,
    TurnFinished,
    TurnRequest,
    TurnStarted,
)

Sites = Callable[..., AbstractAsyncContextManager[Any]]
GREEDY = SamplingSpec(temperature=0.0)
LANGUAGE = FakeModel(258, low=32, high=127, end_token=END)
MAX_ROWS = 2048
HELLO = TurnRequest(TextPrompt("hello"), sampling=GREEDY, max_tokens=8)


async def answer(client: Client, turn: TurnRequest) -> tuple[int, ...]:
    async with client.generate(turn) as stream:
        events = [event async for event in stream]
    assert isinstance(events[0], TurnStarted)
    assert isinstance(events[-1], TurnFinished)
    return tuple(i for event in events if isinstance(event, TurnDelta) for i in event.token_ids)


async def drained(call: Any) -> None:
    if not hasattr(call, "read"):
        await call
        return
    async for _ in call:
        pass


async def refusal(call: Any) -> tuple[str, str]:
    """The status and the ErrorInfo's reason that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await drained(call)
    info = error_info(refused.value)
    return refused.value.code().name, "" if info is None else info.reason


async def test_a_conversation_reuses_its_first_turn(site: Sites) -> None:
    async with site() as it:
        session = SessionId("s")
        first = Message("user", "hello " * 40)
        async with it.client.generate(
            TurnRequest(ChatPrompt((first,)), session=session, sampling=GREEDY)
        ) as stream:
            events = [event async for event in stream]
        text = "".join(event.text for event in events if isinstance(event, TurnDelta))
        later = (first, Message("assistant", text), Message("user", "and?"))
        async with it.client.generate(
            TurnRequest(ChatPrompt(later), session=session, sampling=GREEDY)
        ) as stream:
            events += [event async for event in stream]
        cold, warm = (event for event in events if isinstance(event, TurnStarted))
        assert cold.miss is not None
        assert (cold.cached_prefix, cold.miss.kind) == (0, MissKind.NEW_SESSION)
        assert warm.cached_prefix >= cold.prompt_tokens
        finished = [event for event in events if isinstance(event, TurnFinished)]
        assert [end.usage.cached_prefix for end in finished] == [0, warm.cached_prefix]
        assert (await it.client.rings())[0].sessions == 1
        assert await it.client.close_session(session)
        assert not await it.client.close_session(session)


async def test_reuse_can_be_turned_off_and_changes_no_token(site: Sites) -> None:
    async with site() as it:
        prompt = TokenPrompt(tuple(b"hello " * 40))
        turns = [
            TurnRequest(prompt, sampling=GREEDY, max_tokens=30, reuse=reuse, draft=draft)
            for reuse, draft in ((False, True), (True, True), (False, False), (True, False))
        ]
        answers = [await answer(it.client, turn) for turn in turns]
        assert set(answers) == {LANGUAGE.oracle(prompt.token_ids, 30, stop={END})}


async def test_the_model_and_its_limits_are_told(site: Sites) -> None:
    async with site() as it:
        model = await it.client.model()
        assert (model.name, model.max_context, model.vocab_size) == ("fake", MAX_ROWS, 258)
        assert (model.exact, model.stages, model.lanes) == (True, 2, 4)
        assert await it.client.count_tokens(TextPrompt("héllo")) == 6


def test_every_sampling_field_can_be_unset_or_zero() -> None:
    optional = {field.name: field.has_presence for field in pb.Sampling.DESCRIPTOR.fields}
    assert [name for name, unset in optional.items() if not unset] == ["logit_bias"]
    unset = convert.turn_request(pb.GenerateRequest(text="a"), None)
    assert (unset.sampling, unset.seed, unset.max_tokens) == (SamplingSpec(), None, None)
    zero = pb.Sampling(temperature=0, seed=0, logprobs=0)
    given = convert.turn_request(pb.GenerateRequest(text="a", sampling=zero, max_tokens=0), None)
    assert (given.sampling.temperature, given.seed, given.sampling.logprobs) == (0.0, 0, 0)
    assert given.max_tokens == 0


def test_a_turn_survives_the_wire_unchanged() -> None:
    call = ToolCall(name="f", arguments='{"b": 1, "a": 2}', id="c1")
    prompt = ChatPrompt(
        messages=(
            Message("system", ""),
            Message("assistant", None, tool_calls=(call,)),
            Message("tool", "42", name="f", tool_call_id="c1"),
        ),
        tools=(Tool("f", "does f", '{"type": "object", "properties": {"b": {}, "a": {}}}'),),
        template_args={"thinking": False, "depth": 3},
    )
    turn = TurnRequest(
        prompt,
        model="m",
        session=SessionId("s"),
        sampling=SamplingSpec(0.7, 5, 0.9, 0.1, 1.1, 0.5, -0.5, ((3, -1.5), (9, 2.0)), logprobs=4),
        seed=2**64 - 1,
        max_tokens=17,
        stop=("a", "b"),
        stop_token_ids=(4, 5),
        ignore_eos=True,
        reuse=False,
        draft=False,
        timeout_s=2.5,
    )
    wire = generate_request(turn).SerializeToString()
    assert convert.turn_request(pb.GenerateRequest.FromString(wire), 2.5) == turn


def _asked(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"text": "hello", **fields})


def _sampled(**fields: Any) -> pb.GenerateRequest:
    return _asked(sampling=pb.Sampling(**fields))


BAD_VALUE = ("INVALID_ARGUMENT", "INVALID_VALUE")
TOO_LONG = ("INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED")
BAD_REQUESTS = {
    "no prompt": (pb.GenerateRequest(), BAD_VALUE),
    "no messages": (pb.GenerateRequest(chat=pb.Chat()), BAD_VALUE),
    "empty text": (_asked(text=""), BAD_VALUE),
    "no token ids": (_asked(token_ids=pb.TokenIds()), BAD_VALUE),
    "negative token id": (_asked(token_ids=pb.TokenIds(ids=[1, -1])), BAD_VALUE),
    "token id out of range": (_asked(token_ids=pb.TokenIds(ids=[258])), BAD_VALUE),
    "zero max tokens": (_asked(max_tokens=0), BAD_VALUE),
    "negative max tokens": (_asked(max_tokens=-1), BAD_VALUE),
    "temperature NaN": (_sampled(temperature=float("nan")), BAD_VALUE),
    "temperature infinite": (_sampled(temperature=float("inf")), BAD_VALUE),
    "temperature negative": (_sampled(temperature=-0.1), BAD_VALUE),
    "top_p zero": (_sampled(top_p=0.0), BAD_VALUE),
    "top_k negative": (_sampled(top_k=-1), BAD_VALUE),
    "too many logprobs": (_sampled(logprobs=1000), BAD_VALUE),
    "bias of no token": (_sampled(logit_bias={-5: 1.0}), BAD_VALUE),
    "bias NaN": (_sampled(logit_bias={5: float("nan")}), BAD_VALUE),
    "empty stop": (_asked(stop=[""]), BAD_VALUE),
    "stop id of no token": (_asked(stop_token_ids=[-1]), BAD_VALUE),
    "template args no JSON": (
        pb.GenerateRequest(
            chat=pb.Chat(messages=[pb.ChatMessage(role="user")], template_args_json="{")
        ),
        BAD_VALUE,
    ),
    "template args no object": (
        pb.GenerateRequest(
            chat=pb.Chat(messages=[pb.ChatMessage(role="user")], template_args_json="[1]")
        ),
        BAD_VALUE,
    ),
    "one token too many": (_asked(text="x" * (MAX_ROWS + 1)), TOO_LONG),
    "ten times too long": (_asked(text="x" * (10 * MAX_ROWS)), TOO_LONG),
    "5 MB": (_asked(text="x" * 5_000_000), TOO_LONG),
    "5 MB of tokens": (_asked(token_ids=pb.TokenIds(ids=[7] * 1_000_000)), TOO_LONG),
    "unknown model": (_asked(model="other"), ("NOT_FOUND", "MODEL_NOT_FOUND")),
    "a model's name of 100 kB": (_asked(model="x" * 100_000), ("NOT_FOUND", "MODEL_NOT_FOUND")),
    # gRPC itself refuses what is larger than it may read, before we see it.
    "20 MB": (_asked(text="x" * 20_000_000), ("RESOURCE_EXHAUSTED", "")),
}


async def test_each_bad_request_gets_its_status_and_the_next_one_is_served(site: Sites) -> None:
    async with site() as it:
        expected = await answer(it.client, HELLO)
        for name, (message, status) in BAD_REQUESTS.items():
            assert await refusal(it.stub.Generate(message)) == status, name
            assert await answer(it.client, HELLO) == expected, name
        assert it.driver.status().waiting_jobs == 0


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x12\x02\xff\xfe"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(site: Sites, raw: bytes) -> None:
    async with site() as it:
        for method, make in (("Generate", "unary_stream"), ("CountTokens", "unary_unary")):
            call = getattr(it.channel, make)(f"/{SERVICE_NAME}/{method}")
            if method == "CountTokens":
                raw = raw.replace(b"\x12", b"\x0a")
            assert await refusal(call(raw)) == BAD_VALUE
        assert await answer(it.client, HELLO)


async def test_huge_limits_are_cut_to_what_the_lane_holds(site: Sites) -> None:
    async with site(endless=True) as it:
        turn = TurnRequest(TextPrompt("x" * (MAX_ROWS - 5)), max_tokens=2**31 - 1)
        assert 1 <= len(await answer(it.client, turn)) <= 6


async def test_count_tokens_and_close_session_refuse_in_the_same_way(site: Sites) -> None:
    async with site() as it:
        count, close = it.stub.CountTokens, it.stub.CloseSession
        assert await refusal(count(pb.CountTokensRequest())) == BAD_VALUE
        assert (await refusal(count(pb.CountTokensRequest(model="o", text="a"))))[0] == "NOT_FOUND"
        assert await refusal(close(pb.CloseSessionRequest())) == BAD_VALUE


async def test_a_seed_counts_wherever_the_caller_put_it(site: Sites) -> None:
    async with site(endless=True) as it:
        spec = SamplingSpec(temperature=1.0, seed=5)
        for turn in (
            TurnRequest(TextPrompt("Say"), sampling=spec, max_tokens=8),
            TurnRequest(TextPrompt("Say"), sampling=replace(spec, seed=0), seed=5, max_tokens=8),
        ):
            async with it.client.generate(turn) as stream:
                started = await anext(stream)
            assert isinstance(started, TurnStarted)
            assert started.seed == 5
