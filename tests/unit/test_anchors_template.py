"""The end of tools and system prompt is found from the template itself, whatever its shape, and never costs a turn."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from coordinator.errors import InvalidValue
from coordinator.prefixes import common_prefix
from coordinator.sessions import History
from gateway.chat import heads
from gateway.chat.boundaries import AddedTokens
from gateway.chat.byte_tokenizer import ByteTokenizer
from gateway.chat.messages import Message, Tool
from gateway.chat.templates import ChatRenderer, RenderedPrompt

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.chat.tokenizer import ChatTokenizer

# In the manner of Qwen: tools before the system prompt's end, everything between the same two marks.
QWEN = """{% if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role != 'system' or not loop.first %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Refuses what has no user message, as Qwen3.5 does.
STRICT = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}" + QWEN
)
# In the manner of Llama 3.1: a date in front, and the tools in the first user message.
LLAMA = """<|im_start|>system

Today Date: {{ today | default('26 Jul 2024') }}

{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}<|im_end|>
{%- for m in messages %}<|im_start|>{{ m.role }}

{% if tools and loop.first %}Given the following functions, please respond with a JSON.

{% for tool in tools %}{{ tool | tojson }}

{% endfor %}{% endif %}{{ m.content }}<|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant

{% endif %}"""
# In the manner of Gemma: no system message, so that it goes into the first user message.
GEMMA = """{{ raise_exception('System role not supported') if messages[0].role == 'system' }}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>model
{% endif %}"""
# In the manner of Mistral: the tools stand before the last user message, so no two turns begin with them.
MISTRAL = """<|bos|>{% for m in messages %}{% if m.role == 'user' %}{% if loop.last and tools %}<|tools|>
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}<|/tools|>{% endif %}<|im_start|>{{ m.content }}<|im_end|>
{%- else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"""
COUNTING = "{{ messages | length }} messages follow.\n" + QWEN
# Takes one last message and refuses any other.
EXACTING = (
    "{% if messages[-1].content != 'And then?' %}{{ raise_exception('no') }}{% endif %}" + QWEN
)
# No special token anywhere.
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}assistant:"

WEATHER = Tool("get_weather", "Looks it up", '{"type": "object", "properties": {"city": {}}}')
CLOCK = Tool("get_time", "Reads the clock")
SYSTEM = Message("system", "You are a careful assistant who keeps to the facts.")
ASK = Message("user", "And then?")
TALK = (SYSTEM, Message("user", "Hello"), Message("assistant", "Hi."), ASK)
SPECIALS = {"<|im_start|>": 1000, "<|im_end|>": 1001, "<|bos|>": 1002, "<|end|>": 1003}
SPECIALS |= {"<|tools|>": 1004, "<|/tools|>": 1005}
_CUT = re.compile("(" + "|".join(re.escape(mark) for mark in SPECIALS) + r"|\n+|[a-zA-Z ]{1,4}|.)")


def encode(text: str) -> tuple[int, ...]:
    """Marks, runs of newlines and up to four letters are a token each: what follows a seam may change the last one."""
    return tuple(
        SPECIALS.get(part) or 2000 + crc32(part.encode()) % 10**6 for part in _CUT.findall(text)
    )


class Shapes:
    """Renderers of one template each; counts what is rendered, and knows a date that changes."""

    def __init__(self, folder: Path) -> None:
        self._raw: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self.rendered = 0
        self.today: str | None = None

    def of(self, template: str) -> ChatRenderer:
        def apply(
            messages: Sequence[dict[str, object]],
            tools: Sequence[dict[str, object]],
            args: Mapping[str, object],
            *,
            generate: bool,
        ) -> str:
            self.rendered += 1
            dated = {"today": self.today} if self.today else {}
            text = self._raw.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=generate,
                **dated,
                **args,
            )
            return str(text)

        return ChatRenderer(apply, encode, AddedTokens.of(SPECIALS, SPECIALS))


@pytest.fixture
def shapes(smollm2_dir: Path) -> Shapes:
    return Shapes(smollm2_dir)


def render(
    renderer: ChatRenderer,
    messages: Sequence[Message] = TALK,
    tools: Sequence[Tool] = (),
    args: Mapping[str, object] | None = None,
) -> RenderedPrompt:
    return renderer.render(messages, tools, args or {}, None)


def head_of(prompt: RenderedPrompt) -> str:
    """The text of the prompt's first tokens, up to its anchor."""
    for end in range(len(prompt.text) + 1):
        if encode(prompt.text[:end]) == prompt.token_ids[: prompt.anchor]:
            return prompt.text[:end]
    raise AssertionError("the anchor is not the end of any text")


@pytest.mark.parametrize("template", [QWEN, STRICT])
@pytest.mark.parametrize("tools", [(), (WEATHER, CLOCK)])
def test_the_head_ends_where_the_first_user_message_begins(
    shapes: Shapes, template: str, tools: tuple[Tool, ...]
) -> None:
    prompt = render(shapes.of(template), TALK, tools)
    assert head_of(prompt) == prompt.text[: prompt.text.index("<|im_start|>user")]
    assert prompt.anchor in prompt.boundaries  # where the plan cuts as well


def test_tools_alone_are_a_head(shapes: Shapes) -> None:
    prompt = render(shapes.of(STRICT), TALK[1:], [WEATHER])
    assert head_of(prompt) == prompt.text[: prompt.text.index("<|im_start|>user")]
    assert "get_weather" in head_of(prompt)
    assert prompt.boundaries[0] == prompt.anchor, "the tools are not the first message's text"


def test_without_system_prompt_and_tools_there_is_no_head(
    shapes: Shapes, smollm2: ChatTokenizer
) -> None:
    for template in (QWEN, STRICT, LLAMA, GEMMA, PLAIN):
        assert render(shapes.of(template), TALK[1:]).anchor == 0
    assert smollm2.render([ASK]).anchor == 0  # for all that its template puts in front


@pytest.mark.parametrize("system", [(SYSTEM,), ()])
def test_the_built_in_models_head_is_its_system_message_with_the_tools(
    smollm2: ChatTokenizer, system: tuple[Message, ...]
) -> None:
    prompt = smollm2.render([*system, *TALK[1:]], [WEATHER])
    head = smollm2.decode(prompt.token_ids[: prompt.anchor], skip_special=False)
    assert head == prompt.text[: prompt.text.index("<|im_start|>user")]
    assert "get_weather" in head


def test_a_developer_message_and_several_system_messages_belong_to_the_head(
    shapes: Shapes,
) -> None:
    lead = (SYSTEM, Message("developer", "Answer in one sentence only, please."))
    prompt = render(shapes.of(QWEN), [*lead, ASK])
    assert head_of(prompt) == prompt.text[: prompt.text.index("<|im_start|>user")]


def test_tools_in_the_first_user_message_are_part_of_the_head(shapes: Shapes) -> None:
    prompt = render(shapes.of(LLAMA), TALK, [WEATHER])
    assert head_of(prompt).endswith("{}}}}}\n\n")
    assert prompt.text[len(head_of(prompt)) :].startswith("Hello<|im_end|>")


def test_a_system_prompt_in_the_first_user_message_is_the_head(shapes: Shapes) -> None:
    renderer = shapes.of(GEMMA)
    prompt = render(renderer)
    assert head_of(prompt) == f"<|im_start|>user\n{SYSTEM.content}\n\n"
    # Its newlines and the question's are one token there: no token of the head reaches over its end.
    joined = render(renderer, [SYSTEM, Message("user", "\nHello")])
    assert head_of(joined) == f"<|im_start|>user\n{SYSTEM.content}"


def test_a_template_without_special_tokens_has_a_head_too(shapes: Shapes) -> None:
    prompt = render(shapes.of(PLAIN))
    assert head_of(prompt).startswith(f"system: {SYSTEM.content}\n\nuser:")


@pytest.mark.parametrize("template", [COUNTING, "{{ messages[0].content[:5] }}"])
def test_a_head_that_depends_on_what_follows_is_none(shapes: Shapes, template: str) -> None:
    for talk in (TALK, (SYSTEM, ASK)):
        assert render(shapes.of(template), talk, [WEATHER, CLOCK]).anchor == 0


def test_a_template_that_refuses_every_try_costs_the_head_and_not_the_turn(shapes: Shapes) -> None:
    assert render(shapes.of(EXACTING), TALK, [WEATHER, CLOCK]).anchor == 0


def test_tools_that_move_with_the_last_message_belong_to_no_head(shapes: Shapes) -> None:
    renderer = shapes.of(MISTRAL)
    for talk in (TALK[1:], [ASK]):
        assert render(renderer, talk, [WEATHER, CLOCK]).anchor == 0
    prompt = render(renderer, TALK, [WEATHER, CLOCK])
    assert head_of(prompt) == f"<|bos|>{SYSTEM.content}<|end|>"


def test_a_head_of_a_few_tokens_is_none(shapes: Shapes) -> None:
    assert render(shapes.of(QWEN), [Message("system", "Hm."), ASK]).anchor == 0


def test_a_head_is_tried_out_once_and_then_costs_no_rendering(shapes: Shapes) -> None:
    renderer = shapes.of(STRICT)
    before = shapes.rendered
    first = render(renderer, TALK[:2], [WEATHER])
    tried = shapes.rendered - before
    later = [render(renderer, (*TALK, ASK, *TALK[2:])[:n], [WEATHER]) for n in (4, 5, 7)]
    assert shapes.rendered - before == tried + 2 * len(later)
    assert {prompt.anchor for prompt in later} == {first.anchor}


def test_template_arguments_have_heads_of_their_own(shapes: Shapes) -> None:
    renderer = shapes.of(LLAMA)
    counts = []
    for day in ("1 May", "2 May", "1 May", "2 May"):
        before = shapes.rendered
        render(renderer, TALK, [WEATHER], {"today": day})
        counts.append(shapes.rendered - before)
    assert counts == [4, 4, 2, 2]


def test_another_date_in_front_is_another_head_of_the_same_conversation(shapes: Shapes) -> None:
    renderer = shapes.of(LLAMA)
    shapes.today = "1 May 2026"
    old = render(renderer)
    shapes.today = "12 December 2026"
    new, again = render(renderer), render(renderer)
    for prompt in (old, new, again):
        assert head_of(prompt) == prompt.text[: prompt.text.index("<|im_start|>user")]
    assert old.anchor < new.anchor == again.anchor


@pytest.mark.parametrize(
    "other",
    [
        ([Message("system", f"{SYSTEM.content}!"), *TALK[1:]], (WEATHER,), {}),
        (TALK, (Tool("get_weather", "Looks them up", WEATHER.parameters),), {}),
        (TALK, (WEATHER, CLOCK), {}),
        (TALK, (WEATHER,), {"today": "27 Jul 2024"}),
    ],
)
def test_one_changed_tool_system_character_or_argument_is_another_head(
    shapes: Shapes, other: tuple[Sequence[Message], tuple[Tool, ...], dict[str, object]]
) -> None:
    renderer = shapes.of(LLAMA)
    one, two = render(renderer, TALK, [WEATHER]), render(renderer, *other)
    shared = common_prefix(one.token_ids, two.token_ids)
    assert shared <= one.anchor  # which may be a beginning of the other, where a tool was added
    assert shared < two.anchor
    assert render(renderer, TALK, [WEATHER]) == one


_words = st.text("ab <|>\n.é", max_size=12)
_turns = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), _words), min_size=1, max_size=4)


@settings(deadline=None, max_examples=40)
@given(system=_words, talks=st.tuples(_turns, _turns), tools=st.sampled_from([(), (WEATHER,)]))
def test_conversations_of_one_head_share_the_rows_up_to_their_anchors(
    system: str, talks: tuple[list[tuple[str, str]], ...], tools: tuple[Tool, ...]
) -> None:
    tokenizer = ByteTokenizer()
    prompts = [
        tokenizer.render(
            [Message("system", system), *(Message(role, said) for role, said in talk)], tools
        )
        for talk in talks
    ]
    one, two = prompts
    assert one.anchor == two.anchor <= common_prefix(one.token_ids, two.token_ids)
    assert one.anchor in (0, *one.boundaries)
    assert one.anchor > 0 or len(system.encode()) < 16


def test_a_session_that_goes_on_from_its_own_ids_keeps_its_anchor(smollm2: ChatTokenizer) -> None:
    first = smollm2.render(TALK[:2], [WEATHER])
    answer = (*smollm2.encode("Hi."), *smollm2.stop_token_ids)
    said = first.text + smollm2.decode(answer, skip_special=False)
    history = History(said, first.token_ids + answer)
    assert smollm2.render(TALK, [WEATHER], history=history).anchor == first.anchor > 0


def test_what_a_pin_of_a_head_names_is_what_every_conversation_begins_with(shapes: Shapes) -> None:
    for template, tools in ((QWEN, [WEATHER]), (STRICT, []), (LLAMA, [WEATHER]), (GEMMA, [])):
        renderer = shapes.of(template)
        prompt = render(renderer, TALK, tools)
        assert renderer.prefix([SYSTEM], tools, {}) == prompt.token_ids[: prompt.anchor]
    alone = shapes.of(STRICT).prefix((), [WEATHER], {})
    assert alone == render(shapes.of(STRICT), TALK[1:], [WEATHER]).token_ids[: len(alone)]


def test_what_a_pin_of_a_conversation_names_leaves_its_answer_open(shapes: Shapes) -> None:
    renderer = shapes.of(QWEN)
    prefix = renderer.prefix(TALK, [WEATHER], {})
    prompt = render(renderer, TALK, [WEATHER])
    assert prefix == prompt.token_ids[: prompt.boundaries[-1]]
    with pytest.raises(InvalidValue, match="No user query"):
        shapes.of(STRICT).prefix([Message("assistant", "Hi.")], (), {})


def test_tools_that_became_a_message_of_their_own_shift_the_others(smollm2: ChatTokenizer) -> None:
    assert smollm2.render([ASK], [WEATHER]).origins == (-1, 0)
    assert smollm2.render([SYSTEM, ASK], [WEATHER]).origins == (0, 1)


def test_only_so_many_heads_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "_MOST_TOKENS", 500)
    tokenizer = ByteTokenizer()
    for count in range(50):
        tokenizer.render([Message("system", f"{count} is the number of the day."), ASK])
    known = tokenizer._renderer._heads._known
    assert 1 <= len(known._heads) <= 500 // 64
    assert known._room >= 0
