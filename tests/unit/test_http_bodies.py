"""Bodies of all kinds become turns or a refusal that names a field: nothing else comes of a client's JSON."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.errors import InvalidValue
from gateway.http.asker import Asker
from gateway.http.fields import Fields, parse
from gateway.http.openai import chat_request
from tests.unit.wild_json import wild_bodies

_BODIES = wild_bodies(
    "model messages prompt tools tool_choice response_format n seed stop logprobs top_logprobs logit_bias max_tokens "
    "max_completion_tokens stream stream_options temperature top_p top_k min_p repetition_penalty presence_penalty "
    "frequency_penalty chat_template_kwargs prompt_cache_key user ignore_eos",
    "role content type text tool_calls function name arguments id include_usage refusal parameters 5",
    "user system assistant tool text function auto json_object",
)


@given(_BODIES)
@settings(max_examples=500)
@example({"messages": [{"role": "user", "content": [{"text": None}]}], "seed": -5})
@example({"prompt": [True]})
@example({"n": float("nan")})
@example({"logit_bias": {"5": float("inf")}})
def test_any_body_is_read_or_refused(body: dict[str, Any]) -> None:
    for read in (chat_request.chat, chat_request.completion):
        with contextlib.suppress(InvalidValue):
            asked = read(Fields(body), Asker())
            assert asked.turns


@given(st.binary(max_size=60) | _BODIES.map(lambda body: repr(body).encode()))
def test_any_bytes_are_an_object_or_refused(body: bytes) -> None:
    with contextlib.suppress(InvalidValue):
        assert isinstance(parse(body), Fields)


def test_a_field_is_named_by_its_whole_path() -> None:
    call = {"function": {"name": "f", "arguments": 3}}
    body = {"messages": [{"role": "user"}, {"role": "assistant", "tool_calls": [call]}]}
    with pytest.raises(InvalidValue) as refused:
        chat_request.chat(parse(msgspec.json.encode(body)), Asker())
    assert refused.value.field == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize("filler", [b"[],", b"{},"])
def test_millions_of_lists_are_refused_before_they_are_read(filler: bytes) -> None:
    with pytest.raises(InvalidValue, match="brackets"):
        parse(b'{"unknown":[' + filler * (1 << 20) + b"0]}")


def test_more_objects_than_a_conversation_has_are_refused_before_they_are_read() -> None:
    body = parse(b'{"messages":[' + b"{}," * 50_000 + b"{}]}")
    with pytest.raises(InvalidValue, match=r"messages: has 50001 objects"):
        chat_request.chat(body, Asker())
