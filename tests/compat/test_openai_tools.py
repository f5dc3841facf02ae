"""Tools, thoughts and structured answers through OpenAI's own client, which reads every chunk strictly."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel

from gateway.chat.byte_tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Weather(BaseModel):
    city: str


class Alarm(BaseModel):
    hour: Literal[6, 7]


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    lives: Literal[1, 9]


WEATHER = pydantic_function_tool(Weather, name="weather")
ALARM = pydantic_function_tool(Alarm, name="alarm")
TOOLS = [WEATHER, ALARM]
CALLS = (
    "<think>\nTwo cities.\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Basel"}}\n</tool_call>'
)
SAYS = {
    "Weather?": CALLS,
    "Think!": "<think>\nI am thinking.</think>\n\nDone.",
    "Cut": '<tool_call>\n{"name": "weather", "arguments": {"city": "' + "x" * 200,
    "Broken": '<tool_call>\n{"name": weather}\n</tool_call>',
    "Sun": "It shines.",
    "Call!": '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call> No!',
}


@pytest.fixture
def sdk(openai_sdk: Any) -> Any:
    @asynccontextmanager
    async def make(**kinds: Any) -> AsyncIterator[AsyncOpenAI]:
        async with openai_sdk(says=SAYS, **kinds) as (client, _):
            yield client

    return make


def _ask(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "fake", "messages": messages, "temperature": 0, **more}


async def test_an_answer_comes_with_its_thoughts_and_calls(sdk: Any) -> None:
    async with sdk() as client:
        answer = await client.chat.completions.create(**_ask("Weather?", tools=TOOLS))
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me look."
        assert choice.message.reasoning_content == "Two cities."
        calls = [(call.type, call.function.name) for call in choice.message.tool_calls]
        assert calls == [("function", "weather")] * 2
        cities = [json.loads(call.function.arguments) for call in choice.message.tool_calls]
        assert cities == [{"city": "Zürich"}, {"city": "Basel"}]
        assert len({call.id for call in choice.message.tool_calls}) == 2
        assert answer.usage.completion_tokens_details.reasoning_tokens == len(
            "<think>\nTwo cities.\n</think>"
        ) - len("<think")


async def test_streamed_calls_are_put_together_by_the_sdk(sdk: Any) -> None:
    async with sdk() as client:
        async with client.chat.completions.stream(**_ask("Weather?", tools=TOOLS)) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
        message = final.choices[0].message
        assert final.choices[0].finish_reason == "tool_calls"
        assert message.content == "Let me look."
        parsed = [call.function.parsed_arguments for call in message.tool_calls]
        assert parsed == [Weather(city="Zürich"), Weather(city="Basel")]
        assert "tool_calls.function.arguments.delta" in kinds


async def test_every_chunk_is_whole_by_itself(sdk: Any) -> None:
    """ollama/ollama#7881, EricLBuehler/mistral.rs#1507: streamed calls without an index break strict clients."""
    async with sdk() as client:
        ask = _ask("Weather?", tools=TOOLS, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in await client.chat.completions.create(**ask)]
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True, extra="allow")
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > 0
        deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        assert {call.index for call in calls} == {0, 1}
        opened = [call for call in calls if call.id]
        assert [(call.index, call.type, call.function.name) for call in opened] == [
            (0, "function", "weather"),
            (1, "function", "weather"),
        ]
        assert all(call.function.name is None for call in calls if not call.id)
        assert "".join(delta.content or "" for delta in deltas) == "Let me look."


async def test_what_is_no_call_is_text_and_no_marks_leak(sdk: Any) -> None:
    async with sdk() as client:
        create = client.chat.completions.create
        none = await create(**_ask("Weather?", tools=TOOLS, tool_choice="none"))
        assert none.choices[0].finish_reason == "stop"
        assert none.choices[0].message.tool_calls is None
        assert none.choices[0].message.content.startswith("Let me look.\n<tool_call>")
        broken = await create(**_ask("Broken", tools=TOOLS))
        assert broken.choices[0].message.content == SAYS["Broken"]
        thought = await create(**_ask("Think!"))
        assert thought.choices[0].message.content == "Done."
        assert thought.choices[0].message.reasoning_content == "I am thinking."
        one = await create(**_ask("Weather?", tools=TOOLS, parallel_tool_calls=False))
        assert len(one.choices[0].message.tool_calls) == 1


async def test_an_answer_that_is_cut_in_a_call_says_so(sdk: Any) -> None:
    async with sdk() as client:
        ask = _ask("Cut", tools=TOOLS, max_tokens=80)
        answer = await client.chat.completions.create(**ask)
        assert answer.choices[0].finish_reason == "length"
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(**ask)


async def test_a_stop_string_flushes_what_was_held_back(sdk: Any) -> None:
    async with sdk() as client:
        stopped = await client.chat.completions.create(
            **_ask("Weather?", tools=TOOLS, stop=["_call>"])
        )
        assert stopped.choices[0].message.content == "Let me look.\n<tool"
        assert stopped.choices[0].finish_reason == "stop"


async def test_log_probabilities_cover_every_token_of_every_part(sdk: Any) -> None:
    async with sdk() as client:
        ask = _ask("Weather?", tools=TOOLS, logprobs=True, top_logprobs=1)
        whole = await client.chat.completions.create(**ask)
        count = len(whole.choices[0].logprobs.content)
        assert count == whole.usage.completion_tokens
        chunks = [c async for c in await client.chat.completions.create(**ask, stream=True)]
        rows = [c.choices[0].logprobs for c in chunks]
        assert sum(len(row.content) for row in rows if row is not None) == count


async def test_a_call_can_be_demanded_of_a_model_that_would_not_make_one(sdk: Any) -> None:
    async with sdk() as client:
        for choice, names in (
            ("required", {"weather", "alarm"}),
            ({"type": "function", "function": {"name": "alarm"}}, {"alarm"}),
            (
                {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "weather"}}],
                    },
                },
                {"weather"},
            ),
        ):
            ask = _ask("Call!", tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
            answer = await client.chat.completions.create(**ask)
            message = answer.choices[0].message
            assert {call.function.name for call in message.tool_calls} <= names
            assert message.content is None
            assert answer.choices[0].finish_reason == "tool_calls"


async def test_a_structured_answer_is_parsed_by_the_sdk(sdk: Any) -> None:
    async with sdk() as client:
        for _ in range(2):
            answer = await client.chat.completions.parse(**_ask("Sun", response_format=Pet))
            assert isinstance(answer.choices[0].message.parsed, Pet)
        async with client.chat.completions.stream(**_ask("Sun", response_format=Pet)) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == answer.choices[0].message.parsed


async def test_a_model_that_thinks_first_is_held_to_the_form_only_behind_its_thought(
    sdk: Any,
) -> None:
    class Thinker(ByteTokenizer):
        answers = replace(ByteTokenizer().answers, thinks=True)  # type: ignore[assignment]

    async with sdk(tokenizer=Thinker()) as client:
        ask = _ask("Think!", response_format={"type": "json_object"}, max_tokens=400)
        answer = await client.chat.completions.create(**ask)
        message = answer.choices[0].message
        assert message.reasoning_content == "I am thinking."
        assert message.content.startswith("{")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": {"type": "thing"}},
                }
            },
            "response_format",
        ),
    ],
)
async def test_a_demand_that_cannot_be_met_is_named(
    sdk: Any, more: dict[str, Any], param: str
) -> None:
    async with sdk() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**_ask("Sun", **more))
        assert (refused.value.param, refused.value.code) == (param, "invalid_value")


async def test_a_tool_loop_goes_on_from_what_was_generated(sdk: Any) -> None:
    async with sdk() as client:
        ask = _ask("Weather?", tools=TOOLS, prompt_cache_key="s")
        first = await client.chat.completions.create(**ask)
        said = first.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in said.tool_calls
        ]
        ask["messages"] += [said.model_dump(exclude_none=True), *results]
        second = await client.chat.completions.create(**ask, max_tokens=5)
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert cached >= first.usage.prompt_tokens
