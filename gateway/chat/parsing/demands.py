"""Grammars for what an answer must be: a call, or text of a given form, behind whatever the model thinks first.

Decides how a demand is written for one model's form, as llguidance's Lark. What the grammar then allows is for others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from coordinator.errors import InvalidValue
from gateway.chat.grammar import WHITE_SPACE
from gateway.chat.parsing.formats import AnswerFormat, CallFrame
from gateway.chat.parsing.tagged import BARE
from gateway.chat.parts import AnswerForm
from gateway.turns import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from gateway.chat.folding import TemplateDict

_OPTIONS: Mapping[str, object] = {"whitespace_pattern": WHITE_SPACE}
# Characters of all tools' schemas, well below what a grammar may have; of more, only the tools' names are held.
_LONGEST_SCHEMAS = 1 << 16
# A tool's schema is its author's; what of it cannot be held is left to the model. Arguments are spaced as templates
# write them again: the next prompt goes on from what was said.
_LENIENT: Mapping[str, object] = {
    "lenient": True,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


def demanded(
    answers: AnswerFormat,
    prompt: str,
    tools: Sequence[TemplateDict],
    form: AnswerForm,
    given: GrammarSpec | None,
) -> GrammarSpec | None:
    """What the whole answer to a rendered prompt must look like. `given`: what its text must look like.

    Raises InvalidValue("tool_choice" | "json_schema").
    """
    tools = [tool for tool in tools if form.may_call(_name(tool))]
    if form.must_call:
        return GrammarSpec(GrammarKind.LARK, _Lark(answers, prompt).forced(tools, form), "tools")
    calls = bool(form.calls and tools and answers.frame)
    lark = _Lark(answers, prompt)
    if given is None and calls and (form.is_restricted or not form.parallel):
        text = lark.free(tools, form)
        return None if text is None else GrammarSpec(GrammarKind.LARK, text, "tools")
    if given is None or given.kind is GrammarKind.LARK:
        return given
    if not calls and not lark.may_think:
        return given
    text = lark.text(given, tools if calls else (), form)
    return GrammarSpec(GrammarKind.LARK, text, given.field or given.kind.value)


class _Lark:
    """The rules of one grammar."""

    def __init__(self, answers: AnswerFormat, prompt: str) -> None:
        self._answers = answers
        self._opened = answers.opens_thought(prompt)
        think = answers.think
        # A thought that the prompt has closed already is not to be had again.
        closed = think is not None and prompt.rstrip().endswith(think.close)
        self.may_think = self._opened or (answers.thinks and think is not None and not closed)
        self._rules: list[str] = []
        self._loose = False

    def forced(self, tools: Sequence[TemplateDict], form: AnswerForm) -> str:
        if not tools:
            raise InvalidValue("tool_choice", "there is no such tool")
        if self._answers.frame is None:
            raise InvalidValue(
                "tool_choice", "this model's calls have a form that cannot be forced"
            )
        return self._whole(self._calls(self._answers.frame, tools, form))

    def text(self, given: GrammarSpec, tools: Sequence[TemplateDict], form: AnswerForm) -> str:
        self._rules.append(f"said: {_said(given)}")
        answer = "said"
        if tools and self._answers.frame is not None:
            answer += " | " + self._calls(self._answers.frame, tools, form)
        return self._whole(answer)

    def free(self, tools: Sequence[TemplateDict], form: AnswerForm) -> str | None:
        """Any text, with calls in it to these tools alone. None where nothing marks a call."""
        frame, marks = self._answers.frame, self._answers.call
        if (
            frame is None
            or marks is None
            or marks == BARE
            or not frame.before.startswith(marks.open)
        ):
            return None
        special = self._answers.specials.get(marks.open)
        behind = replace(frame, before=frame.before.removeprefix(marks.open), between_calls="")
        call = self._calls(behind, tools, form, marks.open)
        if special is None:
            unmarked = re.escape(marks.open).replace("/", r"\/")
            self._rules += [
                f"lead[suffix={_quoted(marks.open)}]: /(.|\n)*/",
                f"REST: /(.|\n)*/ & ~/(.|\n)*{unmarked}(.|\n)*/",
            ]
        else:
            self._rules += [f"lead: /(.|\n)*/ <[{special}]>", r"REST: /(.|\n)*/"]
        return self._whole(f"(lead {call}){'*' if form.parallel else '?'} REST")

    def _whole(self, answer: str) -> str:
        start = "answer"
        if self.may_think:
            start = f"thought{'' if self._opened else '?'} answer"
            self._rules += self._thought()
        return "\n".join([f"start: {start}", f"answer: {answer}", *self._rules])

    def _thought(self) -> list[str]:
        think = self._answers.think
        assert think is not None
        opening = "" if self._opened else self._written(think.open)
        close = self._answers.specials.get(think.close)
        if close is None:
            inner = f"inner[suffix={_quoted(think.close)}]: /(.|\\n)*/"
        else:
            inner = f"inner: /(.|\\n)*/ <[{close}]>"
        return [f"thought: {opening} inner /\\n{{0,2}}/", inner]

    def _calls(
        self, frame: CallFrame, tools: Sequence[TemplateDict], form: AnswerForm, marked: str = ""
    ) -> str:
        """The rule for them. `marked`: what stands in front of each already."""
        self._loose = sum(len(str(_schema(tool))) for tool in tools) > _LONGEST_SCHEMAS
        for place, tool in enumerate(tools):
            self._rules += (
                self._tags(place, tool, marked) if frame.is_tags else self._json(place, frame, tool)
            )
        self._rules.append("call: " + " | ".join(f"call_{n}" for n in range(len(tools))))
        if not form.parallel or not frame.between_calls:
            return "call"
        self._rules.append(f"calls: call ({_quoted(frame.between_calls)} call)*")
        return "calls"

    def _json(self, place: int, frame: CallFrame, tool: TemplateDict) -> list[str]:
        before = frame.before + json.dumps(_name(tool), ensure_ascii=False)[1:-1] + frame.between
        wanted = {"type": "object"} if self._loose else _schema(tool)
        schema = json.dumps({**wanted, "x-guidance": _LENIENT}, ensure_ascii=False)
        return [
            f"call_{place}: {self._written(before)} args_{place} {self._written(frame.behind)}",
            f"args_{place}: %json {schema}",
        ]

    def _tags(self, place: int, tool: TemplateDict, marked: str) -> list[str]:
        """A function and its parameters as tags: those that it needs first, each at most once."""
        schema = _schema(tool)
        listed, required = schema.get("properties"), schema.get("required")
        keys = sorted(
            listed if isinstance(listed, dict) else (),
            key=lambda key: not (isinstance(required, list) and key in required),
        )
        needed = set(required) if isinstance(required, list) else set()
        said = [f"param_{place}_{n}{'' if key in needed else '?'}" for n, key in enumerate(keys)]
        rules = [
            f"param_{place}_{n}: {_quoted(f'<parameter={key}>' + chr(10))} value"
            for n, key in enumerate(keys)
        ]
        before = f"<tool_call>\n<function={_name(tool)}>\n".removeprefix(marked)
        head = self._written(before)
        call = f"call_{place}: {head} {' '.join(said)} {self._written('</function>' + chr(10) + '</tool_call>')}"
        value = 'value[suffix="\\n</parameter>\\n"]: /(.|\\n)*/'
        return [call, *rules, *([] if value in self._rules or not keys else [value])]

    def _written(self, text: str) -> str:
        """Special tokens by their ids, all else by its letters."""
        pattern = self._answers.special
        pieces = [text] if pattern is None else _split(pattern.split(text), pattern.findall(text))
        specials = self._answers.specials
        return " ".join(
            f"<[{specials[piece]}]>" if piece in specials else _quoted(piece)
            for piece in pieces
            if piece
        )


def _split(plain: list[str], marks: list[str]) -> list[str]:
    pieces = [plain[0]]
    for mark, text in zip(marks, plain[1:], strict=True):
        pieces += [mark, text]
    return pieces


def _said(given: GrammarSpec) -> str:
    match given.kind:
        case GrammarKind.REGEX:
            return "/" + given.text.replace("/", r"\/") + "/"
        case GrammarKind.JSON_OBJECT:
            return "%json " + json.dumps({"type": "object", "x-guidance": _OPTIONS})
    schema = _parsed(given.text)
    return "%json " + json.dumps({"x-guidance": _OPTIONS, **schema}, ensure_ascii=False)


def _parsed(schema: str) -> Mapping[str, object]:
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidValue("json_schema", f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidValue("json_schema", "is not a JSON object")
    return value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _name(tool: TemplateDict) -> str:
    function = tool["function"]
    assert isinstance(function, dict)
    return str(function["name"])


def _schema(tool: TemplateDict) -> Mapping[str, object]:
    function = tool["function"]
    assert isinstance(function, dict)
    schema = function["parameters"]
    return dict(schema) if isinstance(schema, Mapping) else {"type": "object"}
