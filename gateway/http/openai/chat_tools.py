"""A chat body's tools, and how the answer may call them. Raises InvalidValue with the field's path."""

from __future__ import annotations

from collections.abc import Collection

from coordinator.errors import InvalidValue
from gateway.chat.messages import Tool
from gateway.chat.parts import AnswerForm
from gateway.http.fields import Fields


def tools_of(body: Fields) -> tuple[Tool, ...]:
    return tuple(_tool(each) for each in body.objects("tools"))


def answer_form(body: Fields, tools: tuple[Tool, ...]) -> AnswerForm:
    """With "none" the tools stay in the prompt: without them it would begin otherwise, and nothing could be reused."""
    return chosen_form(body, {tool.name for tool in tools}, *_choice(body))


def chosen_form(
    body: Fields, tools: Collection[str], mode: str, names: tuple[str, ...]
) -> AnswerForm:
    """Of one of the modes, and the tools that may be called; none named: all."""
    for name in names:
        if name not in tools:
            raise InvalidValue("tool_choice", f"there is no tool {name!r} among tools")
    if mode == "required" and not tools:
        raise InvalidValue("tool_choice", "there are no tools to call")
    named = mode == "required" and len(names) == 1  # which is to be called, and not twice
    several = not body.has("parallel_tool_calls") or body.flag("parallel_tool_calls")
    return AnswerForm(
        calls=bool(tools) and mode != "none",
        must_call=mode == "required",
        among=names,
        parallel=several and not named,
    )


def _choice(body: Fields) -> tuple[str, tuple[str, ...]]:
    """One of the modes, and the tools that may be called; none named: all."""
    if not isinstance(body.raw("tool_choice"), dict):
        return chosen_mode(body, "tool_choice"), ()
    choice = body.object("tool_choice")
    kind = choice.text("type") or "function"
    match kind:
        case "function":
            # Some clients write the Responses API's flat form here.
            return "required", (
                name_of(choice.object("function") if choice.has("function") else choice),
            )
        case "allowed_tools":
            allowed = choice.object("allowed_tools") if choice.has("allowed_tools") else choice
            names = tuple(name_of(each.object("function")) for each in allowed.objects("tools"))
            if not names:
                raise InvalidValue(allowed.path("tools"), "is empty")
            return chosen_mode(allowed, "mode"), names
    raise InvalidValue(choice.path("type"), f"{kind} is neither function nor allowed_tools")


def chosen_mode(holder: Fields, field: str) -> str:
    mode = holder.text(field) or "auto"
    if mode not in ("auto", "none", "required"):
        raise InvalidValue(holder.path(field), f"{mode} is none of auto, none, required")
    return mode


def _tool(tool: Fields) -> Tool:
    function = tool.object("function")
    parameters = function.plain_object("parameters") or None
    return Tool(name_of(function), function.text("description"), parameters)


def name_of(function: Fields) -> str:
    name = function.text("name")
    if not name:
        raise InvalidValue(function.path("name"), "is missing")
    return name
