"""Answer parts become Anthropic's blocks: the same ones in a stream's events and in a whole message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from coordinator.errors import (
    ContextTooLong,
    DeadlineExceeded,
    QueueFull,
    RateLimited,
    RingUnavailable,
)
from coordinator.requests import FinishReason, Timings, Usage
from gateway.chat.parts import AnswerPart, CallArguments, CallOpened, SaidText, Thought
from gateway.http.anthropic import content, request
from gateway.http.anthropic.answer import Answering
from gateway.http.anthropic.errors import ANTHROPIC
from gateway.http.anthropic.stream import MessageStream
from gateway.http.asker import Asker
from gateway.http.errors import error_response
from gateway.http.fields import Fields
from gateway.http.streaming import Collected, Told
from gateway.turns import TurnDelta, TurnEvent, TurnFinished, TurnStarted

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
STARTED = TurnStarted(100, 90, None, "ring-0", 0, 0)
PARTS: tuple[AnswerPart, ...] = (
    Thought("Where "),
    Thought("is it?"),
    SaidText("I "),
    SaidText("look."),
    CallOpened(0, "call_a", "look"),
    CallArguments(0, '{"at": '),
    CallArguments(0, "[1]}"),
    CallOpened(1, "call_b", "stop"),
)


def answering(**more: Any) -> Answering:
    body = {"max_tokens": 20, "messages": [{"role": "user", "content": "x"}], **more}
    return Answering("m", request.asked(Fields(body), Asker()))


def finished(
    reason: FinishReason = FinishReason.STOP,
    matched: str | int | None = 2,
    generated: int = 9,
    calls: int = 0,
) -> TurnFinished:
    return TurnFinished(reason, matched, Usage(100, 90, generated), Timings(), calls, 4)


def whole(
    parts: tuple[AnswerPart, ...], ended: TurnFinished | None = None, **more: Any
) -> dict[str, Any]:
    deltas = tuple(TurnDelta(parts=(part,)) for part in parts)
    told = answering(**more).whole(Collected(STARTED, deltas, ended or finished()))
    Message.model_validate(told, strict=True)
    return told


def streamed(
    parts: tuple[AnswerPart, ...], ended: TurnFinished | None = None, **more: Any
) -> list[dict[str, Any]]:
    wire = MessageStream(answering(**more))
    events: list[TurnEvent] = [
        STARTED,
        *(TurnDelta(parts=(part,)) for part in parts),
        ended or finished(),
    ]
    sent = b"".join(wire.said(Told(0, event)) for event in events) + wire.ended()
    return [_event(each) for each in sent.decode().split("\n\n") if each]


def _event(lines: str) -> dict[str, Any]:
    name, data = lines.split("\n")
    event: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert name == f"event: {event['type']}"
    if event["type"] != "ping":
        EVENT.validate_python(event)
    return event


def test_thoughts_text_and_calls_are_blocks_in_the_order_they_came() -> None:
    assert whole(PARTS)["content"] == [
        {"type": "thinking", "thinking": "Where is it?", "signature": "ringserve"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_a", "name": "look", "input": {"at": [1]}},
        {"type": "tool_use", "id": "call_b", "name": "stop", "input": {}},
    ]


def test_a_stream_opens_fills_and_closes_one_block_after_the_other() -> None:
    kinds = [
        (each["type"], each.get("index"), each.get("delta", {}).get("type"))
        for each in streamed(PARTS)
    ]
    text, thought = ("content_block_delta", 1, "text_delta"), "thinking_delta"
    assert kinds == [
        ("message_start", None, None),
        ("ping", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, thought),
        ("content_block_delta", 0, thought),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        text,
        text,
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("content_block_start", 3, None),
        ("content_block_stop", 3, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]


def test_usage_counts_what_was_reused_apart() -> None:
    read = {
        "input_tokens": 10,
        "cache_read_input_tokens": 90,
        "cache_creation_input_tokens": 0,
    }
    opened = {**read, "output_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}
    ended = {**read, "output_tokens": 9, "output_tokens_details": {"thinking_tokens": 4}}
    events = streamed(PARTS)
    assert events[0]["message"]["usage"] == opened
    assert events[-2]["usage"] == whole(PARTS)["usage"] == ended
    assert events[-2]["timings"] == whole(PARTS)["timings"]


@pytest.mark.parametrize(
    ("ended", "reason", "sequence"),
    [
        (finished(), "end_turn", None),
        (finished(matched=None), "end_turn", None),
        (finished(matched="END"), "stop_sequence", "END"),
        (finished(calls=1), "tool_use", None),
        (finished(matched="END", calls=1), "tool_use", None),
        (finished(FinishReason.LENGTH, None, generated=20), "max_tokens", None),
        (finished(FinishReason.LENGTH, None, generated=20, calls=1), "max_tokens", None),
        (finished(FinishReason.LENGTH, None, generated=9), "model_context_window_exceeded", None),
    ],
)
def test_the_reason_for_the_end_is_told(
    ended: TurnFinished, reason: str, sequence: str | None
) -> None:
    told = {"stop_reason": reason, "stop_sequence": sequence}
    assert streamed(PARTS, ended)[-2]["delta"] == told
    assert {name: whole(PARTS, ended)[name] for name in told} == told


@pytest.mark.parametrize("text", ['{"at": ', "[1]", "look", '{"at": "\\x"}'])
def test_arguments_that_are_no_object_are_kept_as_text_and_come_back_so(text: str) -> None:
    parts = (CallOpened(0, "a", "look"), CallArguments(0, text))
    (block,) = whole(parts)["content"]
    assert block["input"] == {"_raw": text}
    history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [block]}]
    *_, message = content.messages(Fields({"messages": history}))
    assert message.tool_calls[0].arguments == text


def test_thoughts_that_nobody_wants_to_see_go_into_the_signature() -> None:
    hidden = {"type": "adaptive", "display": "omitted"}
    block, *_ = whole(PARTS, thinking=hidden)["content"]
    assert block["thinking"] == ""
    history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [block]}]
    *_, message = content.messages(Fields({"messages": history}))
    assert message.reasoning == "Where is it?"
    assert "thinking_delta" not in str(streamed(PARTS, thinking=hidden))


def test_a_prompt_that_was_only_read_has_no_answer() -> None:
    told = whole(PARTS, max_tokens=0)
    assert (told["content"], told["usage"]["output_tokens"]) == ([], 0)
    assert told["stop_reason"] == "max_tokens"
    assert len(streamed(PARTS, max_tokens=0)) == 4


_PARTS = st.lists(
    st.one_of(
        st.sampled_from(["", " ", "\n", "a", "b "]).map(SaidText),
        st.sampled_from(["", "c", "d"]).map(Thought),
        st.builds(CallOpened, st.just(0), st.just("id"), st.just("look")),
    ),
    max_size=8,
).map(tuple)


@given(_PARTS)
def test_a_stream_spells_the_whole_message(parts: tuple[AnswerPart, ...]) -> None:
    blocks: list[dict[str, Any]] = []
    for event in streamed(parts):
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                for name in set(event["delta"]) - {"type"}:
                    blocks[-1][name] += event["delta"][name]
    assert blocks == whole(parts)["content"]


def test_silence_is_a_ping_and_an_error_ends_a_stream_in_band() -> None:
    wire = MessageStream(answering())
    assert wire.silent() == b'event: ping\ndata: {"type":"ping"}\n\n'
    name, data = wire.failed(DeadlineExceeded(), "r1").decode().strip().split("\n")
    assert name == "event: error"
    told = json.loads(data.removeprefix("data: "))
    assert (told["type"], told["error"]["type"], told["request_id"]) == ("error", "api_error", "r1")


def test_errors_have_the_statuses_and_words_that_agents_act_on() -> None:
    over = ContextTooLong(prompt_tokens=210_000, limit=200_000)
    said = ANTHROPIC.body(over, "r")["error"]
    assert said["type"] == "invalid_request_error"
    assert said["message"] == "prompt is too long: 210000 tokens > 200000 maximum"
    assert ANTHROPIC.status(over) == 400
    loading = RingUnavailable("loading")
    full = QueueFull(waiting=3, retry_after_s=2.5)
    for error, status, kind in (
        (loading, 529, "overloaded_error"),
        (full, 529, "overloaded_error"),
        (RateLimited(what="jobs", limit=1, retry_after_s=1.0), 429, "rate_limit_error"),
        (ValueError("secret"), 500, "api_error"),
    ):
        response = error_response(error, "r", ANTHROPIC)
        told = json.loads(bytes(response.body))
        assert (response.status_code, told["error"]["type"]) == (status, kind)
        assert response.headers["request-id"] == told["request_id"] == "r"
        assert ("retry-after" in response.headers) == (status in (429, 529))
        assert "secret" not in told["error"]["message"]
