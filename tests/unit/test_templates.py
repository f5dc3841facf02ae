"""Conversations become token ids: whatever the client's wording, and stable from one turn to the next."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from coordinator.errors import InvalidValue
from coordinator.sessions import History
from gateway.chat.boundaries import AddedTokens
from gateway.chat.byte_tokenizer import ByteTokenizer
from gateway.chat.messages import Message, Tool, ToolCall
from gateway.chat.templates import ChatRenderer, RenderedPrompt

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.chat.tokenizer import ChatTokenizer

# In the manner of Qwen: everything native, JSON arguments printed by the template.
NATIVE = """{% if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
# Wants a user message, and takes arguments apart.
STRICT = """{% if not messages | selectattr('role', 'equalto', 'user') | list %}
{{ raise_exception('there is no user message') }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}
{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}
{% endfor %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Shows the last message in full and cuts all others short, so no shorter conversation is a beginning.
FORGETFUL = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content if loop.last else m.content[:3] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# No special token stands where an answer begins.
INSTRUCT = """{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}
{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}"""
NO_SYSTEM = (
    "{{ raise_exception('no system') if messages[0].role == 'system' }}"
    + FORGETFUL.replace(" if loop.last else m.content[:3]", "")
)

WEATHER = Tool(
    "get_weather", "Looks it up", '{"type": "object", "properties": {"city": {"type": "string"}}}'
)
SYSTEM = Message("system", "You are terse.")
ASK = Message("user", "Weather in Zürich?")
CALLED = Message("assistant", None, tool_calls=(ToolCall("get_weather", '{"city": "Zürich"}'),))
RESULT = Message("tool", "rain", name="get_weather", tool_call_id="a1")
TALK = (SYSTEM, ASK, CALLED, RESULT, Message("assistant", "Rain."), Message("user", "Thanks!"))


class Templates:
    """Renderers for templates of our own over the built-in model's tokenizer."""

    def __init__(self, folder: Path, tokenizer: ChatTokenizer) -> None:
        self._raw: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self._tokenizer = tokenizer
        self.rendered = 0

    def renderer(self, template: str) -> ChatRenderer:
        def apply(
            messages: Sequence[dict[str, object]],
            tools: Sequence[dict[str, object]],
            args: Mapping[str, object],
            *,
            generate: bool,
        ) -> str:
            self.rendered += 1
            return str(
                self._raw.apply_chat_template(
                    list(messages),
                    tools=list(tools) or None,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=generate,
                    **args,
                )
            )

        marks = {str(t): i for i, t in self._raw.added_tokens_decoder.items()}
        return ChatRenderer(apply, self._tokenizer.encode, AddedTokens.of(marks, marks))


@pytest.fixture(scope="session")
def templates(smollm2_dir: Path, smollm2: ChatTokenizer) -> Templates:
    return Templates(smollm2_dir, smollm2)


def _render(
    renderer: ChatRenderer,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    args: Mapping[str, object] | None = None,
    history: History | None = None,
) -> RenderedPrompt:
    return renderer.render(messages, tools, args or {}, history)


def _answered(prompt: RenderedPrompt, tokenizer: ChatTokenizer, ids: tuple[int, ...]) -> History:
    text = prompt.text + tokenizer.decode(ids, skip_special=False)
    return History(text, prompt.token_ids + ids)


def test_the_ids_are_those_of_the_templates_text_with_the_question_left_open(
    smollm2: ChatTokenizer,
) -> None:
    prompt = smollm2.render([SYSTEM, ASK])
    assert prompt.text == (
        "<|im_start|>system\nYou are terse.<|im_end|>\n"
        "<|im_start|>user\nWeather in Zürich?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.token_ids == smollm2.encode(prompt.text)


@pytest.mark.parametrize("template", [NATIVE, STRICT])
def test_boundaries_are_where_each_message_and_the_answer_begin(
    templates: Templates, smollm2: ChatTokenizer, template: str
) -> None:
    prompt = _render(templates.renderer(template), [SYSTEM, ASK, Message("assistant", "x"), ASK])
    starts = [i for i, token in enumerate(prompt.token_ids) if smollm2.is_special(token)][::2]
    assert prompt.boundaries == tuple(starts)


@pytest.mark.parametrize("template", [NATIVE, STRICT, FORGETFUL])
def test_boundaries_of_a_longer_conversation_begin_with_those_of_a_shorter_one(
    templates: Templates, template: str
) -> None:
    renderer = templates.renderer(template)
    prompts = [_render(renderer, TALK[:count]) for count in (2, 4, 6)]
    for shorter, longer in itertools.pairwise(prompts):
        same = 0
        for a, b in zip(shorter.token_ids, longer.token_ids, strict=False):
            if a != b:
                break
            same += 1
        kept = [b for b in longer.boundaries if b < same]
        assert [b for b in shorter.boundaries if b < same] == kept
        assert template == FORGETFUL or len(kept) > 1


def test_what_a_template_puts_in_front_belongs_to_the_first_message(
    smollm2: ChatTokenizer,
) -> None:
    prompt = smollm2.render([ASK, Message("assistant", "x"), ASK])  # and a system prompt of its own
    starts = [i for i, token in enumerate(prompt.token_ids) if smollm2.is_special(token)][::2]
    assert prompt.boundaries == (0, *starts[2:])
    quoting = smollm2.render([Message("user", "<|im_start|>"), Message("assistant", "x"), ASK])
    assert len(quoting.boundaries) == len(prompt.boundaries)


def test_a_message_that_no_special_token_begins_has_no_boundary(
    templates: Templates, smollm2: ChatTokenizer
) -> None:
    talk = [ASK, Message("assistant", "x"), ASK, Message("assistant", "y"), ASK]
    prompt = _render(templates.renderer(INSTRUCT), talk)
    opener = prompt.token_ids[0]
    starts = [i for i, token in enumerate(prompt.token_ids) if token == opener]
    assert prompt.boundaries == tuple(starts)
    assert len(starts) == 3


@pytest.mark.parametrize("count", [2, 300])
def test_a_turn_renders_its_conversation_once_and_its_first_message(
    templates: Templates, count: int
) -> None:
    renderer = templates.renderer(NATIVE)
    talk = [Message(("user", "assistant")[i % 2], "hi") for i in range(count)]
    before = templates.rendered
    counted = renderer.render(talk, (), {}, None, with_boundaries=False)
    assert templates.rendered - before == 1
    prompt = renderer.render(talk, (), {}, None)
    assert templates.rendered - before == 3
    assert (counted.token_ids, counted.boundaries) == (prompt.token_ids, ())
    assert len(prompt.boundaries) == count + 1


def test_a_follow_up_turn_goes_on_from_the_ids_that_were_generated(smollm2: ChatTokenizer) -> None:
    first = smollm2.render([ASK])
    letters = itertools.chain.from_iterable(smollm2.encode(letter) for letter in "Sunshine")
    odd = (*letters, *smollm2.stop_token_ids)
    history = _answered(first, smollm2, odd)
    talk = [ASK, Message("assistant", "Sunshine"), Message("user", "And tomorrow?")]
    warm, cold = smollm2.render(talk, history=history), smollm2.render(talk)
    assert warm.text == cold.text
    assert warm.token_ids[: len(history.token_ids)] == history.token_ids
    assert warm.token_ids != cold.token_ids
    shift = len(warm.token_ids) - len(cold.token_ids)
    assert warm.boundaries == (
        *cold.boundaries[:2],
        *(boundary + shift for boundary in cold.boundaries[2:]),
    )
    assert warm.boundaries[:2] == first.boundaries


_words = st.text("ab <|>_\nüß界😀", max_size=10)
_talks = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "tool"]), _words), min_size=1, max_size=4
)


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(talk=_talks)
def test_any_text_keeps_boundaries_on_message_starts(
    smollm2: ChatTokenizer, talk: list[tuple[str, str]]
) -> None:
    messages = [Message(role, content) for role, content in talk]
    for tokenizer in (smollm2, ByteTokenizer()):
        prompt = tokenizer.render(messages)
        assert tokenizer.decode(prompt.token_ids, skip_special=False) == prompt.text
        for boundary in prompt.boundaries:
            rest = tokenizer.decode(prompt.token_ids[boundary:], skip_special=False)
            assert rest.startswith(("<|im_start|>", "<|start|>"))
        assert len(prompt.boundaries) == len(messages) + 1


def test_an_answer_that_spells_a_special_token_in_letters_costs_boundaries_not_the_turn(
    smollm2: ChatTokenizer,
) -> None:
    first = smollm2.render([ASK])
    letters = [i for part in ("<", "|", "im", "_", "end", "|", ">") for i in smollm2.encode(part)]
    history = _answered(first, smollm2, (*letters, *smollm2.stop_token_ids))
    talk = [ASK, Message("assistant", "<|im_end|>"), ASK]
    warm = smollm2.render(talk, history=history)
    assert warm.token_ids[: len(history.token_ids)] == history.token_ids
    # The quoted token is letters in the ids, so it neither hides a message's beginning nor looks like one.
    openers = [i for i, token in enumerate(warm.token_ids) if token == first.token_ids[0]]
    assert warm.boundaries == (0, *openers[2:])


def test_a_template_that_ignores_tools_finds_them_in_the_system_message(
    smollm2: ChatTokenizer,
) -> None:
    alone = smollm2.render([ASK], [WEATHER])
    with_system = smollm2.render([SYSTEM, ASK], [WEATHER])
    for prompt in (alone, with_system):
        lines = prompt.text.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
        assert [json.loads(line)["function"]["name"] for line in lines] == ["get_weather"]
        assert prompt.text.index("<tools>") < prompt.text.index("<|im_start|>user")
        assert prompt.text.count("<|im_start|>system") == 1
    assert with_system.text.startswith("<|im_start|>system\nYou are terse.\n\n# Tools")


def test_tools_in_the_system_message_keep_every_turn_a_beginning_of_the_next(
    smollm2: ChatTokenizer,
) -> None:
    for head in ([SYSTEM], []):
        texts = [smollm2.render([*head, *TALK[1:n]], [WEATHER]).text for n in (2, 4, 6)]
        for shorter, longer in itertools.pairwise(texts):
            assert longer.startswith(shorter.removesuffix("<|im_start|>assistant\n"))


def test_calls_and_results_are_written_out_for_a_template_that_ignores_them(
    smollm2: ChatTokenizer,
) -> None:
    text = smollm2.render(TALK, [WEATHER]).text
    called = '{"name": "get_weather", "arguments": {"city": "Zürich"}}'
    assert f"<|im_start|>assistant\n<tool_call>\n{called}\n</tool_call><|im_end|>" in text
    assert "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>" in text


def test_a_template_that_knows_tools_gets_them_and_nothing_is_written_twice(
    templates: Templates,
) -> None:
    renderer = templates.renderer(NATIVE)
    text = _render(renderer, TALK, [WEATHER]).text
    assert "# Tools" not in text
    assert "<tool_response>" not in text
    assert text.count("Looks it up") == 1
    assert '<tool_call>get_weather {"city": "Zürich"}</tool_call>' in text


def _called(arguments: str | dict[str, object], content: str | None = None) -> list[Message]:
    call = ToolCall("get_weather", arguments, id="a1")
    return [ASK, Message("assistant", content, tool_calls=(call,)), RESULT]


def test_arguments_as_text_and_as_an_object_render_alike(
    templates: Templates, smollm2: ChatTokenizer
) -> None:
    """Reports QwenLM/Qwen3#1894, mudler/LocalAI#10256, oumi-ai/oumi#2603."""
    for template in (NATIVE, STRICT):
        renderer = templates.renderer(template)
        as_text = _render(renderer, _called('{"city":"Bern","n":[1,{"x":null}]}'))
        as_object = _render(renderer, _called({"city": "Bern", "n": [1, {"x": None}]}))
        assert as_text == as_object
        assert '\\"' not in as_text.text
    assert smollm2.render(_called('{"a":1}')) == smollm2.render(_called({"a": 1}))


@pytest.mark.parametrize("arguments", ["", "null", "[1]", "{bad", "3", '"x"', "[" * 5000])
def test_arguments_that_are_no_object_are_rendered_or_refused_never_a_crash(
    templates: Templates, smollm2: ChatTokenizer, arguments: str
) -> None:
    """Reports areal-project/AReaL#1501, xorbitsai/inference#5060."""
    assert arguments in smollm2.render(_called(arguments)).text or arguments == "null"
    assert _render(templates.renderer(NATIVE), _called(arguments)).token_ids
    if arguments in ("", "null"):
        assert _render(templates.renderer(STRICT), _called(arguments)).token_ids
    else:
        with pytest.raises(InvalidValue, match="chat template refuses them"):
            _render(templates.renderer(STRICT), _called(arguments))


def test_no_content_and_empty_content_beside_calls_render_alike(
    templates: Templates, smollm2: ChatTokenizer
) -> None:
    """Reports oumi-ai/oumi#2603, vortico/flama#258."""
    for template in (NATIVE, STRICT):
        renderer = templates.renderer(template)
        none, empty = (_render(renderer, _called("{}", content)) for content in (None, ""))
        assert none == empty
        assert "None" not in none.text
        assert "get_weather" in none.text
    assert smollm2.render(_called("{}", None)) == smollm2.render(_called("{}", ""))
    assert "None" not in smollm2.render([ASK, Message("assistant"), ASK]).text


@pytest.mark.parametrize("talk", [[CALLED, RESULT], [SYSTEM], [CALLED], [RESULT]])
def test_conversations_without_a_user_message_render_or_are_refused_with_the_reason(
    templates: Templates, smollm2: ChatTokenizer, talk: list[Message]
) -> None:
    """Reports ollama/ollama#18303, vllm-project/vllm#36432."""
    assert smollm2.render(talk).token_ids
    assert _render(templates.renderer(NATIVE), talk).token_ids
    with pytest.raises(InvalidValue, match="there is no user message"):
        _render(templates.renderer(STRICT), talk)


def test_an_empty_conversation_and_an_unknown_role_are_refused(smollm2: ChatTokenizer) -> None:
    with pytest.raises(InvalidValue, match="no messages"):
        smollm2.render([])
    with pytest.raises(InvalidValue, match=r"messages\[1\].role: there is no role 'robot'"):
        smollm2.render([ASK, Message("robot", "beep")])


def test_a_developer_message_is_read_as_a_system_message(smollm2: ChatTokenizer) -> None:
    developer = Message("developer", SYSTEM.content)
    assert smollm2.render([developer, ASK]) == smollm2.render([SYSTEM, ASK])


def test_a_system_message_goes_to_the_first_user_where_a_template_takes_none(
    templates: Templates,
) -> None:
    renderer = templates.renderer(NO_SYSTEM)
    text = _render(renderer, [SYSTEM, ASK], [WEATHER]).text
    assert text.startswith("<|im_start|>user\nYou are terse.\n\n# Tools")
    assert "Weather in Zürich?" in text
    assert _render(renderer, [SYSTEM]).text.startswith("<|im_start|>user\nYou are terse.")


def test_template_arguments_reach_the_template_and_ours_cannot_be_displaced(
    templates: Templates,
) -> None:
    renderer = templates.renderer(NATIVE)
    assert "<think>" in _render(renderer, [ASK], args={"enable_thinking": False}).text
    assert "<think>" not in _render(renderer, [ASK]).text
    for name in ("messages", "tokenize", "add_generation_prompt", "chat_template"):
        with pytest.raises(InvalidValue, match=f"template_args: {name}"):
            _render(renderer, [ASK], args={name: True})


@pytest.mark.parametrize("schema", ["{bad", "[1]", "null", "3"])
def test_a_tool_whose_schema_is_no_object_is_refused(smollm2: ChatTokenizer, schema: str) -> None:
    with pytest.raises(InvalidValue, match=r"tools\[0\]: the parameters of 'f'"):
        smollm2.render([ASK], [Tool("f", parameters=schema)])


def test_half_a_surrogate_pair_is_refused_and_not_a_crash(smollm2: ChatTokenizer) -> None:
    for tokenizer in (smollm2, ByteTokenizer()):
        with pytest.raises(InvalidValue, match="no valid Unicode"):
            tokenizer.render([Message("user", "\ud83d")])


def test_a_broken_template_is_the_requests_error(templates: Templates) -> None:
    for template in ("{{ messages[99].role }}", "{% if %}", "{{ 1 / 0 }}"):
        with pytest.raises(InvalidValue, match="messages: the model's chat template"):
            _render(templates.renderer(template), [ASK])
