"""Templates get messages where they take them; each request still begins with the one before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.chat.boundaries import AddedTokens
from gateway.chat.byte_tokenizer import _SPECIALS, ByteTokenizer
from gateway.chat.conversation import TemplateDict
from gateway.chat.messages import Message, ToolCall
from gateway.chat.templates import ChatRenderer


class Template:
    """`refuses`: pairs of roles of which the second may not come behind the first; "late": late system messages."""

    def __init__(
        self, *refuses: str, calls: bool = True, short_ids: bool = False, thought: str = ""
    ) -> None:
        self._refuses = refuses
        self._calls = calls
        self._short_ids = short_ids
        self._thought = thought

    def __call__(
        self,
        messages: Sequence[TemplateDict],
        tools: Sequence[TemplateDict],
        args: Mapping[str, object],
        *,
        generate: bool,
    ) -> str:
        roles = [str(message["role"]) for message in messages]
        for before, role in pairwise(roles):
            if f"{before}-{role}" in self._refuses:
                raise ValueError(f"no {role} behind {before}")
        if "late" in self._refuses and "system" in roles[1:]:
            raise ValueError("System message must be at the beginning.")
        return "".join(map(self._one, messages)) + "<|start|>assistant\n" * generate

    def _one(self, message: TemplateDict) -> str:
        said = f"<|start|>{message['role']}\n"
        if self._thought and message.get(self._thought):
            said += f"<think>{message[self._thought]}</think>"
        said += str(message["content"])
        calls: Any = message.get("tool_calls") or []
        for call in calls if self._calls else ():
            self._check(call["id"])
            said += f"<call>{call['function']['name']} {call['function']['arguments']}</call>"
        if message["role"] == "tool" and self._calls:
            self._check(message["tool_call_id"])
        return f"{said}<|end|>\n"

    def _check(self, call: object) -> None:
        if self._short_ids and len(str(call)) != 9:
            raise ValueError("Tool call IDs should be alphanumeric strings with length 9!")

    def renderer(self) -> ChatRenderer:
        return ChatRenderer(self, ByteTokenizer().encode, AddedTokens.of(_SPECIALS, _SPECIALS))


SYSTEM, ASK, ANSWER = (
    Message(*each) for each in (("system", "S"), ("user", "Q"), ("assistant", "A"))
)
LATE, MORE = Message("system", "L"), Message("user", "M")
CALLED = Message("assistant", None, tool_calls=(ToolCall("f", "{}", "call_01"),))
RESULT = Message("tool", "R", tool_call_id="call_01")
STRICT = Template("late", "user-user", "tool-user")
KINDS = [
    Template(),
    Template("late"),
    Template("user-user"),
    Template("late", "user-user"),
    STRICT,
    Template("late", "user-user", calls=False),
    Template("late", "user-user", "tool-user", short_ids=True),
]


def _roles(renderer: ChatRenderer, *talk: Message) -> list[str]:
    text = renderer.render(talk, (), {}, None).text
    bodies = text.removesuffix("<|start|>assistant\n").split("<|start|>")[1:]
    return [body.removesuffix("<|end|>\n").replace("\n", " ").replace("  ", " ") for body in bodies]


@pytest.mark.parametrize(
    ("template", "talk", "told"),
    [
        (Template(), [SYSTEM, ASK, ANSWER, LATE, MORE], "system S|user Q|assistant A|system L|user M"),
        (Template("late"), [SYSTEM, LATE, ASK], "system S L|user Q"),
        (Template("late"), [SYSTEM, ASK, ANSWER, LATE, MORE], "system S|user Q|assistant A|user L|user M"),
        (STRICT, [SYSTEM, ASK, LATE, ANSWER, MORE], "system S|user Q L|assistant A|user M"),
        (STRICT, [SYSTEM, ASK, ANSWER, LATE, MORE], "system S|user Q|assistant A|user L M"),
        (STRICT, [ASK, MORE, ANSWER, LATE], "user Q M|assistant A|user L"),
        (STRICT, [ASK, CALLED, RESULT, LATE], "user Q|assistant <call>f {}</call>|tool R L"),
        (STRICT, [ASK, CALLED, LATE, RESULT, MORE], "user Q|assistant <call>f {}</call>|tool R L M"),
        (Template(), [ASK, CALLED, LATE, RESULT], "user Q|assistant <call>f {}</call>|tool R|system L"),
        (Template("late"), [ASK, CALLED, RESULT, LATE, MORE], "user Q|assistant <call>f {}</call>|tool R L|user M"),
    ],
)  # fmt: skip
def test_a_message_goes_no_further_than_it_must(
    template: Template, talk: list[Message], told: str
) -> None:
    """anthropics/claude-code#63469: agents send system messages in the middle, and many templates refuse them."""
    assert _roles(template.renderer(), *talk) == told.split("|")


@st.composite
def _talks(draw: st.DrawFn) -> list[list[Message]]:
    """A conversation, request by request: what each adds to the one before, answer first."""
    rounds: list[list[Message]] = []
    answer: list[Message] = []
    for number in range(draw(st.integers(1, 5))):
        texts = st.sampled_from([Message("user", f"u{number}"), Message("system", f"s{number}")])
        calls = answer[0].tool_calls if answer else ()
        results = [Message("tool", f"r{call.id}", tool_call_id=call.id) for call in calls]
        between = draw(st.lists(texts.filter(lambda m: m.role == "system"), max_size=1))
        more = draw(st.lists(texts, min_size=not results, max_size=3))
        if not number:
            more.append(Message("user", "first"))
        rounds.append([*answer, *results[:1], *(between if results else ()), *results[1:], *more])
        count = draw(st.integers(0, 2))
        made = tuple(ToolCall("f", "{}", f"call_{number}{n}") for n in range(count))
        answer = [Message("assistant", f"a{number}" if not made else None, tool_calls=made)]
    return rounds


@settings(max_examples=60, deadline=None)
@given(_talks(), st.sampled_from(KINDS), st.booleans())
def test_each_request_begins_with_the_one_before(
    rounds: list[list[Message]], template: Template, has_system: bool
) -> None:
    renderer = template.renderer()
    talk: list[Message] = [SYSTEM] if has_system else []
    before = ""
    for added in rounds:
        talk += added
        prompt = renderer.render(talk, (), {}, None)
        assert prompt.text.startswith(before)
        assert all(0 <= origin < len(talk) for origin in prompt.origins)
        assert list(prompt.origins) == sorted(set(prompt.origins)) or any(
            message.role == "system" for message in talk[1:]
        )
        said = [message.content for message in talk if message.content]
        assert all(text in prompt.text for text in said)
        before = prompt.text


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_templates_own_name_for_thoughts_is_found(name: str) -> None:
    renderer = Template(thought=name).renderer()
    said = Message("assistant", "A", reasoning="why")
    assert "<think>why</think>A" in renderer.render([ASK, said, MORE], (), {}, None).text


def test_call_ids_are_made_short_where_a_template_takes_no_others() -> None:
    renderer = Template(short_ids=True).renderer()
    assert not renderer.abilities.long_ids
    renderer.render([ASK, CALLED, RESULT], (), {}, None)
    own = Message("assistant", None, tool_calls=(ToolCall("f", "{}", "abcdefghi"),))
    text = renderer.render([ASK, own, Message("tool", "R", tool_call_id="abcdefghi")], (), {}, None)
    assert "<call>f {}</call>" in text.text


def test_a_dropped_line_shifts_no_index() -> None:
    line = Message("system", "x-anthropic-billing-header: cch=1")
    prompt = Template().renderer().render([line, SYSTEM, ASK], (), {}, None)
    assert prompt.origins == (1, 2)
    assert "billing" not in prompt.text
