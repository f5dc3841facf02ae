"""OpenAI's chat and completions over a real socket: shapes, streams, errors, and clients that leave."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.compat.http_client import until

HELLO = [{"role": "user", "content": "Hello"}]


Making = Any


def _chat(**more: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": HELLO, "temperature": 0, "max_tokens": 12, **more}


async def test_an_answer_has_openais_shape_and_says_what_was_reused(http: Making) -> None:
    async with http(endless=True) as (client, _):
        status, headers, answer = await client.post("/v1/chat/completions", _chat())
        assert status == 200
        assert answer["object"] == "chat.completion"
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["role"] == "assistant"
        assert answer["usage"]["completion_tokens"] == 12
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert headers["x-ringserve-cached-prefix"] == "0"
        again = await client.post("/v1/chat/completions", _chat(), x_request_id="mine")
        assert again[1]["x-request-id"] == "mine"
        cached = again[2]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == answer["usage"]["prompt_tokens"], "an exact resend computes nothing"
        assert again[2]["choices"][0]["message"] == choice["message"]


async def test_a_stream_says_the_same_in_pieces(http: Making) -> None:
    async with http(endless=True) as (client, _):
        _, _, whole = await client.post("/v1/chat/completions", _chat())
        body = _chat(stream=True, stream_options={"include_usage": True})
        *chunks, last = await client.events("/v1/chat/completions", body)
        assert last == "[DONE]"
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        said = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
        assert said == whole["choices"][0]["message"]["content"]
        reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 12


async def test_plain_completions_take_text_and_token_ids(http: Making) -> None:
    async with http(endless=True) as (client, _):
        _, _, tokens = await client.post("/tokenize", {"prompt": "One two"})
        assert tokens["count"] == len(tokens["tokens"])
        _, _, back = await client.post("/detokenize", {"tokens": tokens["tokens"]})
        assert back["prompt"].endswith("One two")
        asked = {"prompt": "One two", "max_tokens": 5, "temperature": 0}
        by_text = await client.post("/v1/completions", asked)
        by_ids = await client.post("/v1/completions", {**asked, "prompt": tokens["tokens"]})
        assert by_text[2]["choices"][0]["text"] == by_ids[2]["choices"][0]["text"] != ""
        events = await client.events("/v1/completions", {**asked, "stream": True})
        assert (
            "".join(e["choices"][0]["text"] for e in events[:-1])
            == by_text[2]["choices"][0]["text"]
        )


async def test_several_choices_have_seeds_of_their_own(http: Making) -> None:
    async with http(endless=True) as (client, _):
        body = _chat(n=3, temperature=1.0, seed=5)
        _, _, answer = await client.post("/v1/chat/completions", body)
        said = [choice["message"]["content"] for choice in answer["choices"]]
        assert len(set(said)) == 3
        _, _, again = await client.post("/v1/chat/completions", body)
        assert [choice["message"]["content"] for choice in again["choices"]] == said
        events = await client.events("/v1/chat/completions", {**body, "stream": True})
        for index in range(3):
            pieces = [c for e in events[:-1] for c in e["choices"] if c["index"] == index]
            assert "".join(c["delta"].get("content", "") for c in pieces) == said[index]


async def test_log_probabilities_come_for_every_token(http: Making) -> None:
    async with http(endless=True) as (client, _):
        body = _chat(logprobs=True, top_logprobs=2, max_tokens=3)
        _, _, answer = await client.post("/v1/chat/completions", body)
        rows = answer["choices"][0]["logprobs"]["content"]
        assert len(rows) == 3
        assert all(len(row["top_logprobs"]) == 2 and row["logprob"] <= 0 for row in rows)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": "x"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**30}, "n"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 999}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_a_wrong_value_is_named(http: Making, changes: dict[str, Any], param: str) -> None:
    async with http() as (client, _):
        for stream in ({}, {"stream": True}):
            status, headers, answer = await client.post(
                "/v1/chat/completions", _chat(**{**stream, **changes})
            )
            assert (status, answer["error"]["param"]) == (400, param), answer
            assert answer["error"]["type"] == "invalid_request_error"
            assert headers["x-should-retry"] == "false"


async def test_unknown_fields_and_nulls_do_no_harm(http: Making) -> None:
    names = ("stop", "n", "seed", "tools", "tool_choice", "logit_bias", "stream_options", "user")
    body = _chat(**dict.fromkeys(names), reasoning={"effort": "high"}, cache_control=[1])
    async with http(endless=True) as (client, _):
        status, _, answer = await client.post("/v1/chat/completions", body)
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'{"messages": "\\ud800"}', b"[" * 9999]
)
async def test_what_is_no_json_object_is_refused(http: Making, body: bytes) -> None:
    async with http() as (client, _):
        status, _, answer = await client.post("/v1/chat/completions", body)
        assert status == 400
        assert answer["error"]["code"] == "invalid_value"


async def test_a_prompt_that_is_too_long_is_told_so_before_the_stream_begins(http: Making) -> None:
    async with http() as (client, _):
        long = [{"role": "user", "content": "x" * 3000}]
        body = _chat(messages=long, stream=True)
        status, _, answer = await client.post("/v1/chat/completions", body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 2048 tokens" in answer["error"]["message"]


async def test_other_models_paths_and_sizes_are_refused(http: Making) -> None:
    async with http(max_body_bytes=1000) as (client, _):
        assert (await client.post("/v1/chat/completions", _chat(model="gpt")))[0] == 404
        assert (await client.post("/v1/nothing", {}))[0] == 404
        assert (await client.post("/v1/models", {}))[0] == 405
        status, _, answer = await client.post("/v1/chat/completions", b" " * 2000)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")


async def test_a_full_queue_says_when_to_come_again(http: Making) -> None:
    async with http(endless=True, step_s=0.05, queue_limit=1) as (client, fake):
        opened = [
            await client.opened("POST", "/v1/chat/completions", _chat(max_tokens=400, stream=True))
            for _ in range(5)
        ]
        await until(lambda: fake.driver.status().waiting_jobs == 1)
        status, headers, answer = await client.post("/v1/chat/completions", _chat())
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers["retry-after"]) >= 1
        for _, writer in opened:
            writer.close()
        await until(lambda: fake.driver.status().busy_lanes == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_cancels(http: Making, stream: bool) -> None:
    async with http(endless=True, step_s=0.01) as (client, fake):
        body = _chat(max_tokens=1500, stream=stream)
        for _ in range(5):
            _, writer = await client.opened("POST", "/v1/chat/completions", body)
            await until(lambda: fake.driver.status().busy_lanes == 1)
            writer.close()
            await until(lambda: fake.driver.status().busy_lanes == 0)


async def test_a_session_keeps_what_it_said(http: Making) -> None:
    async with http(endless=True) as (client, _):
        first = await client.post("/v1/chat/completions", _chat(), x_session_id="s")
        said = first[2]["choices"][0]["message"]
        talk = [*HELLO, said, {"role": "user", "content": [{"type": "text", "text": "And?"}]}]
        _, headers, answer = await client.post(
            "/v1/chat/completions", _chat(messages=talk), x_session_id="s"
        )
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= first[2]["usage"]["total_tokens"] - 1
        assert "x-ringserve-miss" not in headers


async def test_operators_can_ask(http: Making) -> None:
    async with http() as (client, _):
        for path in ("/health", "/ready", "/version", "/v1/models", "/v1/models/fake"):
            status, _, raw = await client.ask("GET", path)
            assert status == 200, path
            assert json.loads(raw)
    async with http(start=False) as (client, _):
        assert (await client.ask("GET", "/health"))[0] == 200
        assert (await client.ask("GET", "/ready"))[0] == 503
        status, headers, _ = await client.post("/v1/chat/completions", _chat())
        assert status == 503
        assert "retry-after" in headers
