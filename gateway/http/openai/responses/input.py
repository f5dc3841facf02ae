"""The Responses API's `input` to a conversation: items, one after the other, become messages. Reads nothing else.

An answer comes back as several items (thoughts, text, calls), and a template wants one message of it again: what the
model said must read as it was generated. Encrypted thoughts of other servers are nothing that this one can read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from coordinator.errors import InvalidValue
from gateway.chat.messages import JsonObject, Message, ToolCall
from gateway.http.carried import carried
from gateway.http.fields import Fields
from gateway.http.openai.chat_tools import name_of
from gateway.http.openai.responses.tools import shown_name

_ROLES = frozenset({"user", "assistant", "system", "developer"})
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_NOT_KEPT = "this server keeps no {}: send the items themselves"
# What they stand for is not in them, or not in a form that anybody else can read.
_REFUSED = {
    "item_reference": _NOT_KEPT.format("items"),
    "compaction": "another server's compacted history cannot be read here",
    "compaction_summary": "another server's compacted history cannot be read here",
    "context_compaction": "another server's compacted history cannot be read here",
    "compaction_trigger": "this server compacts nothing",
}
# Traces of what other servers do by themselves; they hold nothing that a model was told.
_PASSED_OVER = frozenset(
    "web_search_call file_search_call code_interpreter_call image_generation_call computer_call mcp_list_tools "
    "mcp_approval_request mcp_approval_response mcp_call additional_tools tool_search_call tool_search_output "
    "configuration_update ghost_snapshot other".split()
)


def conversation(body: Fields) -> tuple[Message, ...]:
    """Instructions and input. Raises InvalidValue."""
    talk = _Talk()
    instructions = _texts(body, "instructions")
    if instructions:
        talk.add(Message("system", instructions))
    if isinstance(body.raw("input"), str):
        talk.add(Message("user", body.text("input")))
    else:
        for item in body.objects("input"):
            _read(item, talk)
    return talk.messages()


@dataclass(slots=True)
class _Said:
    """One answer, as far as its items have come."""

    thoughts: list[str] = field(default_factory=list)
    text: str | None = None
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        return Message(
            "assistant",
            self.text,
            tool_calls=tuple(self.calls),
            reasoning="\n".join(self.thoughts) or None,
        )


class _Talk:
    """The messages so far, and the answer whose items are still coming."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._said: _Said | None = None

    def messages(self) -> tuple[Message, ...]:
        self._end_answer()
        return tuple(self._messages)

    def add(self, message: Message) -> None:
        self._end_answer()
        self._messages.append(message)

    def thought(self, text: str) -> None:
        if self._said is not None and self._said.text is not None and not self._said.calls:
            self._end_answer()
        if text:
            self._answer().thoughts.append(text)

    def said(self, text: str) -> None:
        if self._said is not None and self._said.text is not None:
            self._end_answer()
        self._answer().text = text

    def called(self, call: ToolCall) -> None:
        self._answer().calls.append(call)

    def _answer(self) -> _Said:
        if self._said is None:
            self._said = _Said()
        return self._said

    def _end_answer(self) -> None:
        if self._said is not None:
            self._messages.append(self._said.message())
            self._said = None


def _read(item: Fields, talk: _Talk) -> None:
    kind = item.text("type") or "message"
    match kind:
        case "message":
            _message(item, talk)
        case "agent_message":  # another agent's, to this one
            talk.add(Message("user", "".join(_shown(part) for part in item.objects("content"))))
        case "reasoning":
            talk.thought(_thought(item))
        case "function_call":
            talk.called(ToolCall(_tool(item), _arguments(item), _call_id(item)))
        case "custom_tool_call":
            talk.called(ToolCall(_tool(item), {"input": item.text("input") or ""}, _call_id(item)))
        case "local_shell_call":
            talk.called(ToolCall("local_shell", item.plain_object("action"), _call_id(item)))
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
            talk.add(Message("tool", _output(item), tool_call_id=_call_id(item)))
        case _ if kind in _REFUSED:
            raise InvalidValue(item.path("type"), _REFUSED[kind])
        case _ if kind not in _PASSED_OVER:
            raise InvalidValue(item.path("type"), f"{kind} is nothing that this model reads")


def _message(item: Fields, talk: _Talk) -> None:
    role = item.text("role")
    if role not in _ROLES:
        wanted = "must be user, assistant, system or developer"
        raise InvalidValue(item.path("role"), "is missing" if role is None else wanted)
    text = _texts(item, "content")
    if role == "assistant":
        talk.said(text)
    else:
        talk.add(Message(role, text))


def _thought(item: Fields) -> str:
    """Clients send back what they keep: the thought itself, our sealed copy of it, or only its summary."""
    return (
        _texts(item, "content")
        or carried(item.text("encrypted_content") or "")
        or _texts(item, "summary")
    )


def _tool(item: Fields) -> str:
    return shown_name(item.text("namespace"), name_of(item))


def _call_id(item: Fields) -> str | None:
    return item.text("call_id") or item.text("id")


def _arguments(item: Fields) -> str | JsonObject:
    arguments = item.raw("arguments")
    if not isinstance(arguments, str | dict | None):
        raise InvalidValue(item.path("arguments"), "must be JSON text or an object")
    return "{}" if arguments is None else arguments


def _output(item: Fields) -> str:
    """A tool's picture lies in the conversation already and must not end it."""
    output = item.raw("output")
    if isinstance(output, dict):
        return json.dumps(output, ensure_ascii=False)
    if not isinstance(output, list):
        return _texts(item, "output")
    return "".join(_shown(part) for part in item.objects("output"))


def _shown(part: Fields) -> str:
    try:
        return _part(part)
    except InvalidValue as error:
        return f"[left out: {error.reason}]"


def _texts(item: Fields, name: str) -> str:
    """A string, or a list of parts of text; nothing where it is absent."""
    value = item.raw(name)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise InvalidValue(item.path(name), "must be a string or a list of parts")
    return "".join(_part(part) for part in item.objects(name))


def _part(part: Fields) -> str:
    kind = part.text("type") or "text"
    if kind == "refusal":
        return part.text("refusal") or ""
    if kind not in _TEXT_PARTS:
        raise InvalidValue(part.path("type"), f"{kind} is nothing that this model reads")
    return part.text("text") or ""
