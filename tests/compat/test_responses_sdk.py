"""OpenAI's own client drives /v1/responses over a socket, strictly: what it cannot read is a fault of ours."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from gateway.http import streaming

GREEDY: Any = {"model": "fake", "input": "Hello", "temperature": 0}


async def test_whole_and_streamed_responses_agree(openai_sdk: Any) -> None:
    async with openai_sdk() as (client, _):
        whole = await client.responses.create(**GREEDY, metadata={"a": "b"}, store=False)
        assert (whole.status, whole.metadata, whole.store) == ("completed", {"a": "b"}, False)
        assert whole.output_text != ""
        async with client.responses.stream(**GREEDY) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == whole.output_text
        said = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(said) == whole.output_text
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert final.usage.total_tokens == whole.usage.total_tokens
        assert final.usage.input_tokens_details.cached_tokens == whole.usage.input_tokens


async def test_a_limit_leaves_a_response_incomplete(openai_sdk: Any) -> None:
    async with openai_sdk(endless=True) as (client, _):
        whole = await client.responses.create(**GREEDY, max_output_tokens=5)
        assert (whole.status, whole.usage.output_tokens) == ("incomplete", 5)
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert whole.output[0].status == "incomplete"
        stream = await client.responses.create(**GREEDY, max_output_tokens=5, stream=True)
        last = [event async for event in stream][-1]
        assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
        assert last.response.output_text == whole.output_text


async def test_a_conversation_sent_again_goes_on_from_its_rows(openai_sdk: Any) -> None:
    """A response's own output items, as the SDK hands them out, are input of the next."""
    async with openai_sdk() as (client, _):
        talk: list[Any] = [{"role": "user", "content": "Hello"}]
        ask: Any = {"model": "fake", "temperature": 0, "prompt_cache_key": "one"}
        first = await client.responses.create(**ask, input=talk)
        talk += [*first.output, {"role": "user", "content": "And?"}]
        second = await client.responses.create(**ask, input=talk)
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1


PATH: Any = {
    "type": "object",
    "properties": {"path": {"type": "string", "maxLength": 8}},
    "required": ["path"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "name": "look", "parameters": PATH, "strict": True},
    {"type": "custom", "name": "patch", "description": "Edits."},
]


async def test_a_tool_loop_with_both_kinds_of_tools(openai_sdk: Any) -> None:
    async with openai_sdk() as (client, _):
        talk: list[Any] = [{"role": "user", "content": "Hello"}]
        ask: Any = {
            "model": "fake",
            "tools": TOOLS,
            "prompt_cache_key": "one",
            "max_output_tokens": 200,
        }
        kinds = []
        for name, kind in (("look", "function"), ("patch", "custom")):
            choice = {"type": kind, "name": name}
            async with client.responses.stream(
                **ask, input=talk, tool_choice=choice, extra_body={"seed": 3}
            ) as stream:
                events = [event async for event in stream]
                answer = await stream.get_final_response()
            call = answer.output[-1]
            kinds.append((call.type, call.name, call.status))
            whole = "arguments" if kind == "function" else "input"
            told = [event for event in events if event.type.endswith(f"{whole}.delta")]
            assert "".join(event.delta for event in told) == getattr(call, whole)
            output = {"type": f"{call.type}_output", "call_id": call.call_id, "output": "done"}
            talk += [*answer.output, output]
        assert kinds == [
            ("function_call", "look", "completed"),
            ("custom_tool_call", "patch", "completed"),
        ]
        last = await client.responses.create(**ask, input=talk, tool_choice="none")
        assert last.usage.input_tokens_details.cached_tokens > 0.9 * answer.usage.total_tokens


async def test_a_text_format_holds_the_answer(openai_sdk: Any) -> None:
    class Found(BaseModel):
        line: int
        sure: bool

    async with openai_sdk() as (client, _):
        answer = await client.responses.parse(**GREEDY, text_format=Found)
        assert isinstance(answer.output_parsed, Found)


async def test_errors_before_a_stream_have_a_status_and_a_code(openai_sdk: Any) -> None:
    async with openai_sdk() as (client, _):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="fake", input="x" * 3000, stream=stream)
            assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as kept:
            await client.responses.create(**GREEDY, previous_response_id="resp_1")
        assert (kept.value.param, kept.value.code) == ("previous_response_id", "invalid_value")
        with pytest.raises(openai.NotFoundError) as other:
            await client.responses.create(model="gpt", input="Hello")
        assert other.value.code == "model_not_found"


async def test_what_codex_reads_only_in_band_comes_in_band(openai_sdk: Any) -> None:
    """It takes a 400 for the end of its turn, and shortens its conversation on the code in response.failed."""
    async with openai_sdk() as (client, _):
        client = client.with_options(default_headers={"originator": "codex_cli_rs"})
        raw = client.responses.with_streaming_response
        async with raw.create(model="fake", input="x" * 3000, stream=True) as answer:
            lines = [line async for line in answer.iter_lines()]
        assert [line for line in lines if line.startswith("event: ")][
            -1
        ] == "event: response.failed"
        assert '"code":"context_length_exceeded"' in lines[-2 if lines[-1] == "" else -1]


async def test_an_error_behind_the_first_byte_fails_the_response(openai_sdk: Any) -> None:
    async with openai_sdk(endless=True, step_s=0.01) as (client, fake):
        stream = await client.responses.create(**GREEDY, stream=True)
        events = []
        async for event in stream:
            events.append(event)
            await fake.driver._ring.stop()
        assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
        assert (events[-1].response.error.code, "lost" in events[-1].response.error.message) == (
            "server_error",
            True,
        )


async def test_closing_a_stream_frees_its_lane(openai_sdk: Any) -> None:
    async with openai_sdk(endless=True, step_s=0.01) as (client, fake):
        stream = await client.responses.create(**GREEDY, stream=True)
        await anext(aiter(stream))
        assert fake.driver.status().busy_lanes == 1
        await stream.close()
        for _ in range(500):
            if fake.driver.status().busy_lanes == 0:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the lane is still taken")


async def test_silence_is_told_by_events(openai_sdk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codex's idle timeout counts from event to event; a comment is none."""
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.01)
    async with (
        openai_sdk(step_s=0.2) as (client, _),
        client.responses.stream(**GREEDY, max_output_tokens=2) as stream,
    ):
        kinds = [event.type async for event in stream]
    assert kinds[0] == "response.created"
    assert kinds.count("response.in_progress") > 2
