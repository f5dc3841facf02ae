"""How a model writes its answers is found from its own template, whatever the model is called; and can be demanded."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from coordinator.constraints import allows
from gateway.chat.boundaries import AddedTokens
from gateway.chat.byte_tokenizer import END, ByteTokenizer
from gateway.chat.conversation import TemplateDict, template_tools
from gateway.chat.grammar import Grammars
from gateway.chat.messages import Tool
from gateway.chat.parsing.demands import demanded
from gateway.chat.parsing.formats import AnswerFormat, learn
from gateway.chat.parsing.tagged import BARE, THINK, TOOL_CALL, Marks
from gateway.chat.parsing.writer import merged
from gateway.chat.parts import (
    AnswerForm,
    AnswerPart,
    CallArguments,
    CallOpened,
    SaidText,
    Thought,
    message_of,
)
from gateway.chat.probing import Probe
from gateway.turns import GrammarKind, GrammarSpec

WEATHER = Tool(
    "weather",
    None,
    {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Basel"]}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
ALARM = Tool("alarm", None, {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = template_tools([WEATHER, ALARM])
SPECIALS = {"<|start|>": 256, "<|end|>": END, "[TOOL_CALLS]": 300, "<|call|>": 301}


class Model:
    """A template of our own: how a call is written, and what an answer begins with."""

    def __init__(
        self, call: Any, opening: str = "", added: Sequence[str] = (), frame: str = "\n"
    ) -> None:
        self._call = call
        self._frame = frame
        self._opening = opening
        texts = [*SPECIALS, *added]
        self.added = AddedTokens.of(texts, SPECIALS)

    def __call__(
        self,
        messages: Sequence[TemplateDict],
        tools: Sequence[TemplateDict],
        args: Mapping[str, object],
        *,
        generate: bool,
    ) -> str:
        said = [json.dumps(list(tools))] if tools else []
        for message in messages:
            said.append(f"<|start|>{message['role']}{self._frame}{message['content']}")
            calls: Any = message.get("tool_calls") or []
            said.extend(self._call(each["function"]) for each in calls)
            said.append("<|end|>\n")
        return "".join(said) + f"<|start|>assistant{self._frame}{self._opening}" * generate

    def answers(self, response_template: Any = None) -> AnswerFormat:
        probe = Probe(self)
        return learn(probe, probe.abilities(), self.added, {"<|end|>"}, response_template)


def _hermes(call: Any) -> str:
    return f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _coder(call: Any) -> str:
    pairs = call["arguments"].items()
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"\n<tool_call>\n<function={call['name']}>\n{inner}</function>\n</tool_call>"


def _bare(call: Any) -> str:
    return json.dumps({"name": call["name"], "parameters": call["arguments"]})


def _list(call: Any) -> str:
    return f"[TOOL_CALLS]{json.dumps([{**call, 'id': 'probe0000'}])}"


def _marked(call: Any) -> str:
    return f"<|call|>{json.dumps(call)}"


def _unknown(call: Any) -> str:
    return f"CALL {call['name']} WITH {' '.join(map(str, call['arguments'].values()))}"


def _mute(call: Any) -> str:
    return ""


HERMES, CODER = Model(_hermes), Model(_coder, "<think>\n")
BARES, LISTS, MARKED = Model(_bare), Model(_list), Model(_marked)
ALL = [HERMES, CODER, BARES, LISTS, MARKED, Model(_mute)]


def _parts(answers: AnswerFormat, answer: str, **more: Any) -> tuple[AnswerPart, ...]:
    ids = (f"call_{n}" for n in itertools.count())
    prompt = more.pop("prompt", "<|start|>assistant\n")
    parser = answers.parser(prompt, TOOLS, AnswerForm(**more), lambda: next(ids))
    told = [part for letter in answer for part in parser.feed(letter)]
    return merged([*told, *parser.flush()])


@pytest.mark.parametrize(
    ("model", "call", "think"),
    [
        (HERMES, TOOL_CALL, None),
        (Model(_mute), TOOL_CALL, None),
        (BARES, BARE, None),
        # In the manner of Llama 3: what stands in front of a call stands in front of any answer.
        (Model(_bare, frame="<|head|>\n\n"), BARE, None),
        (LISTS, Marks("[TOOL_CALLS]", ""), None),
        (MARKED, Marks("<|call|>", ""), None),
        (Model(_unknown), None, None),
        (Model(_hermes, "<think>\n"), TOOL_CALL, THINK),
        (Model(_hermes, added=["<think>"]), TOOL_CALL, THINK),
    ],
)
def test_marks_are_learnt_from_what_the_template_writes(
    model: Model, call: Marks | None, think: Marks | None
) -> None:
    answers = model.answers()
    assert (answers.call, answers.think, answers.template) == (call, think, None)


@pytest.mark.parametrize("model", ALL)
def test_what_a_template_writes_for_a_call_is_read_as_one(model: Model) -> None:
    call = {"name": "weather", "arguments": {"city": "Bern", "days": 2}}
    write = _hermes if model._call is _mute else model._call
    answers = model.answers()
    parts = _parts(answers, f"{write(call)}".lstrip("\n"))
    assert isinstance(parts[0], CallOpened)
    assert parts[0].name == "weather"
    assert isinstance(parts[1], CallArguments)
    assert json.loads(parts[1].text) == call["arguments"]
    assert len(parts) == 2
    # A special token is visible only to a parser that asks for it.
    parser = answers.parser("", TOOLS, AnswerForm(), str)
    assert parser.reads_special == (model in (LISTS, MARKED, CODER))


@pytest.mark.parametrize("model", ALL)
def test_a_call_is_text_where_none_is_allowed(model: Model) -> None:
    call = {"name": "weather", "arguments": {"city": "Bern"}}
    write = _hermes if model._call is _mute else model._call
    text = write(call).lstrip("\n")
    if model not in (LISTS, MARKED):  # their marks are special tokens, which are no text
        assert _parts(model.answers(), text, calls=False) == (SaidText(text),)


def test_tags_are_cast_by_the_tools_schema_and_half_a_call_is_text() -> None:
    answers = CODER.answers()
    opened = "<|start|>assistant\n<think>\n"
    text = "Hm.\n</think>\n\nLook.\n\n" + _coder(
        {"name": "weather", "arguments": {"city": "7", "days": 7}}
    ).lstrip("\n")
    message = message_of(_parts(answers, text, prompt=opened))
    assert message.reasoning == "Hm."
    assert [json.loads(str(call.arguments)) for call in message.tool_calls] == [
        {"city": "7", "days": 7}
    ]
    half = "<tool_call>\n<function=weather>\n<parameter=city>\nBe"
    assert _parts(answers, half) == (SaidText(half),)


RESPONSE = {
    "start_anchor": "<|start|>assistant\n",
    "fields": {
        "content": {},
        "thinking": {"open": "<|mull|>", "close": "<|mulled|>"},
        "tool_calls": {
            "open": "<|call|>",
            "close": "<|called|>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def test_a_response_template_goes_before_what_could_be_learnt() -> None:
    answers = HERMES.answers(RESPONSE)
    assert answers.think == Marks("<|mull|>", "<|mulled|>")
    call = '<|call|>{"name": "weather", "arguments": {"city": "Bern"}}<|called|>'
    parts = _parts(answers, f"<|mull|>Hm.<|mulled|>Look.{call} Well.")
    assert parts == (
        Thought("Hm."),
        SaidText("Look."),
        CallOpened(0, "call_0", "weather"),
        CallArguments(0, '{"city": "Bern"}'),
        SaidText(" Well."),
    )
    opened = _parts(answers, "Hm.<|mulled|>Yes", prompt="<|start|>assistant\n<|mull|>")
    assert opened == (Thought("Hm."), SaidText("Yes"))


@pytest.mark.parametrize(
    "answer", ["A <|call|>no JSON<|called|> b", '<|call|>{"name": 3}<|called|>', "<|call|>{"]
)
def test_what_a_response_template_cannot_read_is_given_back(answer: str) -> None:
    assert _parts(HERMES.answers(RESPONSE), answer) == (SaidText(answer),)


def test_a_call_of_a_response_template_is_told_as_it_comes() -> None:
    parser = HERMES.answers(RESPONSE).parser("", TOOLS, AnswerForm(), lambda: "id")
    assert parser.feed('<|call|>{"name": "weather", "arg') == (CallOpened(0, "id", "weather"),)
    assert parser.feed('uments": {"ci') == (CallArguments(0, '{"ci'),)


def test_a_broken_response_template_costs_nobody_a_start() -> None:
    assert HERMES.answers({"fields": {}}).call == TOOL_CALL


# What is demanded


def _taken(spec: GrammarSpec | None, answer: str) -> tuple[int, bool]:
    """How many letters of the answer the grammar lets stand, and whether it may end behind them."""
    assert spec is not None
    constraint = Grammars(ByteTokenizer()).constraint(spec)
    ids = ByteTokenizer().encode(answer)
    masks = constraint.masks((), ids)
    return len(masks) - 1, allows(masks[-1], END)


def _is_whole(spec: GrammarSpec | None, answer: str) -> bool:
    return _taken(spec, answer) == (len(answer.encode()), True)


@pytest.mark.parametrize("model", [HERMES, CODER, BARES, Model(_mute)])
@pytest.mark.parametrize(
    "form", [AnswerForm(must_call=True), AnswerForm(must_call=True, only="weather")]
)
def test_a_demanded_call_is_in_the_models_own_form(model: Model, form: AnswerForm) -> None:
    answers = model.answers()
    spec = demanded(answers, "<think>\n" if model is CODER else "", TOOLS, form, None)
    thought = "Hm.\n</think>\n\n" if model is CODER else ""
    write = _hermes if model._call is _mute else model._call
    good = write({"name": "weather", "arguments": {"city": "Bern"}}).lstrip("\n")
    assert _is_whole(spec, thought + good)
    assert not _is_whole(spec, f"{thought}Hello")
    assert not _is_whole(spec, thought + good.replace("weather", "other"))
    if model is not CODER:
        assert not _is_whole(spec, good.replace("Bern", "Biel"))
    other = write({"name": "alarm", "arguments": {}}).lstrip("\n")
    assert _is_whole(spec, thought + other) == (form.only is None)
    parts = _parts(answers, thought + good, prompt="<think>\n" if thought else "")
    assert [part.name for part in parts if isinstance(part, CallOpened)] == ["weather"]


def test_of_very_many_tools_the_names_are_held() -> None:
    keys = {f"key_{n}": {"type": "string", "description": "x" * 100} for n in range(20)}
    many = template_tools([Tool(f"tool_{n}", None, {"properties": keys}) for n in range(60)])
    spec = demanded(HERMES.answers(), "", many, AnswerForm(must_call=True), None)
    call = _hermes({"name": "tool_59", "arguments": {"any": [1]}}).lstrip("\n")
    assert _is_whole(spec, call)
    assert not _is_whole(spec, call.replace("tool_59", "tool_60"))


def test_several_calls_may_follow_one_another_unless_one_was_asked_for() -> None:
    call = _hermes({"name": "alarm", "arguments": {}}).lstrip("\n")
    for parallel in (True, False):
        form = AnswerForm(must_call=True, parallel=parallel)
        spec = demanded(HERMES.answers(), "", TOOLS, form, None)
        assert _is_whole(spec, call)
        assert _is_whole(spec, f"{call}\n{call}") == parallel


def test_a_choice_of_tools_leaves_the_model_free_to_say_anything_else() -> None:
    spec = demanded(HERMES.answers(), "", TOOLS, AnswerForm(among=("alarm",)), None)
    good, bad = (_hermes({"name": name, "arguments": {}}) for name in ("alarm", "weather"))
    assert _is_whole(spec, "Just text, with a <tool_box>.")
    assert _is_whole(spec, f"First{good}{good}\nthen")
    assert not _is_whole(spec, f"First{bad}")
    assert demanded(HERMES.answers(), "", TOOLS, AnswerForm(), None) is None


def test_a_schema_holds_behind_a_thought_and_beside_calls() -> None:
    schema = '{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}'
    given = GrammarSpec(GrammarKind.JSON_SCHEMA, schema, "response_format")
    thinker = Model(_hermes, "<think>\n").answers()
    spec = demanded(thinker, "<think>\n", TOOLS, AnswerForm(), given)
    call = _hermes({"name": "alarm", "arguments": {}}).lstrip("\n")
    assert _is_whole(spec, 'Any {thought}.\n</think>\n\n{"a": 1}')
    assert _is_whole(spec, f"</think>\n\n{call}")
    assert not _is_whole(spec, "Hm.</think>\n\nHello")
    closed = demanded(thinker, "<think>\n\n</think>\n\n", (), AnswerForm(), given)
    assert closed == given
    unopened = demanded(thinker, "", (), AnswerForm(), given)
    assert _is_whole(unopened, '{"a": 1}')
    assert _is_whole(unopened, '<think>Hm.</think>{"a": 1}')
