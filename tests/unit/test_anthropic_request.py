"""Anthropic's bodies become the turns that they mean, or a refusal that names a field."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from starlette.datastructures import Headers

from coordinator.errors import InvalidValue
from gateway.chat.messages import Message, Tool, ToolCall
from gateway.chat.parts import AnswerForm
from gateway.http.anthropic import request
from gateway.http.anthropic.request import Asked
from gateway.http.anthropic.session import asker_of, session_in
from gateway.http.asker import Asker
from gateway.http.carried import carrying
from gateway.http.fields import Fields
from gateway.turns import ChatPrompt
from tests.unit.wild_json import wild_bodies

HELLO = {"role": "user", "content": "Hello"}
LOOK: dict[str, Any] = {
    "name": "look",
    "description": "Looks",
    "input_schema": {"type": "object", "properties": {"at": {}}},
}
BILLING = "x-anthropic-billing-header: cc_version=2.1.160; cch=00001;"


def asked(*messages: Any, asker: Asker = Asker(), **more: Any) -> Asked:  # noqa: B008
    body = {"max_tokens": 5, "messages": list(messages) or [HELLO], **more}
    return request.asked(Fields(body), asker)


def prompt(*messages: Any, **more: Any) -> ChatPrompt:
    found = asked(*messages, **more).turn.prompt
    assert isinstance(found, ChatPrompt)
    return found


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def result(call: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, **more}


def use(call: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": "look", "input": arguments}


def test_system_text_goes_first_and_the_billing_line_goes_nowhere() -> None:
    said = [
        text(BILLING),
        text("Be brief.", cache_control={"type": "ephemeral"}),
        text(""),
        text("Be kind."),
    ]
    assert prompt(system=said).messages == (
        Message("system", "Be brief.\n\nBe kind."),
        Message("user", "Hello"),
    )
    assert prompt(system="Be brief.").messages[0] == Message("system", "Be brief.")
    assert prompt(system=[text(BILLING)]).messages == (Message("user", "Hello"),)


def test_a_system_message_in_the_middle_stays_there() -> None:
    late = {"role": "system", "content": [text("Plan mode is on.")]}
    found = prompt(HELLO, assistant(text("Hi.")), late, HELLO).messages
    assert [message.role for message in found] == ["user", "assistant", "system", "user"]
    assert found[2].content == "Plan mode is on."


def test_a_tool_loop_keeps_its_calls_results_and_thoughts() -> None:
    found = prompt(
        user(text("<system-reminder>x</system-reminder>"), text("Look!")),
        assistant(
            {"type": "thinking", "thinking": "Where?", "signature": "s"},
            {"type": "redacted_thinking", "data": "zz"},
            text("I look."),
            use("toolu_1", at="here"),
            use("toolu_2"),
        ),
        user(
            text("And?"),
            result("toolu_1", content="a tree"),
            result("toolu_2", content=[text("a"), text("b")]),
            text("Hurry."),
        ),
    ).messages
    assert found == (
        Message("user", "<system-reminder>x</system-reminder>\n\nLook!"),
        Message(
            "assistant",
            "I look.",
            tool_calls=(
                ToolCall("look", {"at": "here"}, "toolu_1"),
                ToolCall("look", {}, "toolu_2"),
            ),
            reasoning="Where?",
        ),
        Message("tool", "a tree", tool_call_id="toolu_1"),
        Message("tool", "a\n\nb", tool_call_id="toolu_2"),
        Message("user", "And?\n\nHurry."),
    )


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (result("c"), ""),
        (result("c", content=None), ""),
        (result("c", content=[]), ""),
        (result("c", content="no such file", is_error=True), "Error: no such file"),
        (
            result("c", content="<tool_use_error>no</tool_use_error>", is_error=True),
            "<tool_use_error>no</tool_use_error>",
        ),
        (
            result("c", content=[{"type": "image", "source": {}}]),
            "[left out: this model reads no images]",
        ),
        (
            result("c", content=[{"type": "tool_reference", "tool_name": "look"}]),
            "The tool look is there.",
        ),
        (
            result(
                "c",
                content=[
                    {"type": "search_result", "title": "T", "source": "S", "content": [text("x")]}
                ],
            ),
            "T\n\nS\n\nx",
        ),
    ],
)
def test_whatever_a_tool_gave_back_the_conversation_goes_on(block: Any, content: str) -> None:
    assert prompt(HELLO, assistant(use("c")), user(block)).messages[-1] == Message(
        "tool", content, tool_call_id="c"
    )


def test_documents_of_text_are_read() -> None:
    plain = {
        "type": "document",
        "title": "T",
        "source": {"type": "text", "media_type": "text/plain", "data": "D"},
    }
    parts = {"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}}
    assert prompt(user(plain, parts)).messages[-1].content == "T\n\nD\n\na\n\nb"


def test_what_an_answer_said_is_put_together_as_it_was() -> None:
    said = assistant(
        text("a\n"), {"type": "server_tool_use", "id": "x", "name": "y", "input": {}}, text("b")
    )
    assert prompt(HELLO, said, HELLO).messages[1].content == "a\nb"


def test_empty_messages_are_left_out() -> None:
    redacted = assistant({"type": "redacted_thinking", "data": "zz"})
    assert (
        prompt(HELLO, redacted, user(text("")), HELLO).messages == (Message("user", "Hello"),) * 2
    )


def test_arguments_that_were_no_json_come_back_as_the_model_wrote_them() -> None:
    broken = assistant({**use("c"), "input": {"_raw": '{"at": '}})
    meant = assistant({**use("c"), "input": {"_raw": '{"at": 1}'}})
    assert prompt(HELLO, broken, user(result("c"))).messages[1].tool_calls[0].arguments == '{"at": '
    assert prompt(HELLO, meant, user(result("c"))).messages[1].tool_calls[0].arguments == {
        "_raw": '{"at": 1}'
    }


def test_thoughts_that_were_not_shown_come_back_in_their_signature() -> None:
    hidden = {"type": "thinking", "thinking": "", "signature": carrying("Hm. ü")}
    assert prompt(HELLO, assistant(hidden, text("x")), HELLO).messages[1].reasoning == "Hm. ü"
    for foreign in ("", "abc", "ringserve.1.%%%", "ringserve.1./w==", None):
        block = {**hidden, "signature": foreign}
        assert prompt(HELLO, assistant(block, text("x")), HELLO).messages[1].reasoning is None


def test_an_answer_that_is_begun_is_gone_on_from_without_a_thought() -> None:
    found = prompt(HELLO, assistant(text("The best is (")), thinking={"type": "adaptive"})
    assert (found.messages, found.begun) == ((Message("user", "Hello"),), "The best is (")
    assert found.template_args == {"enable_thinking": False}
    assert prompt(HELLO, assistant({"type": "thinking", "thinking": "x"})).begun == ""


def test_tools_that_anthropic_runs_are_left_out() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    found = prompt(
        tools=[LOOK, search, {**LOOK, "name": "see", "type": "custom", "input_schema": {}}]
    )
    assert found.tools == (
        Tool("look", "Looks", LOOK["input_schema"]),
        Tool("see", "Looks", None),
    )


@pytest.mark.parametrize(
    ("choice", "form"),
    [
        (None, AnswerForm()),
        ({"type": "auto"}, AnswerForm()),
        ({"type": "auto", "disable_parallel_tool_use": True}, AnswerForm(parallel=False)),
        ({"type": "none"}, AnswerForm(calls=False)),
        ({"type": "any"}, AnswerForm(must_call=True)),
        (
            {"type": "tool", "name": "look"},
            AnswerForm(must_call=True, among=("look",), parallel=False),
        ),
    ],
)
def test_a_choice_of_tools_is_the_answers_form(choice: Any, form: AnswerForm) -> None:
    assert asked(tools=[LOOK], tool_choice=choice).turn.form == form


def test_without_tools_nothing_is_a_call() -> None:
    assert asked().turn.form == AnswerForm(calls=False)


@pytest.mark.parametrize(
    ("thinking", "args"),
    [
        (None, {}),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "adaptive"}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
    ],
)
def test_thinking_is_the_templates_business(thinking: Any, args: dict[str, object]) -> None:
    assert prompt(thinking=thinking).template_args == args
    own = {"enable_thinking": 7, "more": 1}
    assert prompt(thinking=thinking, chat_template_kwargs=own).template_args == own


def test_a_turn_has_the_bodys_sampling_and_bounds() -> None:
    found = asked(
        model="m",
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=-1,
        stop_sequences=["x", ""],
        stream=True,
        max_tokens=7,
    )
    turn = found.turn
    assert (turn.model, turn.max_tokens, turn.stop, turn.seed) == ("m", 7, ("x",), 2**64 - 1)
    assert (turn.sampling.temperature, turn.sampling.top_p, turn.sampling.top_k) == (0.5, 0.9, 3)
    assert (found.stream, found.only_read, found.show_thoughts) == (True, False, True)
    assert asked(model="claude-haiku-4-5").turn.model == ""
    assert asked(max_tokens=0).only_read


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        ("user_ab12_account__session_5f0c-8e", "5f0c-8e"),
        ("user_ab12_account_cd_session_5f0c-8e", "5f0c-8e"),
        ('{"device_id": "d", "account_uuid": "", "session_id": "5f0c"}', "5f0c"),
        ("somebody", None),
        ('{"session_id": 5}', None),
        ('{"session_id": ""}', None),
        ("{", None),
        ("", None),
        (None, None),
    ],
)
def test_claude_codes_user_ids_name_a_session(user_id: str | None, session: str | None) -> None:
    assert session_in(user_id) == session
    assert asked(metadata={"user_id": user_id}).turn.session == session


def test_headers_name_the_session_first_and_agents_are_sessions_of_their_own() -> None:
    named = {"x-claude-code-session-id": "s"}
    agent = {**named, "x-claude-code-agent-id": "a"}
    body = {"user_id": "user_x_account__session_0"}
    for own, headers, session in (
        ("x", agent, "x"),
        (None, named, "s"),
        (None, agent, "s/a"),
        (None, {}, "0"),
    ):
        asker = asker_of(Asker(own), Headers(headers))
        assert asked(asker=asker, metadata=body).turn.session == session


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [user({"text": "x"})]}, "messages[0].content[0].type"),
        ({"messages": [user({"type": "image", "source": {}})]}, "messages[0].content[0].type"),
        ({"messages": [user({"type": "hologram"})]}, "messages[0].content[0].type"),
        (
            {"messages": [user({"type": "document", "source": {"type": "base64"}})]},
            "messages[0].content[0].source.type",
        ),
        ({"messages": [user({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [HELLO, assistant({"type": "tool_use"})]}, "messages[1].content[0].name"),
        ({"messages": [HELLO, assistant(use("c"))]}, "messages"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": 5}, "system"),
        ({"tools": [{"description": "x"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"stop_sequences": 5}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 999}, "stop_sequences"),
        ({"temperature": "hot"}, "temperature"),
        ({"metadata": "x"}, "metadata"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        asked(**{"messages": [HELLO], **changes})
    assert refused.value.field == field


def test_counting_needs_no_bound_and_takes_calls_that_wait() -> None:
    found, model = request.counted(Fields({"model": "m", "messages": [HELLO, assistant(use("c"))]}))
    assert (found.messages[-1].tool_calls, model) == ((ToolCall("look", {}, "c"),), "m")


_BODIES = wild_bodies(
    "model messages system tools tool_choice max_tokens temperature top_p top_k stop_sequences stream metadata "
    "thinking output_config output_format service_tier seed chat_template_kwargs",
    "role content type text id name input tool_use_id is_error thinking signature source data title user_id format "
    "schema input_schema disable_parallel_tool_use display",
    "user system assistant text tool_use tool_result thinking document any tool json_schema",
    json.dumps({"session_id": "x"}),
)


@given(_BODIES)
@settings(max_examples=400, deadline=None)
@example(
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}],
        "max_tokens": 1,
    }
)
@example({"messages": [HELLO], "max_tokens": 1, "metadata": {"user_id": "{" + "[" * 9999}})
def test_any_body_is_read_or_refused(body: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidValue):
        assert isinstance(request.asked(Fields(body), Asker()), Asked)
    with contextlib.suppress(InvalidValue):
        assert isinstance(request.counted(Fields(body))[0], ChatPrompt)
