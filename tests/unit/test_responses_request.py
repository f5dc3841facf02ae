"""Bodies of the Responses API: what they become, and that any other is refused with its place named."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import example, given, settings

from coordinator.errors import InvalidValue
from gateway.chat.messages import Message, ToolCall
from gateway.http.asker import Asker
from gateway.http.carried import carried, carrying
from gateway.http.fields import Fields
from gateway.http.openai.responses.request import Asked, response
from gateway.http.openai.responses.tools import Called
from gateway.turns import ChatPrompt, GrammarKind
from tests.unit.wild_json import wild_bodies

_BODIES = wild_bodies(
    "model input instructions tools tool_choice parallel_tool_calls max_output_tokens temperature top_p text reasoning "
    "store previous_response_id prompt_cache_key conversation include metadata stream truncation background prompt",
    "namespace role content type text summary name arguments call_id id input output effort tools mode "
    "encrypted_content format definition action parameters",
    "user assistant developer message reasoning function function_call function_call_output custom "
    "custom_tool_call namespace additional_tools auto required allowed_tools json_object input_text f",
)


def _asked(body: dict[str, Any], asker: Asker | None = None, header: str | None = None) -> Asked:
    return response(Fields(body), asker or Asker(), header)


def _messages(*items: dict[str, Any], **body: Any) -> tuple[Message, ...]:
    prompt = _asked({"input": list(items), **body}).turn.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def _refused(**body: Any) -> str:
    with pytest.raises(InvalidValue) as refused:
        _asked(body)
    return refused.value.field


@given(_BODIES)
@settings(max_examples=400)
@example({"input": [{"type": "function_call", "name": "f", "arguments": None}]})
@example({"input": [{"type": "reasoning", "encrypted_content": "ringserve.1.?"}]})
@example({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]})
@example({"tool_choice": {"type": "allowed_tools", "tools": [{"name": "f"}]}})
def test_any_body_is_read_or_refused(body: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidValue):
        assert _asked(body).turn.form


def test_an_answers_items_are_one_message_again() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Look."}]}
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I look."}],
    }
    calls = [
        {"type": "function_call", "name": "f", "arguments": '{"a":1}', "call_id": "c1"},
        {"type": "custom_tool_call", "name": "patch", "input": "*** Begin", "call_id": "c2"},
    ]
    results: list[dict[str, Any]] = [
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "two"}],
        },
    ]
    made = (ToolCall("f", '{"a":1}', "c1"), ToolCall("patch", {"input": "*** Begin"}, "c2"))
    assert _messages({"role": "user", "content": "Go"}, thought, said, *calls, *results) == (
        Message("user", "Go"),
        Message("assistant", "I look.", tool_calls=made, reasoning="Look."),
        Message("tool", "one", tool_call_id="c1"),
        Message("tool", "two", tool_call_id="c2"),
    )


def test_two_answers_in_a_row_stay_two() -> None:
    def said(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    def thought(text: str) -> dict[str, Any]:
        return {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": text}],
        }

    assert _messages(thought("A"), said("one"), thought("B"), said("two")) == (
        Message("assistant", "one", reasoning="A"),
        Message("assistant", "two", reasoning="B"),
    )
    assert _messages(said("one"), said("two")) == (
        Message("assistant", "one"),
        Message("assistant", "two"),
    )


def test_instructions_stand_at_the_head_and_developers_where_they_are() -> None:
    user, developer = {"role": "user", "content": "Hi"}, {"role": "developer", "content": "Now"}
    assert _messages(user, developer, instructions="Be brief.") == (
        Message("system", "Be brief."),
        Message("user", "Hi"),
        Message("developer", "Now"),
    )
    prompt = _asked({"input": "Hi", "instructions": None}).turn.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == (Message("user", "Hi"),)


def test_a_thought_comes_back_by_its_sealed_copy_and_a_foreign_one_by_its_summary() -> None:
    summary = [{"type": "summary_text", "text": "short"}]
    ours = {
        "type": "reasoning",
        "summary": summary,
        "encrypted_content": carrying("the whole\nthought 🧠"),
    }
    foreign = {"type": "reasoning", "summary": summary, "encrypted_content": "gAAAAABo"}
    assert _messages(ours)[0].reasoning == "the whole\nthought 🧠"
    assert _messages(foreign)[0].reasoning == "short"
    assert carried("ringserve.1.%%%") == ""


def test_a_free_form_tool_becomes_a_function_of_one_string() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: begin"}
    tools = [
        {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": grammar},
        {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False},
        {"type": "web_search"},
    ]
    asked = _asked({"input": "Hi", "tools": tools})
    assert isinstance(asked.turn.prompt, ChatPrompt)
    patch, shell = asked.turn.prompt.tools
    assert (patch.name, shell.name) == ("apply_patch", "shell")
    assert asked.own == {"apply_patch": Called("apply_patch", free=True), "shell": Called("shell")}
    assert isinstance(patch.parameters, dict)
    assert patch.parameters["required"] == ["input"]
    assert "start: begin" in str(patch.parameters)
    assert asked.echo["tools"] == tools


def test_tools_of_a_namespace_have_one_name_and_tools_among_the_input_count() -> None:
    """As newer Codex sends them: no tools at the top, and namespaces in an item of the input."""
    look = {"type": "function", "name": "look"}
    grouped = {"type": "namespace", "name": "mcp__docs", "description": "Docs.", "tools": [look]}
    bring = {"type": "additional_tools", "role": "developer", "tools": [grouped, look]}
    call = {
        "type": "function_call",
        "namespace": "mcp__docs",
        "name": "look",
        "call_id": "c",
        "arguments": "{}",
    }
    asked = _asked({"input": [bring, {"role": "user", "content": "Hi"}, call, bring]})
    prompt = asked.turn.prompt
    assert isinstance(prompt, ChatPrompt)
    assert [tool.name for tool in prompt.tools] == ["mcp__docs__look", "look"]
    assert asked.own["mcp__docs__look"] == Called("look", "mcp__docs")
    assert prompt.messages[1].tool_calls == (ToolCall("mcp__docs__look", "{}", "c"),)


def test_the_choice_of_tools_is_the_answers_form() -> None:
    tools = [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]

    def form(choice: Any, **more: Any) -> tuple[Any, ...]:
        got = _asked({"input": "Hi", "tools": tools, "tool_choice": choice, **more}).turn.form
        assert got is not None
        return got.calls, got.must_call, got.among, got.parallel

    assert form(None) == form("auto") == (True, False, (), True)
    assert form("none") == (False, False, (), True)
    assert form("required", parallel_tool_calls=False) == (True, True, (), False)
    assert form({"type": "custom", "name": "g"}) == (True, True, ("g",), False)
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "f"}],
    }
    assert form(allowed) == (True, False, ("f",), True)
    untooled = _asked({"input": "Hi"}).turn.form
    assert untooled is not None
    assert not untooled.calls
    assert _refused(tools=tools, tool_choice={"type": "function", "name": "h"}) == "tool_choice"
    assert _refused(tools=tools, tool_choice={"type": "web_search"}) == "tool_choice.type"
    assert _refused(tool_choice="required") == "tool_choice"
    assert _refused(tools=tools, tool_choice="often") == "tool_choice"


def test_a_text_format_is_the_answers_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    def grammar(**form: Any) -> Any:
        return _asked({"input": "Hi", "text": {"format": form, "verbosity": "low"}}).turn.grammar

    strict = grammar(type="json_schema", name="n", strict=True, schema=schema)
    assert (strict.kind, json.loads(strict.text)) == (GrammarKind.JSON_SCHEMA, schema)
    assert grammar(type="json_object").kind == GrammarKind.JSON_OBJECT
    assert grammar(type="text") is None
    assert _refused(text={"format": {"type": "json_schema", "name": "n"}}) == "text.format.schema"
    assert _refused(text={"format": {"type": "yaml"}}) == "text.format.type"


def test_what_would_need_a_memory_is_refused_by_name() -> None:
    assert _refused(previous_response_id="resp_1") == "previous_response_id"
    assert _refused(background=True) == "background"
    assert _refused(prompt={"id": "p"}) == "prompt"
    assert _refused(input=[{"type": "item_reference", "id": "msg_1"}]) == "input[0].type"
    assert _refused(input=[{"type": "compaction", "encrypted_content": "x"}]) == "input[0].type"


def test_wrong_values_are_named_by_their_path() -> None:
    assert _refused(input=[{"role": "user"}, {"role": "boss"}]) == "input[1].role"
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
    assert _refused(input=[image]) == "input[0].content[0].type"
    assert (
        _refused(input=[{"type": "function_call", "name": "f", "arguments": 3}])
        == "input[0].arguments"
    )
    assert _refused(input=[{"type": "functioncall"}]) == "input[0].type"
    assert _refused(input=3) == "input"
    deep: Any = {}
    for _ in range(100):
        deep = {"a": deep}
    assert _refused(metadata=deep) == "metadata"
    assert _refused(include="x") == "include"


def test_a_session_is_named_by_header_key_conversation_or_run() -> None:
    body = {"input": "Hi", "prompt_cache_key": "key", "conversation": {"id": "conv"}}
    assert _asked(body, Asker("header"), "run").turn.session == "header"
    assert _asked(body, None, "run").turn.session == "key"
    assert _asked({**body, "prompt_cache_key": None}, None, "run").turn.session == "conv"
    assert _asked({"input": "Hi"}, None, "run").turn.session == "run"
    assert _asked({"input": "Hi", "conversation": "conv"}).turn.session == "conv"
    assert _asked({"input": "Hi"}).turn.session is None


def test_an_effort_reaches_the_template_only_by_names_that_it_knows() -> None:
    def args(effort: str | None) -> Any:
        prompt = _asked({"input": "Hi", "reasoning": {"effort": effort}}).turn.prompt
        assert isinstance(prompt, ChatPrompt)
        return prompt.template_args

    assert args("high") == {"reasoning_effort": "high"}
    assert args("none") == {"enable_thinking": False}
    assert args("xhigh") == args(None) == {}
