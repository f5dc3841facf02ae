"""Turns message records into what a chat template reads, with what the template cannot do written out.

It decides how tools, calls and results are worded for a template that ignores them: in the `<tools>`,
`<tool_call>` and `<tool_response>` form that Hermes and Qwen made common. Each message is converted by itself
(only the tools go into the first one), so a longer conversation's messages begin with a shorter one's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.errors import InvalidValue
from gateway.chat.messages import JsonObject, Message, Tool, ToolCall

TemplateDict = dict[str, object]  # what templates read: OpenAI's wire shape

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

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
class Abilities:
    """What a template renders by itself; the rest is written into the messages' text."""

    system: bool
    tools: bool
    calls: bool  # assistant messages' tool calls, and tool messages
    late_system: bool = True  # system messages behind the first message, as agents send them


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[TemplateDict, ...]
    tools: tuple[TemplateDict, ...] = ()  # only those that the template renders by itself


def conversation(
    messages: Sequence[Message], tools: Sequence[Tool], abilities: Abilities
) -> Conversation:
    """Raises InvalidValue of a path that begins with messages or tools."""
    if not messages:
        raise InvalidValue("messages", "there are no messages")
    turned = [_message(i, message, abilities) for i, message in enumerate(messages)]
    described = tuple(_tool(i, tool) for i, tool in enumerate(tools))
    if described and not abilities.tools:
        turned = _with_system_text(turned, tools_text(described))
        described = ()
    if not abilities.late_system:
        # Where it stands: moved to the front it would change what every turn begins with.
        later = ({**m, "role": "user"} if m["role"] == "system" else m for m in turned[1:])
        turned = [turned[0], *later]
    if not abilities.system:
        turned = _system_in_first_user_message(turned)
    return Conversation(tuple(turned), described)


def _message(index: int, message: Message, abilities: Abilities) -> TemplateDict:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidValue(f"messages[{index}].role", f"there is no role {message.role!r}")
    if role == "tool" and not abilities.calls:
        text = f"<tool_response>\n{message.content or ''}\n</tool_response>"
        return {"role": "user", "content": text}
    if message.tool_calls and not abilities.calls:
        parts = [message.content or "", *(_call_text(call) for call in message.tool_calls)]
        return {"role": role, "content": "\n".join(part for part in parts if part)}
    # A missing content would be printed as "None" by some templates: it is always a string.
    turned: TemplateDict = {"role": role, "content": message.content or ""}
    if message.name is not None:
        turned["name"] = message.name
    if message.tool_call_id is not None:
        turned["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turned["tool_calls"] = [_call(call) for call in message.tool_calls]
    return turned


def _call(call: ToolCall) -> TemplateDict:
    function: TemplateDict = {"name": call.name, "arguments": _arguments(call)}
    turned: TemplateDict = {"type": "function", "function": function}
    if call.id is not None:
        turned["id"] = call.id
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


def _with_system_text(messages: list[TemplateDict], text: str) -> list[TemplateDict]:
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    first = messages[0]
    return [{**first, "content": _joined(first["content"], text)}, *messages[1:]]


def _system_in_first_user_message(messages: list[TemplateDict]) -> list[TemplateDict]:
    if messages[0]["role"] != "system":
        return messages
    if len(messages) < 2 or messages[1]["role"] != "user":
        return [{**messages[0], "role": "user"}, *messages[1:]]
    second = messages[1]
    return [
        {**second, "content": _joined(messages[0]["content"], second["content"])},
        *messages[2:],
    ]


def _joined(first: object, second: object) -> str:
    return "\n\n".join(str(part) for part in (first, second) if part)


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValue("messages", f"a value is no JSON: {error}") from error
