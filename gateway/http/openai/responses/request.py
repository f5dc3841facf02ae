"""The Responses API's bodies to typed turns. Raises InvalidValue with the field's path; renders nothing.

The server keeps no responses: whatever refers to one that was kept is refused, since without it the answer would be
another. What merely asks for more than there is (a service tier, a verbosity) is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.errors import InvalidValue
from coordinator.requests import SessionId
from gateway.http.asker import Asker
from gateway.http.fields import Fields
from gateway.http.openai.chat_request import sampling, stops, template_args
from gateway.http.openai.output_format import output_grammar
from gateway.http.openai.responses.input import conversation
from gateway.http.openai.responses.tools import Called, answer_form, toolbox
from gateway.turns import ChatPrompt, GrammarSpec, TurnRequest

_SEALED = "reasoning.encrypted_content"
_DEEPEST = 64
# Fields that an answer says again, as they came.
_ECHOED = (
    "instructions",
    "metadata",
    "prompt_cache_key",
    "reasoning",
    "text",
    "tool_choice",
    "user",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One body. `echo`: what the answer says again of it; `own`: its tools, by the names that the model knows;
    `seals`: thoughts come with a copy to be sent back."""

    turn: TurnRequest
    stream: bool
    own: Mapping[str, Called]
    seals: bool
    echo: dict[str, Any]


def response(body: Fields, asker: Asker, session_header: str | None = None) -> Asked:
    _refuse_kept(body)
    box = toolbox(body)
    seed = body.whole("seed")
    turn = TurnRequest(
        prompt=ChatPrompt(conversation(body), tuple(box.tools), template_args(body)),
        model=body.text("model") or "",
        session=_session(body, asker, session_header),
        sampling=sampling(body, None),
        seed=None if seed is None else seed % 2**64,
        max_tokens=body.whole("max_output_tokens"),
        stop=stops(body),
        grammar=_grammar(body),
        form=answer_form(body, box),
    )
    return Asked(
        turn=turn,
        stream=body.flag("stream"),
        own=box.own,
        seals=_SEALED in body.list("include"),
        echo=_echo(body, turn),
    )


def _refuse_kept(body: Fields) -> None:
    if body.text("previous_response_id"):
        raise InvalidValue(
            "previous_response_id",
            "this server keeps no responses: send the whole conversation as input",
        )
    if body.flag("background"):
        raise InvalidValue("background", "this server keeps no responses to be fetched later")
    if body.has("prompt"):
        raise InvalidValue("prompt", "this server keeps no prompts: send instructions and input")


def _grammar(body: Fields) -> GrammarSpec | None:
    wanted = body.object("text").object("format")
    return output_grammar(wanted, wanted)


def _session(body: Fields, asker: Asker, session_header: str | None) -> SessionId | None:
    """A conversation's own name goes before the one of the program run that it belongs to."""
    talk = body.raw("conversation")
    name = (
        body.object("conversation").text("id")
        if isinstance(talk, dict)
        else body.text("conversation")
    )
    return asker.owner(body.text("prompt_cache_key"), name, session_header)


def _echo(body: Fields, turn: TurnRequest) -> dict[str, Any]:
    said = {name: body.raw(name) for name in _ECHOED if body.has(name)}
    for name in (*said, "tools"):
        _check_depth(name, body.raw(name))
    form = turn.form
    return {
        "metadata": {},
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        **said,
        "instructions": body.raw("instructions"),
        "max_output_tokens": turn.max_tokens,
        "parallel_tool_calls": form is None or form.parallel,
        "temperature": turn.sampling.temperature,
        "tools": body.list("tools"),
        "top_p": turn.sampling.top_p,
    }


def _check_depth(name: str, value: Any, left: int = _DEEPEST) -> None:
    """What could be read may be too deep to be written again."""
    if not left:
        raise InvalidValue(name, f"is nested deeper than {_DEEPEST} levels")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        _check_depth(name, each, left - 1)
