"""Anthropic's message bodies to typed turns. Raises InvalidValue with the field's path; renders nothing.

What clients send for Anthropic's own machinery (caching, tiers, tools that run on its servers) is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.errors import InvalidValue
from coordinator.requests import SamplingSpec
from gateway.chat.messages import Message, Tool
from gateway.chat.parts import AnswerForm
from gateway.http.anthropic import content
from gateway.http.anthropic.session import session_in
from gateway.http.asker import Asker
from gateway.http.fields import Fields
from gateway.http.openai.output_format import output_grammar
from gateway.limits import MAX_STOPS, at_most
from gateway.turns import ChatPrompt, GrammarSpec, TurnRequest

_FLOATS = ("temperature", "top_p", "min_p")
# Claude Code asks for small models by Anthropic's names as well; there is one model here.
_ANYBODYS = "claude-"


@dataclass(frozen=True, slots=True)
class Asked:
    """One body. `only_read`: the prompt is to be computed and nothing to be said. `show_thoughts`: in the answer."""

    turn: TurnRequest
    stream: bool
    only_read: bool
    show_thoughts: bool


def counted(body: Fields) -> tuple[ChatPrompt, str]:
    """What /v1/messages/count_tokens counts, and of which model."""
    return _prompt(body, tuple(content.messages(body))), _model(body)


def asked(body: Fields, asker: Asker) -> Asked:
    limit = body.whole("max_tokens")
    if limit is None:
        raise InvalidValue("max_tokens", "is missing")
    seed = body.whole("seed")
    said = tuple(content.messages(body))
    if said and said[-1].tool_calls:
        raise InvalidValue("messages", "ends in tool calls; their results are missing")
    prompt = _prompt(body, said)
    turn = TurnRequest(
        prompt=prompt,
        model=_model(body),
        session=asker.owner(session_in(body.object("metadata").text("user_id"))),
        sampling=_sampling(body),
        seed=None if seed is None else seed % 2**64,
        max_tokens=limit or 1,
        stop=_stops(body),
        form=_form(body, prompt.tools),
        grammar=_grammar(body),
    )
    shown = body.object("thinking").text("display") != "omitted"
    return Asked(turn, body.flag("stream"), only_read=limit == 0, show_thoughts=shown)


def _model(body: Fields) -> str:
    model = body.text("model") or ""
    return "" if model.startswith(_ANYBODYS) else model


def _prompt(body: Fields, said: tuple[Message, ...]) -> ChatPrompt:
    if not said:
        raise InvalidValue("messages", "is empty")
    tools = tuple(_tool(tool) for tool in body.objects("tools") if _is_ours(tool))
    args = _template_args(body)
    begun = ""
    if said[-1].role == "assistant" and not said[-1].tool_calls:
        *before, last = said
        said, begun = tuple(before), last.content or ""
    if begun:
        args["enable_thinking"] = False  # there are no thoughts in the middle of an answer
    return ChatPrompt((*content.system(body), *said), tools, args, begun)


def _is_ours(tool: Fields) -> bool:
    """Others are known by their type alone and run on Anthropic's servers."""
    return tool.text("type") in (None, "custom")


def _tool(tool: Fields) -> Tool:
    name = tool.text("name")
    if not name:
        raise InvalidValue(tool.path("name"), "is missing")
    schema = tool.plain_object("input_schema") or None
    return Tool(name, tool.text("description"), schema)


def _template_args(body: Fields) -> dict[str, Any]:
    args = body.plain_object("chat_template_kwargs")
    thinking = body.object("thinking").text("type")
    if thinking is not None:
        args.setdefault("enable_thinking", thinking != "disabled")
    return args


def _sampling(body: Fields) -> SamplingSpec:
    values = {name: body.number(name) for name in _FLOATS}
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    return SamplingSpec(top_k=max(body.whole("top_k") or 0, 0), **given)


def _grammar(body: Fields) -> GrammarSpec | None:
    # Its first name, which betas still have.
    holder, name = (
        (body, "output_format")
        if body.has("output_format")
        else (body.object("output_config"), "format")
    )
    wanted = holder.object(name)
    return output_grammar(wanted, wanted)


def _stops(body: Fields) -> tuple[str, ...]:
    stops = body.texts("stop_sequences")
    at_most("stop_sequences", len(stops), MAX_STOPS, "strings")
    return tuple(stop for stop in stops if stop)


def _form(body: Fields, tools: Sequence[Tool]) -> AnswerForm:
    choice = body.object("tool_choice")
    kind = choice.text("type")
    # A tool that is named is to be called, and not twice.
    parallel = not choice.flag("disable_parallel_tool_use") and kind != "tool"
    if kind not in (None, "auto", "any", "tool", "none"):
        raise InvalidValue(choice.path("type"), f"{kind} is none of auto, any, tool, none")
    must = kind in ("any", "tool")
    if must and not tools:
        raise InvalidValue("tool_choice", "there are no tools to call")
    among = (_chosen(choice, tools),) if kind == "tool" else ()
    calls = bool(tools) and kind != "none"
    return AnswerForm(calls=calls, must_call=must, among=among, parallel=parallel)


def _chosen(choice: Fields, tools: Sequence[Tool]) -> str:
    name = choice.text("name")
    if not name:
        raise InvalidValue(choice.path("name"), "is missing")
    if name not in {tool.name for tool in tools}:
        raise InvalidValue(choice.path("name"), f"there is no tool {name!r} among tools")
    return name
