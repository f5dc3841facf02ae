"""A request may ask for much, not for anything: what is beyond a bound is refused before work is done for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.errors import ContextTooLong, InvalidValue
from coordinator.requests import SamplingSpec, SessionId
from gateway import limits
from gateway.chat.messages import Message, Tool, ToolCall
from gateway.http.errors import message_of
from gateway.pb import generation_pb2 as pb
from gateway.rpc import convert
from gateway.turns import ChatPrompt, TextPrompt, TokenPrompt, TurnRequest

ASK = pb.ChatMessage(role="user")
HELLO = TurnRequest(TextPrompt("hello"))

BOUNDS = [
    ("session_id", {"session": SessionId("s" * 256)}, {"session": SessionId("s" * 257)}),
    ("stop", {"stop": ("x",) * 64}, {"stop": ("x",) * 65}),
    ("stop", {"stop": ("x" * 1024,)}, {"stop": ("x" * 1025,)}),
    ("stop_token_ids", {"stop_token_ids": (1,) * 1024}, {"stop_token_ids": (1,) * 1025}),
    (
        "logit_bias",
        {"sampling": SamplingSpec(logit_bias=((1, 1.0),) * 300)},
        {"sampling": SamplingSpec(logit_bias=((1, 1.0),) * 301)},
    ),
]


@pytest.mark.parametrize(("field", "most", "more"), BOUNDS)
def test_a_bound_is_allowed_and_one_more_is_not(
    field: str, most: dict[str, object], more: dict[str, object]
) -> None:
    limits.check_turn(replace(HELLO, **most))
    with pytest.raises(InvalidValue) as refused:
        limits.check_turn(replace(HELLO, **more))
    assert refused.value.field == field


BIG = [
    ("messages", {"messages": [ASK] * 10_001}),
    ("messages", {"messages": [pb.ChatMessage(role="user", tool_calls=[pb.ToolCall()] * 10_001)]}),
    ("tools", {"messages": [ASK], "tools": [pb.Tool()] * 1_001}),
    ("template_args", {"messages": [ASK], "template_args_json": '{"a":' + "1" * 65_536 + "}"}),
]


@pytest.mark.parametrize(("field", "chat"), BIG)
def test_counts_are_refused_before_records_are_made_of_them(
    monkeypatch: pytest.MonkeyPatch, field: str, chat: dict[str, object]
) -> None:
    monkeypatch.setattr(convert, "Message", None)
    for request in (
        pb.GenerateRequest(chat=pb.Chat(**chat)),
        pb.CountTokensRequest(chat=pb.Chat(**chat)),
    ):
        with pytest.raises(InvalidValue) as refused:
            convert.prompt(request)
        assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("stop", {"stop": ["x"] * 65}),
        ("stop_token_ids", {"stop_token_ids": [1] * 1025}),
        ("logit_bias", {"sampling": pb.Sampling(logit_bias=dict.fromkeys(range(301), 1.0))}),
    ],
)
def test_a_turns_lists_are_counted_first_as_well(field: str, more: dict[str, object]) -> None:
    with pytest.raises(InvalidValue) as refused:
        convert.turn_request(pb.GenerateRequest(text="x", **more), None)
    assert refused.value.field == field


LONG = "x" * 64 * 101
LONG_PROMPTS = [
    ChatPrompt((Message("user"),) * 2_000),
    ChatPrompt((Message("user", name=LONG),)),
    ChatPrompt((Message("tool", tool_call_id=LONG),)),
    ChatPrompt((Message("assistant", tool_calls=(ToolCall(LONG),)),)),
    ChatPrompt((Message("user"),), (Tool(LONG),)),
    ChatPrompt((Message("user"),), (Tool("f", LONG),)),
    ChatPrompt((Message("user"),), (), {"a": LONG}),
    TextPrompt(LONG),
]


@pytest.mark.parametrize("prompt", LONG_PROMPTS)
def test_every_letter_of_a_prompt_counts(prompt: ChatPrompt | TextPrompt) -> None:
    with pytest.raises(ContextTooLong, match="prompt has at least ") as refused:
        limits.check_prompt(prompt, 100)
    assert "but the prompt has at least " in message_of(refused.value)
    limits.check_prompt(prompt, 1_000)


def test_ids_are_counted() -> None:
    with pytest.raises(ContextTooLong, match="prompt has 9 tokens"):
        limits.check_prompt(TokenPrompt((1,) * 9), 8)
