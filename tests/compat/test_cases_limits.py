"""Public faults about limits and stops, over HTTP in all dialects: null fields, long prompts, huge limits, stops."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from gateway.chat.byte_tokenizer import ByteTokenizer
from tests.compat.conftest import MAX_ROWS

if TYPE_CHECKING:
    from tests.compat.http_client import Http

Making = Any

CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
PATHS = (CHAT, TEXT, RESPONSES, MESSAGES)
# Tokens that the fake ring's template puts around one user message, with the answer's opening.
FRAME = len(ByteTokenizer().encode("<|start|>user\n<|end|>\n<|start|>assistant\n"))


def asking(path: str, text: str, limit: int | None = 4, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    match path:
        case "/v1/completions":
            return {"prompt": text, "max_tokens": limit, "temperature": 0, **more}
        case "/v1/responses":
            return {"input": text, "max_output_tokens": limit, "temperature": 0, **more}
    return {"messages": messages, "max_tokens": limit, "temperature": 0, **more}


def prompt_of(path: str, tokens: int) -> str:
    """A text whose prompt has that many tokens: the fake model's are bytes."""
    return "x" * (tokens if path == TEXT else tokens - FRAME)


def prompt_tokens(path: str, answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    if path == MESSAGES:
        return int(usage["input_tokens"]) + int(usage["cache_read_input_tokens"])
    return int(usage["input_tokens"] if path == RESPONSES else usage["prompt_tokens"])


def generated(path: str, answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    return int(usage["output_tokens" if path in (RESPONSES, MESSAGES) else "completion_tokens"])


NULLS = {
    CHAT: "model tools tool_choice parallel_tool_calls response_format n seed stop logprobs top_logprobs logit_bias "
    "max_tokens max_completion_tokens stream stream_options temperature top_p top_k min_p repetition_penalty "
    "presence_penalty frequency_penalty chat_template_kwargs prompt_cache_key user ignore_eos metadata "
    "reasoning_effort",
    TEXT: "model n seed stop logprobs logit_bias max_tokens stream stream_options temperature top_p top_k min_p suffix "
    "echo presence_penalty frequency_penalty user",
    RESPONSES: "model instructions tools tool_choice parallel_tool_calls max_output_tokens temperature top_p text "
    "reasoning store stream include metadata prompt_cache_key previous_response_id truncation user background",
    MESSAGES: "model system tools tool_choice temperature top_p top_k stop_sequences stream metadata thinking "
    "service_tier container",
}


@pytest.mark.parametrize("path", PATHS)
async def test_null_is_as_good_as_absent_in_every_optional_field(http: Making, path: str) -> None:
    """vllm-project/vllm#19862: max_tokens null was an internal error."""
    async with http() as (client, _):
        for field in NULLS[path].split():
            status, _, answer = await client.post(path, {**asking(path, "Hi"), field: None})
            assert status == 200, (field, answer)


@pytest.mark.parametrize("path", PATHS)
async def test_no_tokens_are_refused_and_one_is_one(http: Making, path: str) -> None:
    """vllm-project/vllm#19862, and the turn behind an answer that was cut goes on warm."""
    async with http(endless=True) as (client, _):
        status, _, none = await client.post(path, asking(path, "Hi", 0))
        # Anthropic's clients warm a prompt up with it.
        assert (status, generated(path, none)) == (200, 0) if path == MESSAGES else status == 400
        status, _, one = await client.post(path, asking(path, "Hi", 1))
        assert status == 200
        assert generated(path, one) == 1
        reason = {
            CHAT: lambda a: a["choices"][0]["finish_reason"] == "length",
            TEXT: lambda a: a["choices"][0]["finish_reason"] == "length",
            RESPONSES: lambda a: a["incomplete_details"] == {"reason": "max_output_tokens"},
            MESSAGES: lambda a: a["stop_reason"] == "max_tokens",
        }[path]
        assert reason(one)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_prompt_is_measured_before_anything_is_sent(
    http: Making, path: str, *, streamed: bool
) -> None:
    """vllm-project/vllm#765, #1543, #33418, ikawrakow/ik_llama.cpp#2051, oobabooga/textgen#7257."""
    async with http(endless=True) as (client, _):
        fits = asking(path, prompt_of(path, MAX_ROWS - 1), None if path != MESSAGES else 10**9)
        status, _, answer = await client.post(path, fits)
        assert (status, prompt_tokens(path, answer)) == (200, MAX_ROWS - 1)
        for tokens in (MAX_ROWS + 1, 10 * MAX_ROWS):
            body = asking(path, prompt_of(path, tokens), stream=streamed)
            status, headers, answer = await client.post(path, body)
            error = answer["error"]
            assert status == 400
            assert headers["x-should-retry"] == "false"
            assert str(tokens) in error["message"], "how long it is"
            assert str(MAX_ROWS) in error["message"], "and how long it may be"
            if path == MESSAGES:
                assert error["type"] == "invalid_request_error"
                assert error["message"].startswith("prompt is too long")
            else:
                assert error["code"] == "context_length_exceeded"
                assert f"maximum context length is {MAX_ROWS} tokens" in error["message"]
        assert (await client.post(path, asking(path, "Hi")))[0] == 200, "the server goes on"


@pytest.mark.parametrize("path", PATHS)
async def test_a_limit_beyond_all_rows_ends_at_the_last_row(http: Making, path: str) -> None:
    """vllm-project/vllm#765: a huge max_tokens ended the engine."""
    async with http(endless=True) as (client, _):
        body = asking(path, prompt_of(path, MAX_ROWS - 50), 10**9)
        status, _, answer = await client.post(path, body)
        assert status == 200
        assert generated(path, answer) in (50, 51), "the last token needs no row"


async def _whole(client: Http, path: str, **more: Any) -> str:
    _, _, answer = await client.post(path, asking(path, "Hello", 60, **more))
    choice = answer["choices"][0]
    return str(choice["text"] if path == TEXT else choice["message"]["content"])


async def _streamed(client: Http, path: str, **more: Any) -> str:
    chunks = await client.events(path, asking(path, "Hello", 60, stream=True, **more))
    choices = [chunk["choices"][0] for chunk in chunks if chunk != "[DONE]"]
    return "".join(
        choice["text"] if path == TEXT else choice["delta"].get("content") or ""
        for choice in choices
    )


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_stop_string_over_several_tokens_is_never_seen(http: Making, path: str) -> None:
    """SharpAI/SwiftLM#126, #133, mzau/mlx-knife#68: each of the fake model's tokens is one letter."""
    async with http(endless=True) as (client, _):
        text = await _whole(client, path)
        for start, end in ((20, 29), (1, 3), (40, 60)):
            stop = text[start:end]
            before = text[: text.index(stop)]
            assert await _whole(client, path, stop=stop) == before
            assert await _streamed(client, path, stop=["nowhere", stop]) == before
        assert json.dumps(await _streamed(client, path, stop="~~~")) == json.dumps(text)
