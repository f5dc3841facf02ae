"""The Responses API's tools: which functions a model is shown, how it may call them, and what they are called again.

A "custom" tool takes free text. A model is shown a function of one string instead, and the client gets the string. A
namespace's tools are shown under names of their own. Some clients send tools among the input's items. Those that a
server runs by itself are left out: this one runs none.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.errors import InvalidValue
from gateway.chat.messages import Tool
from gateway.chat.parts import AnswerForm
from gateway.http.fields import Fields
from gateway.http.openai.chat_tools import chosen_form, chosen_mode, name_of

# Items of the input that bring tools along.
_BRINGERS = frozenset({"additional_tools", "tool_search_output"})


@dataclass(frozen=True, slots=True)
class Called:
    """A tool as its client calls it. `free`: its input is plain text."""

    name: str
    namespace: str | None = None
    free: bool = False


class Toolbox:
    """What a model is shown, and under each shown name the client's own tool."""

    def __init__(self) -> None:
        self.tools: list[Tool] = []
        self.own: dict[str, Called] = {}

    def add(self, tool: Tool, own: Called) -> None:
        """The first of a name stays: some clients send a tool with each turn that knows it."""
        if tool.name not in self.own:
            self.tools.append(tool)
            self.own[tool.name] = own


def toolbox(body: Fields) -> Toolbox:
    """Raises InvalidValue."""
    box = Toolbox()
    _put(body, box)
    if isinstance(body.raw("input"), list):
        for item in body.objects("input"):
            if item.text("type") in _BRINGERS:
                _put(item, box)
    return box


def shown_name(namespace: str | None, name: str) -> str:
    """What a model calls a tool: templates know no namespaces."""
    if not namespace:
        return name
    return f"{namespace}{'' if namespace.endswith('_') or name.startswith('_') else '__'}{name}"


def _put(holder: Fields, box: Toolbox, namespace: str | None = None) -> None:
    for tool in holder.objects("tools"):
        match tool.text("type"):
            case "function":
                # Some clients write the function as chat completions have it.
                function = tool.object("function") if tool.has("function") else tool
                own = Called(name_of(function), namespace)
                box.add(_function(function, shown_name(namespace, own.name)), own)
            case "custom":
                own = Called(name_of(tool), namespace, free=True)
                box.add(_free_text(tool, shown_name(namespace, own.name)), own)
            case "namespace" if namespace is None:
                _put(tool, box, name_of(tool))
            case None:
                raise InvalidValue(tool.path("type"), "is missing")


def answer_form(body: Fields, box: Toolbox) -> AnswerForm:
    """What the answer may call. Raises InvalidValue."""
    return chosen_form(body, box.own, *_choice(body))


def _choice(body: Fields) -> tuple[str, tuple[str, ...]]:
    if not isinstance(body.raw("tool_choice"), dict):
        return chosen_mode(body, "tool_choice"), ()
    choice = body.object("tool_choice")
    kind = choice.text("type")
    match kind:
        case "function" | "custom":
            return "required", (_chosen(choice),)
        case "allowed_tools":
            names = tuple(_chosen(tool) for tool in choice.objects("tools"))
            if not names:
                raise InvalidValue(choice.path("tools"), "is empty")
            return chosen_mode(choice, "mode"), names
    raise InvalidValue(choice.path("type"), f"{kind} is nothing that this server runs")


def _chosen(choice: Fields) -> str:
    return shown_name(choice.text("namespace"), name_of(choice))


def _function(tool: Fields, name: str) -> Tool:
    return Tool(name, tool.text("description"), tool.plain_object("parameters") or None)


def _free_text(tool: Fields, name: str) -> Tool:
    form = tool.object("format")
    wanted = "The whole input, as plain text."
    if form.text("type") == "grammar":
        syntax, definition = form.text("syntax") or "", form.text("definition") or ""
        wanted += f" It follows this {syntax} grammar:\n{definition}"
    schema = {
        "type": "object",
        "properties": {"input": {"type": "string", "description": wanted}},
        "required": ["input"],
    }
    return Tool(name, tool.text("description"), schema)
