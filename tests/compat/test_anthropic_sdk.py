"""Anthropic's own client, strict, over a real socket: what its types refuse would break those who use it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anthropic
import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from coordinator.requests import FinishReason, Timings, Usage
from gateway.chat.messages import Message, ToolCall
from gateway.chat.parts import (
    AnswerForm,
    AnswerPart,
    CallArguments,
    CallOpened,
    SaidText,
    Thought,
)
from gateway.turns import (
    ChatPrompt,
    TurnDelta,
    TurnEvent,
    TurnFinished,
    TurnRequest,
    TurnStarted,
)
from tests.compat.http_client import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


HELLO: Any = [{"role": "user", "content": "Hello"}]
# The package leaves out what Anthropic's newest models take no more.
GREEDY = {"temperature": 0}
ASK: Any = {"model": "fake", "messages": HELLO, "max_tokens": 9, "extra_body": GREEDY}
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

Making = Any


async def test_a_message_is_whole_and_says_what_was_reused(anthropic_sdk: Making) -> None:
    async with anthropic_sdk(endless=True) as (client, _):
        answer = await client.messages.create(**ASK)
        assert answer.id.startswith("msg_")
        assert (answer.type, answer.role, answer.model) == ("message", "assistant", "fake")
        assert [block.type for block in answer.content] == ["text"]
        assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
        used = answer.usage
        assert (used.cache_read_input_tokens, used.output_tokens) == (0, 9)
        assert answer._request_id
        again = await client.messages.create(**ASK)
        assert again.content == answer.content
        assert again.usage.cache_read_input_tokens == used.input_tokens
        assert again.usage.input_tokens == 0


async def test_a_stream_says_the_same_in_pieces(anthropic_sdk: Making) -> None:
    async with anthropic_sdk(endless=True) as (client, _):
        whole = await client.messages.create(**ASK)
        events = [event async for event in await client.messages.create(**ASK, stream=True)]
        for event in events:
            EVENTS.validate_python(event.model_dump())
        kinds = [event.type for event in events]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert events[0].message.usage.cache_read_input_tokens == whole.usage.input_tokens
        assert events[-2].usage.output_tokens == 9
        async with client.messages.stream(**ASK) as stream:
            final = await stream.get_final_message()
        assert [block.text for block in final.content] == [block.text for block in whole.content]
        assert final.stop_reason == "max_tokens"


async def test_a_stop_sequence_is_named(anthropic_sdk: Making) -> None:
    async with anthropic_sdk(endless=True) as (client, _):
        said = (await client.messages.create(**ASK)).content[0].text
        answer = await client.messages.create(**ASK, stop_sequences=["\n\nnever", said[3:6]])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", said[3:6])
        assert answer.content[0].text == said[:3]


async def test_an_answer_that_fills_the_lane_says_so(anthropic_sdk: Making) -> None:
    async with anthropic_sdk(endless=True) as (client, _):
        long: Any = [{"role": "user", "content": "x" * 2000}]
        answer = await client.messages.create(model="fake", messages=long, max_tokens=4000)
        assert answer.stop_reason == "model_context_window_exceeded"


async def test_tokens_are_counted_as_a_message_reads_them(anthropic_sdk: Making) -> None:
    ask: Any = {
        "model": "fake",
        "messages": HELLO,
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [{"name": "look", "description": "Looks", "input_schema": {"type": "object"}}],
    }
    async with anthropic_sdk(endless=True) as (client, _):
        count = await client.messages.count_tokens(**ask)
        answer = await client.messages.create(**ask, max_tokens=1)
        assert count.input_tokens == answer.usage.input_tokens > 100


async def test_a_prompt_can_be_computed_without_an_answer(anthropic_sdk: Making) -> None:
    async with anthropic_sdk(endless=True) as (client, _):
        read = await client.messages.create(**{**ASK, "max_tokens": 0})
        assert (read.content, read.usage.output_tokens) == ([], 0)
        answer = await client.messages.create(**ASK)
        assert answer.usage.input_tokens == 0


async def test_claude_codes_query_betas_and_model_names_do_no_harm(anthropic_sdk: Making) -> None:
    async with anthropic_sdk(endless=True) as (client, _):
        answer = await client.beta.messages.create(
            **{**ASK, "model": "claude-haiku-4-5"},
            betas=["claude-code-20250219", "interleaved-thinking-2025-05-14"],
            thinking={"type": "enabled", "budget_tokens": 1024},
            metadata={"user_id": "user_ab_account__session_0a1b"},
            service_tier="auto",
        )
        assert answer.model == "fake"


LOOK: Any = {"name": "look", "description": "Looks", "input_schema": {"type": "object"}}
ANSWER: tuple[AnswerPart, ...] = (
    Thought("Where "),
    Thought("is it?"),
    SaidText("I look."),
    CallOpened(0, "call_a", "look"),
    CallArguments(0, '{"at": "ho'),
    CallArguments(0, 'me"}'),
)


def _answering(parts: tuple[AnswerPart, ...], turns: list[TurnRequest]) -> Any:
    """What generate() tells of an answer of these parts; `turns` gets what it was asked."""

    async def generate(turn: TurnRequest, *_: object) -> AsyncIterator[TurnEvent]:
        turns.append(turn)
        yield TurnStarted(100, 90, None, "ring-0", 0, 0)
        for part in parts:
            yield TurnDelta(parts=(part,))
        calls = sum(isinstance(part, CallOpened) for part in parts)
        yield TurnFinished(FinishReason.STOP, 2, Usage(100, 90, 30), Timings(), calls, 10)

    return generate


async def test_thoughts_and_calls_come_whole_and_in_pieces(
    anthropic_sdk: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[TurnRequest] = []
    ask: Any = {**ASK, "tools": [LOOK], "tool_choice": {"type": "any"}}
    ask["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    async with anthropic_sdk() as (client, fake):
        monkeypatch.setattr(fake.service, "generate", _answering(ANSWER, turns))
        whole = await client.messages.create(**ask)
        async with client.messages.stream(**ask) as stream:
            async for event in stream:
                assert event.type
            final = await stream.get_final_message()
    for answer in (whole, final):
        thought, text, call = answer.content
        assert (thought.type, thought.thinking) == ("thinking", "Where is it?")
        assert thought.signature
        assert (text.type, text.text) == ("text", "I look.")
        assert (call.type, call.id, call.name) == ("tool_use", "call_a", "look")
        assert call.input == {"at": "home"}
        assert answer.stop_reason == "tool_use"
        assert answer.usage.output_tokens_details.thinking_tokens == 10
    assert turns[0].form == AnswerForm(must_call=True)


async def test_what_was_answered_can_be_sent_back(
    anthropic_sdk: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[TurnRequest] = []
    async with anthropic_sdk() as (client, fake):
        monkeypatch.setattr(fake.service, "generate", _answering(ANSWER, turns))
        answer = await client.messages.create(**ASK, tools=[LOOK])
        result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": "a tree"}
        talk = [*HELLO, answer.to_param(), {"role": "user", "content": [result]}]
        await client.messages.create(**{**ASK, "messages": talk}, tools=[LOOK])
    prompt = turns[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    _, said, came = prompt.messages
    assert (said.reasoning, said.content) == ("Where is it?", "I look.")
    assert said.tool_calls == (ToolCall("look", {"at": "home"}, "call_a"),)
    assert came == Message("tool", "a tree", tool_call_id="call_a")


async def test_headers_name_the_session(
    anthropic_sdk: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[TurnRequest] = []
    named = {"X-Claude-Code-Session-Id": "s1", "X-Claude-Code-Agent-Id": "a1"}
    async with anthropic_sdk() as (client, fake):
        monkeypatch.setattr(fake.service, "generate", _answering(ANSWER, turns))
        await client.messages.create(**ASK, extra_headers=named)
        await client.messages.create(**ASK, extra_headers={**named, "X-Session-Id": "mine"})
        await client.messages.create(**ASK, metadata={"user_id": "user_a_account__session_b2"})
    assert [turn.session for turn in turns] == ["s1/a1", "mine", "b2"]


async def test_an_answer_goes_on_from_what_was_begun(anthropic_sdk: Making) -> None:
    async with anthropic_sdk(endless=True) as (client, _):
        said = (await client.messages.create(**ASK)).content[0].text
        begun = [*HELLO, {"role": "assistant", "content": said[:4]}]
        rest = await client.messages.create(**{**ASK, "messages": begun, "max_tokens": 5})
        assert rest.content[0].text == said[4:]
        assert rest.usage.input_tokens <= 1


async def test_errors_are_those_that_anthropics_clients_know(anthropic_sdk: Making) -> None:
    async with anthropic_sdk() as (client, _):
        long: Any = [{"role": "user", "content": "x" * 3000}]
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2048 maximum"
        ) as over:
            await client.messages.create(model="fake", messages=long, max_tokens=5, stream=True)
        assert over.value.type == "invalid_request_error"
        body: Any = over.value.body
        assert body["request_id"] == over.value.request_id
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await client.messages.create(**{**ASK, "extra_body": {"temperature": -1}})
        with pytest.raises(anthropic.NotFoundError) as other:
            await client.messages.create(**{**ASK, "model": "gpt"})
        assert other.value.type == "not_found_error"
        with pytest.raises(anthropic.NotFoundError) as nowhere:
            await client.messages.batches.list()
        assert nowhere.value.type == "not_found_error"


async def test_a_ring_that_does_not_run_is_overloaded(anthropic_sdk: Making) -> None:
    async with anthropic_sdk(start=False) as (client, _):
        with pytest.raises(anthropic.InternalServerError) as busy:
            await client.messages.create(**ASK)
        assert (busy.value.status_code, busy.value.type) == (529, "overloaded_error")
        assert int(busy.value.response.headers["retry-after"]) >= 1


async def test_a_full_queue_says_when_to_come_again(anthropic_sdk: Making) -> None:
    async with anthropic_sdk(endless=True, step_s=0.05, queue_limit=1) as (client, fake):
        ask: Any = {**ASK, "max_tokens": 400, "stream": True}
        running = [asyncio.create_task(client.messages.create(**ask)) for _ in range(5)]
        await until(lambda: fake.driver.status().waiting_jobs == 1)
        with pytest.raises(anthropic.OverloadedError) as full:
            await client.messages.create(**ASK)
        assert full.value.type == "overloaded_error"
        assert int(full.value.response.headers["retry-after"]) >= 1
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_an_error_behind_the_first_byte_comes_in_band(anthropic_sdk: Making) -> None:
    async with anthropic_sdk(endless=True, step_s=0.01) as (client, fake):
        stream = await client.messages.create(**{**ASK, "max_tokens": 900}, stream=True)

        async def read() -> None:
            async for _ in stream:
                await fake.driver._ring.stop()

        with pytest.raises(anthropic.APIStatusError, match="lost") as broken:
            await read()
        assert broken.value.type == "api_error"


async def test_closing_a_stream_frees_its_lane(anthropic_sdk: Making) -> None:
    async with anthropic_sdk(endless=True, step_s=0.01) as (client, fake):
        stream = await client.messages.create(**{**ASK, "max_tokens": 900}, stream=True)
        await anext(aiter(stream))
        assert fake.driver.status().busy_lanes == 1
        await stream.close()
        await until(lambda: fake.driver.status().busy_lanes == 0)
