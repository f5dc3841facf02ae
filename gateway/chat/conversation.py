"""Turns message records into what a chat template reads, with what the template cannot do written out.

It decides how tools, calls and results are worded for a template that ignores them: in the `<tools>`,
`<tool_call>` and `<tool_response>` form that Hermes and Qwen made common. Each message is converted by itself
(only the tools go into the first one), so a longer conversation's messages begin with a shorter one's; where
they go is folding.py's business.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.errors import InvalidValue
from gateway.chat.folding import Abilities, TemplateDict, Turned, folded, joined
from gateway.chat.messages import JsonObject, Message, Tool, ToolCall

__all__ = [
    "Abilities",
    "Conversation",
    "TemplateDict",
    "conversation",
    "template_tools",
    "tools_text",
]

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

_SHORT_ID = re.compile(r"[0-9A-Za-z]{9}")
_NO_PARAMETERS: TemplateDict = {"type": "object", "properties": {}}

_TOOLS_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Conversation:
    """`origins`: for each message, the first of the client's that it holds; OURS where it holds none."""

    messages: tuple[TemplateDict, ...]
    tools: tuple[TemplateDict, ...] = ()  # only those that the template renders by itself
    origins: tuple[int, ...] = ()


def conversation(
    messages: Sequence[Message], tools: Sequence[Tool], abilities: Abilities
) -> Conversation:
    """Raises InvalidValue of a path that begins with messages or tools."""
    if not messages:
        raise InvalidValue("messages", "there are no messages")
    turned = [Turned(_message(i, message, abilities), i) for i, message in enumerate(messages)]
    described = template_tools(tools)
    if described and not abilities.tools:
        turned = _with_system_text(turned, tools_text(described))
        described = ()
    turned = folded(turned, abilities)
    origins = tuple(each.origin for each in turned)
    return Conversation(tuple(each.message for each in turned), described, origins)


def _message(index: int, message: Message, abilities: Abilities) -> TemplateDict:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidValue(f"messages[{index}].role", f"there is no role {message.role!r}")
    if role == "tool" and not abilities.calls:
        text = f"<tool_response>\n{message.content or ''}\n</tool_response>"
        return {"role": "user", "content": text}
    if message.tool_calls and not abilities.calls:
        parts = [message.content or "", *(_call_text(call) for call in message.tool_calls)]
        return {
            "role": role,
            "content": "\n".join(part for part in parts if part),
            **_thoughts(message, abilities),
        }
    # A missing content would be printed as "None" by some templates: it is always a string.
    turned: TemplateDict = {
        "role": role,
        "content": message.content or "",
        **_thoughts(message, abilities),
    }
    if message.name is not None:
        turned["name"] = message.name
    if message.tool_call_id is not None:
        turned["tool_call_id"] = _call_id(message.tool_call_id, abilities)
    if message.tool_calls:
        turned["tool_calls"] = [_call(call, abilities) for call in message.tool_calls]
    return turned


def _thoughts(message: Message, abilities: Abilities) -> TemplateDict:
    return {abilities.thoughts: message.reasoning} if message.reasoning else {}


def _call_id(given: str, abilities: Abilities) -> str:
    if abilities.long_ids or _SHORT_ID.fullmatch(given):
        return given
    return hashlib.blake2b(given.encode(), digest_size=8).hexdigest()[:9]


def _call(call: ToolCall, abilities: Abilities) -> TemplateDict:
    function: TemplateDict = {"name": call.name, "arguments": _arguments(call)}
    turned: TemplateDict = {"type": "function", "function": function}
    if call.id is not None:
        turned["id"] = _call_id(call.id, abilities)
    return turned


def _arguments(call: ToolCall) -> JsonObject | str:
    """An object, however it came; text that is none stays as the model wrote it, which it must see again."""
    if not isinstance(call.arguments, str):
        return dict(call.arguments)
    parsed = _parsed(call.arguments)
    if isinstance(parsed, dict):
        return parsed
    return {} if call.arguments.strip() in ("", "null") else call.arguments


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call_text(call: ToolCall) -> str:
    arguments = _arguments(call)
    written = arguments if isinstance(arguments, str) else _json(arguments)
    return f'<tool_call>\n{{"name": {_json(call.name)}, "arguments": {written}}}\n</tool_call>'


def template_tools(tools: Sequence[Tool]) -> tuple[TemplateDict, ...]:
    """As templates read them. Raises InvalidValue("tools[i]")."""
    return tuple(_tool(i, tool) for i, tool in enumerate(tools))


def _tool(index: int, tool: Tool) -> TemplateDict:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": _schema(index, tool),
    }
    return {"type": "function", "function": function}


def _schema(index: int, tool: Tool) -> JsonObject:
    given = tool.parameters
    if given is None or given == "":
        return _NO_PARAMETERS
    schema = _parsed(given) if isinstance(given, str) else dict(given)
    if not isinstance(schema, dict):
        raise InvalidValue(f"tools[{index}]", f"the parameters of {tool.name!r} are no JSON object")
    return schema or _NO_PARAMETERS


def tools_text(tools: Sequence[TemplateDict]) -> str:
    """What a system message says of the tools when the template says nothing."""
    return _TOOLS_TEXT.format(tools="\n".join(_json(tool) for tool in tools))


def _with_system_text(turned: list[Turned], text: str) -> list[Turned]:
    if turned[0].role != "system":
        return [Turned({"role": "system", "content": text}), *turned]
    return [turned[0].but(content=joined(turned[0].content, text)), *turned[1:]]


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValue("messages", f"a value is no JSON: {error}") from error
