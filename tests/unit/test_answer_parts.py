"""A turn's answer comes in parts where a form was asked for, and is remembered as its client will send it back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from coordinator.requests import Finished, FinishReason, Timings, TokenDelta, Usage
from gateway.answer import Answer
from gateway.chat.byte_tokenizer import END, ByteTokenizer
from gateway.chat.conversation import template_tools
from gateway.chat.messages import Message, Tool, ToolCall
from gateway.chat.parts import AnswerForm, CallArguments, CallOpened, SaidText, Thought
from gateway.turns import TurnDelta

TOKENIZER = ByteTokenizer()
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def _answer(stop: Sequence[str] = ()) -> Answer:
    ids = (f"call_{n}" for n in itertools.count())
    tools = template_tools([Tool("f")])
    parser = TOKENIZER.answers.parser("", tools, AnswerForm(), lambda: next(ids))
    return Answer(TOKENIZER, stop, frozenset({END}), parser)


def _fed(answer: Answer, text: str, size: int) -> list[TurnDelta]:
    ids = (*TOKENIZER.encode(text), END)
    cuts = [ids[start : start + size] for start in range(0, len(ids), size)]
    deltas = [answer.feed(TokenDelta(cut)) for cut in cuts]
    rest = answer.flush()
    return deltas if rest is None else [*deltas, rest]


def _finished(answer: Answer) -> tuple[int, int]:
    usage = Usage(1, 0, 1)
    told = answer.finished(Finished(FinishReason.LENGTH, usage, Timings()))
    return told.calls, told.thought_tokens


@pytest.mark.parametrize("size", [1, 3, 500])
def test_thought_tokens_and_calls_are_counted_however_tokens_come(size: int) -> None:
    answer = _answer()
    deltas = _fed(answer, f"<think>Hm.</think>Look.\n{CALL}", size)
    assert [type(part) for delta in deltas for part in delta.parts][:1] == [Thought]
    # From the mark's last letter on, with which the thought is open, to the last of the closing one.
    assert _finished(answer) == (1, len(">Hm.</think>"))
    calls = (ToolCall("f", '{"a": 1}', "call_0"),)
    assert answer.message == Message("assistant", "Look.", tool_calls=calls, reasoning="Hm.")
    assert answer.is_shown_whole


def test_one_delta_tells_neighbours_of_a_kind_once() -> None:
    (delta,) = _fed(_answer(), f"Look.\n{CALL}", 500)
    assert delta.parts == (
        SaidText("Look."),
        CallOpened(0, "call_0", "f"),
        CallArguments(0, '{"a": 1}'),
    )


@pytest.mark.parametrize(
    ("text", "stop", "parts"),
    [
        ("Look.\n<tool_ca", "ca", [SaidText("Look."), SaidText("\n<tool_")]),
        ('<tool_call>{"na', "na", [SaidText('<tool_call>{"')]),
        (CALL, "1", [CallOpened(0, "call_0", "f"), CallArguments(0, '{"a": ')]),
        (f"{CALL}\nSTOP", "STOP", [CallOpened(0, "call_0", "f"), CallArguments(0, '{"a": 1}')]),
    ],
)
def test_what_was_held_back_is_told_at_a_stop_string(
    text: str, stop: str, parts: list[object]
) -> None:
    answer = _answer([stop])
    deltas = _fed(answer, text, 500)
    assert answer.matched == stop
    assert [part for delta in deltas for part in delta.parts] == parts
    assert _finished(answer)[0] == (stop == "STOP")
