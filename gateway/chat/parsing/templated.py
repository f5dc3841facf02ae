"""Parses answers by a response template: transformers' description of how a model writes them, brought by the model.

transformers decides where a field begins and ends; which fields are thoughts, calls and text is decided here. A call
that it cannot read is given back as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers.utils.chat_parsing.response_parser import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from gateway.chat.parsing.call_json import CallReader
from gateway.chat.parsing.writer import THOUGHTS, PartsWriter
from gateway.chat.parts import AnswerPart

_CALLS = frozenset({"tool_calls", "tool_call"})
# These make something of any text, of half a call too.
_LENIENT = frozenset({"xml-inline", "kv-lines", "text"})


class TemplatedParser:
    """An AnswerParser. `prompt`: as it was rendered; what it says of the answer already is not said again."""

    reads_special = True

    def __init__(
        self,
        template: ResponseTemplate,
        writer: PartsWriter,
        prompt: str,
        tools: Sequence[Mapping[str, object]] = (),
        *,
        calls: bool = True,
        demanded: bool = False,
    ) -> None:
        """`demanded`: the answer can be nothing but calls."""
        fields = template.fields
        if not calls:
            fields = {name: field for name, field in fields.items() if name not in _CALLS}
        self._template = replace(template, fields=fields)
        self._writer = writer
        self._demanded = demanded
        self._tools = [dict(tool) for tool in tools]
        self._field = ""
        self._seen = ""  # since the last call
        self._call_at = 0  # where in there the call begins that is open
        self._reader: CallReader | None = None  # of a call that is plain JSON
        self._parser = self._fresh(prompt)
        for event in self._parser.initial_events:
            if event["type"] != "region_chunk":
                self._turn(event)

    def _fresh(self, prompt: str) -> ResponseParser:
        return ResponseParser(self._template, prefix=prompt, tools=self._tools or None)

    @property
    def thinking(self) -> bool:
        return self._writer.thinking

    @property
    def calls(self) -> int:
        return self._writer.calls

    def feed(self, text: str) -> tuple[AnswerPart, ...]:
        # One character at a time: what it makes of those before one that it chokes on must not be lost.
        for char in text:
            self._seen += char
            try:
                for event in self._parser.feed(char):
                    self._turn(event)
            except (ValueError, KeyError, TypeError, AttributeError):  # not what its template says
                self._give_back()
        return self._writer.take()

    def flush(self) -> tuple[AnswerPart, ...]:
        try:
            if self._is_half_a_call():
                raise _NoCall
            for event in self._parser.finalize()[1]:
                self._turn(event)
        except (ValueError, KeyError, TypeError, AttributeError):
            self._give_back()
        self._writer.flush()
        return self._writer.take()

    def _is_half_a_call(self) -> bool:
        form = self._template.fields.get(self._field)
        if form is None or self._field not in _CALLS or form.content not in _LENIENT:
            return False
        return not (form.close_re and form.close_re.search(self._seen, self._call_at))

    def _give_back(self) -> None:
        if self._field in THOUGHTS:
            self._writer.close_thought()
        elif self._field in _CALLS and not self._opened and not self._demanded:
            self._writer.said(self._seen[self._call_at :])
        self._seen, self._field, self._reader = "", "", None
        self._parser = self._fresh("")

    @property
    def _opened(self) -> bool:
        return self._reader is not None and self._reader.opened

    def _turn(self, event: Mapping[str, Any]) -> None:
        match event["type"]:
            case "region_open":
                self._open(event["field"])
            case "region_chunk":
                self._told(event["text"])
            case "region_close":
                self._close(event["value"])

    def _open(self, field: str) -> None:
        self._field = field
        if field in THOUGHTS:
            self._writer.open_thought()
        elif field in _CALLS:
            form = self._template.fields[field]
            self._call_at = max(
                (hit.start() for hit in form.open_re.finditer(self._seen)), default=0
            )
            self._reader = CallReader(self._writer) if form.content == "json" else None

    def _told(self, text: str) -> None:
        if self._field in THOUGHTS:
            self._writer.thought(text)
        elif self._field not in _CALLS:
            self._writer.said(text)
        elif self._reader is not None and not (self._reader.done or self._reader.broken):
            self._reader.feed(text)

    def _close(self, value: Any) -> None:
        if self._field in THOUGHTS:
            self._writer.close_thought()
        elif self._field in _CALLS:
            self._called(value)
            self._seen = ""
        self._field, self._reader = "", None

    def _called(self, value: Any) -> None:
        values = value if isinstance(value, list) else [value]
        for name, arguments in [_call(each) for each in values][self._opened :]:
            self._writer.open_call(name)
            self._writer.arguments(arguments)
            self._writer.end_call()


class _NoCall(ValueError):
    pass


def _call(value: Any) -> tuple[str, str]:
    """A call's name and its arguments' JSON text. Raises _NoCall."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        raise _NoCall
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        return name, arguments
    return name, json.dumps({} if arguments is None else arguments, ensure_ascii=False)
