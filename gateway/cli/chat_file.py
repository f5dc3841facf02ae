"""A conversation out of a JSON file, in the shape of an OpenAI request: messages, tools and template_args.

Decides what such a file must look like; what the values mean is the server's business.
"""

from __future__ import annotations

import json
from typing import Any

from coordinator.errors import InvalidSetting
from gateway.chat.messages import Message, Tool, ToolCall
from gateway.turns import ChatPrompt


def parse_chat(text: str) -> ChatPrompt:
    """Raises InvalidSetting."""
    try:
        chat = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSetting("chat", f"is not JSON: {error}") from error
    try:
        return ChatPrompt(
            tuple(_message(message) for message in chat.get("messages", [])),
            tuple(_tool(tool.get("function", tool)) for tool in chat.get("tools", [])),
            dict(chat.get("template_args", {})),
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidSetting(
            "chat", f"is no object of messages and tools as an OpenAI request has them: {error!r}"
        ) from error


def _message(message: dict[str, Any]) -> Message:
    return Message(
        role=_text(message, "role") or "",
        content=_text(message, "content"),
        name=_text(message, "name"),
        tool_calls=tuple(_call(call) for call in message.get("tool_calls") or ()),
        tool_call_id=_text(message, "tool_call_id"),
    )


def _call(call: dict[str, Any]) -> ToolCall:
    function = call["function"]
    name = _text(function, "name") or ""
    return ToolCall(name, function.get("arguments", "{}"), _text(call, "id"))


def _tool(function: dict[str, Any]) -> Tool:
    name = _text(function, "name") or ""
    return Tool(name, _text(function, "description"), function.get("parameters"))


def _text(record: dict[str, Any], key: str) -> str | None:
    value = record.get(key)
    if isinstance(value, str | None):
        return value
    raise TypeError(f"{key} is no text")
