"""Answers are taken apart the same way however they are cut, and nothing in them is lost."""

from __future__ import annotations

import itertools
import json
import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.chat.parsing.tagged import BARE, TOOL_CALL, Marks, TaggedParser
from gateway.chat.parsing.writer import PartsWriter, merged
from gateway.chat.parts import (
    AnswerPart,
    CallArguments,
    CallOpened,
    SaidText,
    Thought,
    message_of,
)

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
# What answers are made of, whole and broken.
PIECES = st.sampled_from(
    [
        "Hello",
        "\n",
        "\n\n",
        " ",
        "{",
        "}",
        '"',
        "<",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        CALL,
        '<tool_call>{"arguments": {"a": [1, {"b": "}\\""}]}, "name": "y"}</tool_call>',
        '<tool_call>[{"name":"p","parameters":null},{"name":"q"}]</tool_call>',
        '{"name": "z", "arguments": ',
        '"arguments": "{}"',
        "né ☃",
    ]
)
ANSWERS = st.lists(PIECES, max_size=12).map("".join)


def _parser(
    *,
    thinking: bool = False,
    parallel: bool = True,
    call: Marks | None = TOOL_CALL,
    demanded: bool = False,
) -> TaggedParser:
    ids = (f"call_{n}" for n in itertools.count())
    writer = PartsWriter(lambda: next(ids), parallel=parallel)
    return TaggedParser(writer, thinking=thinking, call=call, demanded=demanded)


def _parts(parser: TaggedParser, *pieces: str) -> tuple[AnswerPart, ...]:
    told = [part for piece in pieces for part in parser.feed(piece)]
    return merged([*told, *parser.flush()])


def _said(parts: tuple[AnswerPart, ...]) -> str:
    return "".join(part.text for part in parts if isinstance(part, SaidText))


@given(ANSWERS, st.lists(st.integers(0, 300)), st.booleans(), st.booleans())
def test_any_cut_gives_the_same_parts(
    answer: str, cuts: list[int], thinking: bool, parallel: bool
) -> None:
    whole = _parser(thinking=thinking, parallel=parallel)
    places = sorted({0, *(cut for cut in cuts if cut < len(answer)), len(answer)})
    cut = _parser(thinking=thinking, parallel=parallel)
    pieces = [answer[start:end] for start, end in itertools.pairwise(places)]
    assert _parts(cut, *pieces) == _parts(whole, answer)
    assert cut.calls == whole.calls
    letters = _parser(thinking=thinking, parallel=parallel)
    assert _parts(letters, *answer) == _parts(_parser(thinking=thinking, parallel=parallel), answer)


@given(ANSWERS, st.booleans())
def test_no_letter_is_lost_but_marks_and_what_a_call_is_written_in(
    answer: str, thinking: bool
) -> None:
    """Each letter that a client can read stands in some part, in the answer's order."""
    parts = _parts(_parser(thinking=thinking), answer)
    told = "".join(part.name if isinstance(part, CallOpened) else part.text for part in parts)
    wanted = re.findall(r"Hello|☃|look|\[1, ", answer)
    assert sorted(re.findall(r"Hello|☃|look|\[1, ", told)) == sorted(wanted)


@given(ANSWERS)
def test_without_calls_and_thoughts_all_is_text(answer: str) -> None:
    ids = iter(())
    parser = TaggedParser(PartsWriter(lambda: next(ids)), think=None, call=None)
    assert _said(_parts(parser, *answer)) == answer


def test_thoughts_text_and_calls_come_in_one_answer() -> None:
    parser = _parser()
    parts = _parts(parser, f"<think>\nHm.\n</think>\n\nLet me look.\n{CALL}\n{CALL}")
    assert parts == (
        Thought("Hm."),
        SaidText("Let me look."),
        CallOpened(0, "call_0", "look"),
        CallArguments(0, '{"at": "x"}'),
        CallOpened(1, "call_1", "look"),
        CallArguments(1, '{"at": "x"}'),
    )
    assert parser.calls == 2
    message = message_of(parts)
    assert (message.content, message.reasoning) == ("Let me look.", "Hm.")
    assert [call.id for call in message.tool_calls] == ["call_0", "call_1"]


def test_a_thought_that_the_prompt_has_opened_needs_no_mark() -> None:
    parser = _parser(thinking=True)
    assert parser.thinking
    assert _parts(parser, "Hm.</think>\n\nHi") == (Thought("Hm."), SaidText("Hi"))
    assert not parser.thinking


@pytest.mark.parametrize(
    ("answer", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": "</tool_call>"}}', '{"a": "</tool_call>"}'),
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "arguments": "no JSON"}', '"no JSON"'),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": [1,\n 2]}', "[1,\n 2]"),
        ('{"name": "f", "arguments": 3}', "3"),
        ('{"id": 7, "name": "f", "arguments": {"a":1}, "x": [{}]}', '{"a":1}'),
        ('{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', '{"a": 1}'),
        ('[{"name": "f", "parameters": {}}]', "{}"),
        ('{"name": "f", "arguments": {"a": 1}}}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": "one\ntwo"}}', '{"a": "one\ntwo"}'),
    ],
)
def test_arguments_are_the_json_that_the_model_wrote(answer: str, arguments: str) -> None:
    for parser, pieces in ((_parser(), [answer]), (_parser(), list(answer))):
        parts = _parts(parser, "<tool_call>\n", *pieces, "\n</tool_call>")
        assert parts == (CallOpened(0, "call_0", "f"), CallArguments(0, arguments))
        assert parser.calls == 1


@pytest.mark.parametrize(
    "answer",
    [
        "<tool_call> is a tag",
        '<tool_call>\n{"name": 3}\n</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{name: "f"}</tool_call>',
        '<tool_call>{"name": ""}</tool_call>',
        '<tool_call>{"name": "f',
        "Write <think> first",
        "a </think> b",
        "ends with <tool_cal",
        "\n\nbreaks \n\n at both ends\n\n",
    ],
)
def test_what_is_no_call_is_given_back_to_the_letter(answer: str) -> None:
    parser = _parser()
    assert _parts(parser, *answer) == (SaidText(answer),)
    assert parser.calls == 0


def test_a_call_is_told_as_it_comes() -> None:
    parser = _parser()
    assert parser.feed("<tool_call>\n{") == ()
    assert parser.feed('"name": "f"') == (CallOpened(0, "call_0", "f"),)
    assert parser.feed(', "arguments": {"a"') == (CallArguments(0, '{"a"'),)
    assert parser.feed(": 1}") == (CallArguments(0, ": 1}"),)
    assert parser.calls == 1
    assert parser.feed("}\n</tool_call>") == parser.flush() == ()


def test_no_more_is_held_back_than_what_may_begin_a_mark() -> None:
    parser = _parser()
    assert parser.feed("Hello <") == (SaidText("Hello "),)
    assert parser.feed("b> and\n") == (SaidText("<b> and"),)
    assert parser.feed("on") == (SaidText("\non"),)


def test_only_the_first_call_counts_where_one_was_allowed() -> None:
    parser = _parser(parallel=False)
    parts = _parts(parser, f"{CALL}\n{CALL}\nDone")
    assert parts == (
        CallOpened(0, "call_0", "look"),
        CallArguments(0, '{"at": "x"}'),
        SaidText("Done"),
    )
    assert parser.calls == 1


def test_an_answer_that_is_cut_in_a_call_has_no_whole_call() -> None:
    parser = _parser()
    parts = _parts(parser, '<tool_call>{"name": "f", "arguments": {"a": ')
    assert parts == (CallOpened(0, "call_0", "f"), CallArguments(0, '{"a": '))
    assert parser.calls == 0


@pytest.mark.parametrize("cut", ["<tool_", '<tool_call>\n{"name": "get_'])
def test_a_demanded_call_that_is_cut_before_its_name_is_no_text(cut: str) -> None:
    assert _parts(_parser(demanded=True), cut) == ()
    assert _parts(_parser(), cut) == (SaidText(cut),)
    thought = _parts(_parser(demanded=True, thinking=True), "Hm")
    assert thought == (Thought("Hm"),)


def test_bare_calls_are_only_those_that_begin_an_answer() -> None:
    call = '{"name": "f", "parameters": {"a": 1}}'
    assert _parts(_parser(call=BARE), *call)[0] == CallOpened(0, "call_0", "f")
    text = f"For example: {call}"
    assert _parts(_parser(call=BARE), *text) == (SaidText(text),)
    assert _parts(_parser(call=BARE), '{"city": 1}') == (SaidText('{"city": 1}'),)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    st.booleans(),
    st.booleans(),
)
@example({"</tool_call>": '{"'}, False, False)
def test_good_json_stays_good_json(value: object, first: bool, ascii_only: bool) -> None:
    arguments = {"value": value}
    call = {"arguments": arguments, "name": "f"} if first else {"name": "f", "arguments": arguments}
    written = json.dumps(call, ensure_ascii=ascii_only)
    parts = _parts(_parser(), *f"<tool_call>{written}</tool_call>")
    assert [type(part) for part in parts] == [CallOpened, CallArguments]
    assert isinstance(parts[1], CallArguments)
    assert json.loads(parts[1].text) == arguments


@pytest.mark.parametrize(
    ("said", "name", "arguments"),
    [
        (r'{"name": "lo\ud83dok", "arguments": {}}', "lo\ufffdok", "{}"),
        (r'{"name": "look", "arguments": "{\"at\": \"\ud83d\"}"}', "look", '{"at": "\ufffd"}'),
        (r'{"name": "look", "arguments": "{\"at\": \"\ud83d\ude00\"}"}', "look", '{"at": "😀"}'),
    ],
)
def test_half_a_surrogate_pair_in_a_call_can_be_sent(said: str, name: str, arguments: str) -> None:
    parser = TaggedParser(PartsWriter(lambda: "id"))
    parts = (*parser.feed(f"<tool_call>{said}</tool_call>"), *parser.flush())
    (call,) = message_of(parts).tool_calls
    assert (call.name, call.arguments) == (name, arguments)


def test_calls_in_calls_that_all_turn_out_to_be_none_are_read_a_few_times_only() -> None:
    said = '<tool_call>{"k":[' * 3000 + "]}" * 3000 + "x"
    parser = TaggedParser(PartsWriter(lambda: "id"))
    began = time.process_time()
    parts = (*parser.feed(said), *parser.flush())
    assert time.process_time() - began < 5  # by far: each of them again took 20 s
    assert message_of(parts).content == said
