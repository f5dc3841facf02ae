"""The events of a response: their order, their places, and that what they tell adds up to the items."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.errors import ContextTooLong, QueueFull, StageLost
from coordinator.requests import FinishReason, Timings, Usage
from gateway.chat.parts import AnswerPart, CallArguments, CallOpened, SaidText, Thought
from gateway.http.asker import Asker
from gateway.http.carried import carried
from gateway.http.fields import Fields
from gateway.http.openai.responses.answer import Answering
from gateway.http.openai.responses.freetext import FreeText
from gateway.http.openai.responses.items import Output
from gateway.http.openai.responses.request import response
from gateway.http.openai.responses.stream import ResponseStream
from gateway.http.streaming import Told
from gateway.turns import TurnDelta, TurnFinished, TurnStarted

STARTED = TurnStarted(10, 4, None, "ring-0", 0, 1)
PATCH = '*** Begin Patch\n"x" → \\n 🧠\n'


def _done(reason: FinishReason = FinishReason.STOP) -> TurnFinished:
    return TurnFinished(reason, None, Usage(10, 4, 7), Timings(), calls=1, thought_tokens=2)


def _stream() -> ResponseStream:
    body = {
        "input": "Hi",
        "tools": [{"type": "custom", "name": "apply_patch"}],
        "include": ["reasoning.encrypted_content"],
    }
    asked = response(Fields(body), Asker())
    return ResponseStream(Answering("m", 1, asked), Output(asked.own, seals=asked.seals))


def _events(sent: bytes) -> list[dict[str, Any]]:
    events = []
    for block in sent.decode().split("\n\n")[:-1]:
        name, line = block.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def _told(*parts: AnswerPart, reason: FinishReason = FinishReason.STOP) -> list[dict[str, Any]]:
    wire = _stream()
    sent = wire.said(Told(0, STARTED))
    for part in parts:
        sent += wire.said(Told(0, TurnDelta(parts=(part,))))
    sent += wire.said(Told(0, _done(reason))) + wire.ended()
    events = _events(sent)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def _kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_plain_text_has_the_nine_events_that_clients_know() -> None:
    events = _told(SaidText("Hel"), SaidText("lo"))
    assert _kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]]
    assert last["output"][0]["content"] == [
        {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    ]
    assert last["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 6},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 17,
    }


def test_thoughts_text_and_calls_are_items_in_their_order() -> None:
    args = json.dumps({"input": PATCH})
    events = _told(
        Thought("Hm"),
        Thought("m."),
        SaidText("I call."),
        CallOpened(0, "call_1", "shell"),
        CallArguments(0, '{"a":'),
        CallArguments(0, "1}"),
        CallOpened(1, "call_2", "apply_patch"),
        CallArguments(1, args[:30]),
        CallArguments(1, args[30:]),
    )
    thought, said, call, patch = events[-1]["response"]["output"]
    assert [event["item"] for event in events if event["type"].endswith("item.done")] == [
        thought,
        said,
        call,
        patch,
    ]
    assert [event["output_index"] for event in events if "item" in event] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]
    assert thought["summary"] == [{"type": "summary_text", "text": "Hmm."}]
    assert carried(thought["encrypted_content"]) == "Hmm."
    assert said["content"][0]["text"] == "I call."
    assert (call["call_id"], call["name"], call["arguments"]) == ("call_1", "shell", '{"a":1}')
    assert (patch["type"], patch["call_id"], patch["input"]) == (
        "custom_tool_call",
        "call_2",
        PATCH,
    )
    assert {item["status"] for item in (thought, said, call, patch)} == {"completed"}
    for kind, whole in (("function_call_arguments", '{"a":1}'), ("custom_tool_call_input", PATCH)):
        deltas = [each["delta"] for each in events if each["type"] == f"response.{kind}.delta"]
        assert "".join(deltas) == whole
        assert len(deltas) > 1
    indexes = [each["summary_index"] for each in events if "reasoning_summary" in each["type"]]
    assert indexes == [0] * 5


def test_a_cut_answer_is_incomplete_and_so_is_its_open_item() -> None:
    events = _told(
        SaidText("a"),
        CallOpened(0, "call_1", "f"),
        CallArguments(0, "{"),
        reason=FinishReason.LENGTH,
    )
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]


def test_an_empty_answer_is_an_empty_message() -> None:
    """So that it stands in the next turn's input as it stands in the lane's rows."""
    (item,) = _told()[-1]["response"]["output"]
    assert (item["role"], item["content"][0]["text"]) == ("assistant", "")


def test_failures_have_the_codes_that_codex_acts_on() -> None:
    def code(error: Exception) -> tuple[str, str]:
        events = _events(_stream().failed(error, "r"))
        assert _kinds(events) == ["created", "in_progress", "failed"]
        said = events[-1]["response"]["error"]
        return said["code"], said["message"]

    assert code(ContextTooLong(prompt_tokens=9, limit=8))[0] == "context_length_exceeded"
    name, message = code(QueueFull(waiting=3, retry_after_s=2.5))
    assert (name, "try again in 2.5s" in message) == ("rate_limit_exceeded", True)
    assert code(StageLost("gone"))[0] == "server_error"
    assert code(RuntimeError("a secret")) == ("server_error", "internal error")


def test_a_failure_keeps_what_was_said_and_silence_is_an_event() -> None:
    wire = _stream()
    first = _events(wire.silent())
    assert _kinds(first) == ["created", "in_progress"]
    assert wire.said(Told(0, STARTED)) == b""
    wire.said(Told(0, TurnDelta(parts=(SaidText("half"),))))
    assert _kinds(_events(wire.silent())) == ["in_progress"]
    failed = _events(wire.failed(StageLost("gone"), "r"))[-1]["response"]
    assert (failed["status"], failed["output"][0]["content"][0]["text"]) == ("failed", "half")


@given(st.text(max_size=40), st.booleans(), st.data())
def test_a_free_text_comes_out_as_it_was_put_in(
    text: str, plain: bool, data: st.DataObject
) -> None:
    raw = json.dumps({"input": text}, ensure_ascii=plain)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=6)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    free = FreeText()
    told = "".join(free.feed(piece) for piece in pieces) + free.flush()
    assert told == free.text == text


def test_other_arguments_than_one_string_are_the_text_themselves() -> None:
    def read(raw: str) -> str:
        free = FreeText()
        return free.feed(raw) + free.flush()

    assert read('{"patch": "x"}') == "x"
    assert read('"x"') == "x"
    assert read('{"a": 1}') == '{"a": 1}'
    assert read("*** Begin Patch") == "*** Begin Patch"
    assert read("") == ""
    assert read(r'{"input": "a\qb"}') == r"a\qb"


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (r'{"input": "a\ud83db c"}', "a\ufffdb c"),
        (r'{"input": "a\ude00b\ud83d\ude00c"}', "a\ufffdb😀c"),
        (r'{"input": "a\ud83d', "a\ufffd"),
        (r'{"input": "a\ud8', "a"),
        (r'{"input": "a\uzzzzb"}', r"a\uzzzzb"),
        (r'{"text": "a\ud83db"}', "a\ufffdb"),
    ],
)
def test_nothing_behind_half_a_character_is_lost(raw: str, text: str) -> None:
    for piece in (1, len(raw)):
        free = FreeText()
        told = [free.feed(raw[at : at + piece]) for at in range(0, len(raw), piece)]
        assert "".join(told) + free.flush() == free.text == text
