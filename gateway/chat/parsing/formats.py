"""How one model writes its answers, found from its own files: a response template, or what its chat template writes.

Decides which parser takes its answers apart. A model whose form is none of those known here has its answers left whole.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gateway.chat.parsing.tagged import BARE, THINK, TOOL_CALL, Marks, TaggedParser
from gateway.chat.parsing.writer import THOUGHTS, NewId, PartsWriter
from gateway.chat.parts import AnswerForm, AnswerParser

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

    from gateway.chat.boundaries import AddedTokens
    from gateway.chat.folding import Abilities, TemplateDict
    from gateway.chat.probing import Probe

log = logging.getLogger(__name__)

# A mark as templates write them: <tag>, [TAG] or <|tag|>.
_MARK = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])\s*\Z")
_CLOSING = re.compile(r"\s*(</[^<>\s]+>|\[/[A-Z_]+\]|<\|[^<>\s]+\|>)")
_NAMED = "probe_tool"
_PROBE_ID = "probe0000"
_ANCHOR = "\0"
# The form that Qwen's coders made common: a function and its parameters as tags.
_XML: Mapping[str, object] = {
    "start_anchor": _ANCHOR,
    "fields": {
        "content": {},
        "reasoning_content": {"open": THINK.open, "close": THINK.close},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^<>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^<>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
            },
            "repeats": True,
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


@dataclass(frozen=True, slots=True)
class CallFrame:
    """What a call is written in: before its name, between that and its arguments, and behind them."""

    before: str = '<tool_call>\n{"name": "'
    between: str = '", "arguments": '
    behind: str = "}\n</tool_call>"
    between_calls: str = "\n"  # empty: one call is all
    is_tags: bool = False  # instead: a function and its parameters as tags


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """`call`: around calls that are JSON; `frame`: for calls that are demanded, where that can be done."""

    think: Marks | None = None
    call: Marks | None = None
    frame: CallFrame | None = None
    template: ResponseTemplate | None = None
    is_ours: bool = False  # the template is, and knows nothing of the prompt
    thinks: bool = False  # of its own accord: what is demanded of it may come behind a thought
    specials: Mapping[str, int] = field(default_factory=dict)  # special tokens, as they are written

    @property
    def special(self) -> re.Pattern[str] | None:
        if not self.specials:
            return None
        written = sorted(self.specials, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, written)))

    @property
    def _marks(self) -> set[str]:
        pairs = [pair for pair in (self.think, self.call) if pair is not None]
        return {mark for pair in pairs for mark in (pair.open, pair.close)}

    def opens_thought(self, prompt: str) -> bool:
        """Whether the answer to this prompt begins within a thought."""
        return self.think is not None and prompt.rstrip().endswith(self.think.open)

    def parser(
        self, prompt: str, tools: Sequence[TemplateDict], form: AnswerForm, new_id: NewId
    ) -> AnswerParser:
        """Without tools there are no calls, whatever the answer looks like."""
        writer = PartsWriter(new_id, parallel=form.parallel)
        calls = form.calls and bool(tools)
        if self.template is not None:
            from gateway.chat.parsing.templated import TemplatedParser

            if self.is_ours:
                assert self.think is not None
                prompt = _ANCHOR + self.think.open * self.opens_thought(prompt)
            return TemplatedParser(
                self.template, writer, prompt, tools, calls=calls, demanded=form.must_call
            )
        return TaggedParser(
            writer,
            think=self.think,
            call=self.call if calls else None,
            thinking=self.opens_thought(prompt),
            special=None if self._marks.isdisjoint(self.specials) else self.special,
            demanded=form.must_call,
        )


def learn(
    probe: Probe,
    abilities: Abilities,
    added: AddedTokens,
    stops: Collection[str],
    response_template: Any = None,
) -> AnswerFormat:
    """`stops`: how the tokens are written that end an answer."""
    think = THINK if _thinks(probe, abilities, added) else None
    call: Marks | None = TOOL_CALL
    frame: CallFrame | None = CallFrame()
    text = probe.call() if abilities.calls else ""
    if text:
        call, frame = _json_call(text, probe.opening(), stops)
    found = AnswerFormat(think, call, frame, thinks=think is not None, specials=added.special)
    if response_template is not None and (template := _loaded(response_template)):
        return replace(found, think=_thoughts_of(template) or think, template=template)
    if f"<function={_NAMED}>" in text:
        tags = CallFrame("<tool_call>", is_tags=True)
        ours = replace(found, think=THINK, call=TOOL_CALL, frame=tags, is_ours=True)
        return replace(ours, template=_loaded(_XML))
    return found


def _thinks(probe: Probe, abilities: Abilities, added: AddedTokens) -> bool:
    return (
        added.pattern.fullmatch(THINK.open) is not None
        or THINK.open in probe.opening()
        or THINK.open in probe.thought(abilities.thoughts)
    )


def _thoughts_of(template: ResponseTemplate) -> Marks | None:
    """What is written around thoughts, where that is plain text."""
    for name in THOUGHTS & template.fields.keys():
        field = template.fields[name]
        if field.open_literals and field.close_literals:
            return Marks(field.open_literals[0], field.close_literals[0])
    return None


def _loaded(template: Any) -> ResponseTemplate | None:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        return load_response_template(template)
    except Exception as error:  # a model's own file may hold anything
        log.warning("the model's response template cannot be used: %s", error)
        return None


def _json_call(
    text: str, opening: str, stops: Collection[str]
) -> tuple[Marks | None, CallFrame | None]:
    """The marks around a call that the template writes as JSON, and its frame."""
    for start, value, end in _values(text):
        listed = isinstance(value, list)
        call = value[0] if listed and value else value
        call = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(call, dict) or call.get("name") != _NAMED:
            continue
        before = _MARK.search(text[:start])
        marks = BARE
        if before is not None and before[1] not in opening:
            behind = _CLOSING.match(text, end)
            closes = behind and behind[1] not in stops and behind[1] not in opening
            marks = Marks(before[1], behind[1] if behind and closes else "")
            start = before.start()
            end = behind.end() if behind and closes else end
        return marks, _frame(text[start:end], listed, marks)
    return None, None


def _frame(text: str, listed: bool, marks: Marks) -> CallFrame | None:
    """Around the probe's name and arguments, in the form in which the template has written them."""
    before, found, rest = text.partition(_NAMED)
    start = rest.find("{")
    if not found or start < 0:
        return None
    try:
        end = json.JSONDecoder().raw_decode(rest, start)[1]
    except ValueError:
        return None
    behind = rest[end:]
    if _PROBE_ID in behind:  # ids are the client's business, and ours
        behind = ("}]" if listed else "}") + marks.close
    return CallFrame(before, rest[:start], behind, "\n" if marks.close and not listed else "")


def _values(text: str) -> list[tuple[int, Any, int]]:
    """The JSON objects and lists in a text, as far as they do not lie in one another."""
    found, place = [], 0
    decoder = json.JSONDecoder()
    while hit := re.compile(r"[\[{]").search(text, place):
        try:
            value, end = decoder.raw_decode(text, hit.start())
        except ValueError:
            place = hit.start() + 1
            continue
        found.append((hit.start(), value, end))
        place = end
    return found
