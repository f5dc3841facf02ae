"""Conversations that broke other servers' templates or voided their caches: served, or refused with a reason."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from gateway.chat.boundaries import AddedTokens
from gateway.chat.byte_tokenizer import _SPECIALS, ByteTokenizer
from gateway.chat.templates import ChatRenderer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from gateway.chat.conversation import TemplateDict

ASK = {"role": "user", "content": "Weather?"}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "rain"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
MISSING = object()


def _called(arguments: object, content: object = None) -> dict[str, Any]:
    function: dict[str, object] = {"name": "weather"}
    if arguments is not MISSING:
        function["arguments"] = arguments
    calls = [{"type": "function", "id": "a", "function": function}]
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    return {key: value for key, value in message.items() if value is not MISSING}


def _takes_arguments_apart(
    messages: Sequence[TemplateDict],
    tools: Sequence[TemplateDict],
    args: Mapping[str, object],
    *,
    generate: bool,
) -> str:
    """As Qwen's templates do: arguments must be objects, and a user must have asked."""
    if not any(message["role"] == "user" for message in messages):
        raise ValueError("No user query found in messages.")
    said = [f"{tool['function']['name']}\n" for tool in tools]  # type: ignore[index]
    for message in messages:
        said.append(f"<|start|>{message['role']}\n{message['content']}")
        for call in message.get("tool_calls") or ():  # type: ignore[attr-defined]
            function = call["function"]
            pairs = [f"<{key}>{value}" for key, value in function["arguments"].items()]
            said.append(f"<call>{function['name']}{''.join(pairs)}</call>")
        said.append("<|end|>\n")
    return "".join(said) + ("<|start|>assistant\n" if generate else "")


class NativeTokenizer(ByteTokenizer):
    """A model whose template renders calls by itself."""

    def __init__(self) -> None:
        added = AddedTokens.of(_SPECIALS, _SPECIALS)
        self._renderer = ChatRenderer(_takes_arguments_apart, self.encode, added)


@pytest.fixture(params=[ByteTokenizer, NativeTokenizer])
def client(request: pytest.FixtureRequest, http: Any) -> Any:
    @asynccontextmanager
    async def make() -> AsyncIterator[Any]:
        async with http(tokenizer=request.param()) as (client, _):
            yield client

    return make


async def _chat(client: Any, *messages: object, **more: Any) -> tuple[int, Any]:
    body = {"model": "fake", "messages": messages, "max_tokens": 2, "temperature": 0, **more}
    status, _, answer = await client.post("/v1/chat/completions", body)
    return status, answer


async def _tokens(client: Any, *messages: object) -> list[int]:
    body = {"model": "fake", "messages": messages, "tools": TOOLS}
    status, _, answer = await client.post("/tokenize", body)
    assert status == 200, answer
    tokens: list[int] = answer["tokens"]
    return tokens


async def test_arguments_as_text_and_as_an_object_are_one_prompt(client: Any) -> None:
    """QwenLM/Qwen3#1894, mudler/LocalAI#10256: arguments as JSON text crash templates that take them apart."""
    async with client() as asked:
        for arguments in ('{"city": "Bern", "days": 2}', {"city": "Bern", "days": 2}):
            talk = (ASK, _called(arguments), RESULT)
            status, answer = await _chat(asked, *talk, tools=TOOLS)
            assert status == 200, answer
        as_text = await _tokens(asked, ASK, _called('{"city": "Bern", "days": 2}'), RESULT)
        parsed = await _tokens(asked, ASK, _called({"city": "Bern", "days": 2}), RESULT)
        assert as_text == parsed


@pytest.mark.parametrize("arguments", ["", "null", None, "[1]", "{bad", "3", [1], 3, {}, MISSING])
async def test_arguments_that_are_no_object_crash_nothing(client: Any, arguments: object) -> None:
    """areal-project/AReaL#1501, xorbitsai/inference#5060: models write any text where arguments ought to be."""
    async with client() as asked:
        status, answer = await _chat(asked, ASK, _called(arguments), RESULT, tools=TOOLS)
        assert status in (200, 400), answer
        if status == 400:
            assert answer["error"]["param"].startswith("messages")
        if arguments in ("", "null", None, MISSING):
            empty = await _tokens(asked, ASK, _called({}), RESULT)
            assert await _tokens(asked, ASK, _called(arguments), RESULT) == empty
        assert (await _chat(asked, ASK))[0] == 200


async def test_a_talk_without_a_user_is_served_or_refused_with_the_reason(client: Any) -> None:
    """ollama/ollama#18303, vllm-project/vllm#36432: a round of tools alone, a trimmed history, or nothing at all."""
    async with client() as asked:
        for talk in (
            (_called("{}"), RESULT),
            ({"role": "system", "content": "Be brief."},),
            (),
        ):
            status, answer = await _chat(asked, *talk, tools=TOOLS)
            assert status in (200, 400), answer
            assert status == 200 or answer["error"]["message"]
        status, answer = await _chat(asked)
        assert (status, answer["error"]["code"]) == (400, "invalid_value")


async def test_no_content_beside_calls_is_no_word(client: Any) -> None:
    """oumi-ai/oumi#2603, vortico/flama#258: null printed as "None", "" that drops the call, JSON within JSON."""
    async with client() as asked:
        prompts = [
            await _tokens(asked, ASK, _called('{"city": "Bern"}', content), RESULT)
            for content in (None, "", MISSING, [])
        ]
        assert all(prompt == prompts[0] for prompt in prompts)
        text = ByteTokenizer().decode(prompts[0], skip_special=False)
        assert "None" not in text
        assert '\\"' not in text
        assert "Bern" in text


async def test_a_rewritten_history_is_reused_up_to_where_it_parts(http: Any) -> None:
    """QwenLM/Qwen3.8#48: an empty thought in the prompt that is not in the history voids the rest of each turn.

    What there is is reused, and the turn says where it parted.
    """
    async with http(endless=True) as (asked, _):
        talk: list[Any] = [{"role": "user", "content": "A long question. " * 20}]
        more: dict[str, Any] = {"prompt_cache_key": "s", "max_tokens": 40}
        _, first = await _chat(asked, *talk, **more)
        said = first["choices"][0]["message"]["content"]
        used = first["usage"]
        talk += [{"role": "assistant", "content": said[20:]}, {"role": "user", "content": "On."}]
        body = {"model": "fake", "messages": talk, "temperature": 0, **more}
        status, headers, second = await asked.post("/v1/chat/completions", body)
        assert status == 200
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert used["prompt_tokens"] <= cached < used["total_tokens"]
        assert cached / used["prompt_tokens"] >= 1.0
        assert headers["x-ringserve-miss"] == "diverged"


async def test_the_billing_line_voids_no_row(http: Any) -> None:
    """Claude Code's first system line is another one in each request."""
    async with http() as (asked, _):

        def talk(nonce: str) -> list[Any]:
            line = f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"
            parts = [{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}]
            return [{"role": "system", "content": parts}, ASK]

        one, other = await _tokens(asked, *talk("a1")), await _tokens(asked, *talk("b2"))
        assert one == other == await _tokens(asked, {"role": "system", "content": "Be brief."}, ASK)
        joined = {"role": "system", "content": "x-anthropic-billing-header: cch=1\nBe brief."}
        assert await _tokens(asked, joined, ASK) == one
        alone = {"role": "system", "content": "x-anthropic-billing-header: cch=1"}
        assert await _tokens(asked, alone, ASK) == await _tokens(asked, ASK)
