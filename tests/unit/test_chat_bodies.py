"""What OpenAI's clients may ask of an answer, in each of the ways that they write it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.chat.messages import Message
from gateway.chat.parts import AnswerForm
from gateway.http.asker import Asker
from gateway.http.fields import Fields
from gateway.http.openai import chat_request
from gateway.turns import ChatPrompt, GrammarKind, TurnRequest

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "move")]
ASK = [{"role": "user", "content": "Hello"}]


def _turn(**body: Any) -> TurnRequest:
    return chat_request.chat(Fields({"messages": ASK, **body}), Asker()).turns[0]


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({}, AnswerForm(calls=False)),
        ({"tools": TOOLS}, AnswerForm()),
        ({"tools": TOOLS, "tool_choice": None}, AnswerForm()),
        ({"tools": TOOLS, "tool_choice": "none"}, AnswerForm(calls=False)),
        ({"tools": TOOLS, "tool_choice": "required"}, AnswerForm(must_call=True)),
        (
            {"tools": TOOLS, "tool_choice": _named("move"), "parallel_tool_calls": False},
            AnswerForm(must_call=True, among=("move",), parallel=False),
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "move"}},
            AnswerForm(must_call=True, among=("move",), parallel=False),
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [_named("look")]},
                },
            },
            AnswerForm(among=("look",)),
        ),
    ],
)
def test_a_choice_of_tools_is_read_in_every_form(body: dict[str, Any], form: AnswerForm) -> None:
    assert _turn(**body).form == form


def test_without_calls_the_tools_stay_in_the_prompt() -> None:
    """A prompt without them would begin otherwise, and nothing of the conversation could be reused."""
    prompts = [_turn(tools=TOOLS, tool_choice=choice).prompt for choice in ("none", "auto")]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    "said",
    [
        {"reasoning_content": "why"},
        {"reasoning": "why"},
        {"reasoning_content": None, "reasoning": "why"},
    ],
)
def test_thoughts_in_the_history_are_read_by_either_name(said: dict[str, Any]) -> None:
    prompt = _turn(messages=[*ASK, {"role": "assistant", "content": "A", **said}]).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1] == Message("assistant", "A", reasoning="why")


def test_other_things_of_these_names_are_no_thoughts() -> None:
    odd = {"role": "assistant", "content": "A", "reasoning": {"effort": "low"}}
    prompt = _turn(messages=[*ASK, odd]).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1].reasoning is None


@pytest.mark.parametrize(
    ("body", "args"),
    [
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "minimal"}, {}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
    ],
)
def test_effort_reaches_the_template_by_names_that_it_knows(
    body: dict[str, Any], args: dict[str, Any]
) -> None:
    prompt = _turn(**body).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_args == args


def test_a_schema_that_is_not_strict_may_say_what_cannot_be_held() -> None:
    schema = {"type": "object"}
    for strict in (True, False):
        wanted = {"name": "x", "schema": schema, "strict": strict}
        grammar = _turn(response_format={"type": "json_schema", "json_schema": wanted}).grammar
        assert grammar is not None
        assert (grammar.kind, grammar.field) == (GrammarKind.JSON_SCHEMA, "response_format")
        assert ("x-guidance" in json.loads(grammar.text)) == (not strict)
    assert _turn(response_format={"type": "text"}).grammar is None
