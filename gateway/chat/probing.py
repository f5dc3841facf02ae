"""Finds out what a chat template can do by trying it on small conversations, and how it writes calls and thoughts.

What a template refuses or does not show, it cannot do. Nothing here knows a model's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from coordinator.errors import InvalidValue
from gateway.chat.conversation import Abilities, TemplateDict


class Template(Protocol):
    """Renders template dicts to text. May raise anything."""

    def __call__(
        self,
        messages: Sequence[TemplateDict],
        tools: Sequence[TemplateDict],
        args: Mapping[str, object],
        *,
        generate: bool,
    ) -> str: ...


def guarded(
    template: Template,
    messages: Sequence[TemplateDict],
    tools: Sequence[TemplateDict],
    args: Mapping[str, object],
    *,
    generate: bool,
) -> str:
    """Raises InvalidValue("messages")."""
    try:
        return template(messages, tools, args, generate=generate)
    except Exception as error:  # a template may raise anything at all, and each is a refusal
        reason = str(error) or type(error).__name__
        raise InvalidValue(
            "messages", f"the model's chat template refuses them: {reason}"
        ) from error


_ASK: TemplateDict = {"role": "user", "content": "probe-question"}
_MORE: TemplateDict = {"role": "user", "content": "probe-more"}
_ANSWER: TemplateDict = {"role": "assistant", "content": "probe-answer"}
_SYSTEM: TemplateDict = {"role": "system", "content": "probe-system"}
_TOOL: TemplateDict = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe-description",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}},
    },
}
_CALL: TemplateDict = {
    "type": "function",
    "id": "probe0000",  # nine letters: Mistral's templates take no other length
    "function": {"name": "probe_tool", "arguments": {"probe_key": "probe-value"}},
}
_CALLED: TemplateDict = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT: TemplateDict = {
    "role": "tool",
    "content": "probe-result",
    "name": "probe_tool",
    "tool_call_id": "probe0000",
}


def _identified(call: str) -> tuple[TemplateDict, TemplateDict]:
    """A call of that id, and its result."""
    return {**_CALLED, "tool_calls": [{**_CALL, "id": call}]}, {**_RESULT, "tool_call_id": call}


# What templates call a message's thoughts, the most common name first.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class Probe:
    def __init__(self, template: Template) -> None:
        self._template = template

    def abilities(self) -> Abilities:
        """What the template shows of a system message, of tools, of calls with their results, and of thoughts."""
        shows = self._shows
        calls = shows(
            [_ASK, _CALLED, _RESULT], "probe_tool", "probe-value", "probe-result", tools=True
        )
        return Abilities(
            system=shows([_SYSTEM, _ASK], "probe-system", "probe-question"),
            late_system=shows([_ASK, _ANSWER, _SYSTEM, _ASK], "probe-system"),
            tools=shows([_ASK], "probe_tool", "probe_key", tools=True),
            calls=calls,
            repeats=shows([_ASK, _MORE], "probe-question", "probe-more"),
            asks_behind_results=not calls
            or shows([_ASK, _CALLED, _RESULT, _MORE], "probe-more", tools=True),
            long_ids=not calls
            or shows([_ASK, *_identified("call_0123456789abcdef")], "probe-value", tools=True),
            thoughts=self._thoughts(),
        )

    def _thoughts(self) -> str:
        for name in _THOUGHTS:
            thought: TemplateDict = {name: "probe-thought"}
            # Many show thoughts only since the last question, and some only beside calls.
            for said in ([{**_ANSWER, **thought}], [{**_CALLED, **thought}, _RESULT]):
                if self._shows([_ASK, *said], "probe-thought", tools=True):
                    return name
        return _THOUGHTS[0]

    def opening(self) -> str:
        """What stands between a question and its answer."""
        return self._behind([_ASK], "probe-question")

    def call(self) -> str:
        """What stands between a question and a call's result: the call, with what is around it."""
        text = self._behind([_ASK, _CALLED, _RESULT], "probe-question")
        return text.split("probe-result")[0] if "probe_tool" in text else ""

    def thought(self, name: str) -> str:
        """What stands behind a question that was answered with a thought, which the template calls by that name."""
        return self._behind([_ASK, {**_ANSWER, name: "probe-thought"}], "probe-question")

    def _behind(self, messages: Sequence[TemplateDict], word: str) -> str:
        text = self._text(messages, tools=True)
        return text.rpartition(word)[2]

    def _text(self, messages: Sequence[TemplateDict], *, tools: bool) -> str:
        try:
            return guarded(self._template, messages, [_TOOL] if tools else [], {}, generate=True)
        except InvalidValue:
            return ""

    def _shows(self, messages: Sequence[TemplateDict], *words: str, tools: bool = False) -> bool:
        text = self._text(messages, tools=tools)
        return bool(text) and all(word in text for word in words)
