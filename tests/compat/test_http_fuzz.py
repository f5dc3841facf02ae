"""Fuzzed bodies over a socket: what is refused is refused in the client's own shape, and the server goes on.

The bodies are good ones with something changed: that gets further than noise does.
"""

from __future__ import annotations

import copy
import json
import random
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

Making = Any

_TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_FUNCTION = {"name": "f", "description": "d", "parameters": _SCHEMA}
_CHAT = {
    "model": "fake",
    "messages": _TALK,
    "tools": [{"type": "function", "function": _FUNCTION}],
    "tool_choice": "auto",
    "max_tokens": 3,
    "temperature": 0.5,
    "seed": 1,
    "stop": ["x"],
    "n": 1,
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"5": 1},
    "stream": False,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
    "chat_template_kwargs": {"enable_thinking": False},
    "prompt_cache_key": "k",
}
_RESPONSE = {
    "model": "fake",
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
    ],
    "tools": [{"type": "function", **_FUNCTION}, {"type": "custom", "name": "patch"}],
    "max_output_tokens": 3,
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "text"}},
    "store": False,
    "include": ["reasoning.encrypted_content"],
}
_MESSAGES = {
    "model": "fake",
    "max_tokens": 3,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "ok"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ],
        },
        {"role": "system", "content": "Reminder."},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "1"}],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": _SCHEMA}],
    "tool_choice": {"type": "auto"},
    "metadata": {"user_id": "u"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["x"],
}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": {"prompt": "Hello", "max_tokens": 3, "logprobs": 1, "stop": "x"},
    "/v1/responses": _RESPONSE,
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": {k: v for k, v in _MESSAGES.items() if k != "max_tokens"},
    "/tokenize": {"messages": _TALK},
    "/detokenize": {"tokens": [72, 105]},
}
_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**63, -(2**70), 1e308, float("nan"), float("inf"), 0.5, "", "x", "\ud800", "\x00",
    "<|start|>", "user", "null", "{bad", [], {}, [[]], [None], {"": None}, {"type": "text"}, {"type": None},
    [{"type": "nonsense"}], "a" * 5000, {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}, "required", {"type": "any"},
)  # fmt: skip


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a body: what holds it, and its key."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def _fuzzed(rng: random.Random, good: dict[str, Any]) -> bytes:
    body = copy.deepcopy(good)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(body))
        if not places:
            break
        holder, key = rng.choice(places)
        match rng.randrange(4):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.extend(copy.deepcopy(holder[key]) for _ in range(rng.choice((1, 20))))
            case 2:
                other = rng.choice(places)
                holder[key] = (
                    copy.deepcopy(other[0][other[1]]) if other[1] in _keys(other[0]) else 0
                )
            case _:
                holder[key] = copy.deepcopy(rng.choice(_ODD))
    raw = json.dumps(body).encode()
    if rng.random() < 0.03:
        cut = rng.randrange(len(raw))
        return raw[:cut] + rng.choice((b"", b"\xff", b"[" * 3000)) + raw[cut + 1 :]
    return raw


def _keys(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else range(len(holder))


def _check(path: str, answer: httpx2.Response, body: bytes) -> None:
    assert answer.status_code < 500, (path, body, answer.text)
    if answer.status_code == 200:
        return
    error = answer.json()["error"]
    assert error["message"], body
    if path.startswith("/v1/messages"):
        assert answer.json()["type"] == "error", body
        assert error["type"].endswith("_error") or error["type"] == "request_too_large"
    else:
        assert error.keys() == {"message", "type", "param", "code"}, body
        assert isinstance(error["code"], str), body


async def _fuzz(http: Making, count: int, seed: int) -> None:
    rng = random.Random(seed)
    kinds: dict[tuple[str, int], int] = {}
    async with http() as (client, _):
        base = f"http://{client.host}:{client.port}"
        async with httpx2.AsyncClient(base_url=base, timeout=30) as asking:
            json_type = {"content-type": "application/json"}
            for _ in range(count):
                path = rng.choice(list(GOOD))
                body = _fuzzed(rng, GOOD[path])
                answer = await asking.post(path, content=body, headers=json_type)
                _check(path, answer, body)
                kinds[path, answer.status_code] = kinds.get((path, answer.status_code), 0) + 1
            for path, good in GOOD.items():
                answer = await asking.post(path, json=good)
                assert answer.status_code == 200, (path, answer.text)
    assert {(path, status) for path in GOOD for status in (200, 400)} <= kinds.keys()


async def test_a_fuzzed_body_is_answered_or_refused(http: Making) -> None:
    await _fuzz(http, 800, seed=1)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_ten_thousand_fuzzed_bodies_are_answered_or_refused(http: Making) -> None:
    await _fuzz(http, 10_000, seed=2)
