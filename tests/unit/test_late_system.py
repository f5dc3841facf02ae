"""A system message in the middle of a conversation stays where it stands, whatever the template thinks of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from gateway.chat.boundaries import AddedTokens
from gateway.chat.byte_tokenizer import _SPECIALS, ByteTokenizer
from gateway.chat.conversation import TemplateDict
from gateway.chat.messages import Message
from gateway.chat.templates import ChatRenderer


def _takes_it(
    messages: Sequence[TemplateDict],
    tools: Sequence[TemplateDict],
    args: Mapping[str, object],
    *,
    generate: bool,
) -> str:
    said = "".join(f"<|start|>{m['role']}\n{m['content']}<|end|>\n" for m in messages)
    return said + ("<|start|>assistant\n" if generate else "")


def _refuses_it(
    messages: Sequence[TemplateDict],
    tools: Sequence[TemplateDict],
    args: Mapping[str, object],
    *,
    generate: bool,
) -> str:
    if any(message["role"] == "system" for message in messages[1:]):
        raise ValueError("System message must be at the beginning.")
    return _takes_it(messages, tools, args, generate=generate)


@pytest.mark.parametrize(("template", "role"), [(_takes_it, "system"), (_refuses_it, "user")])
def test_each_turn_begins_like_the_next(template: object, role: str) -> None:
    """Agents send one on nearly every turn; moved to the front it would void every row behind the head."""
    added = AddedTokens.of(_SPECIALS, _SPECIALS)
    renderer = ChatRenderer(template, ByteTokenizer().encode, added)  # type: ignore[arg-type]
    late, question = Message("system", "The clock says nine."), Message("user", "What now?")
    talk = [
        Message("system", "Be brief."),
        Message("user", "Hello"),
        Message("assistant", "Hi"),
        late,
        question,
    ]
    shorter = renderer.render(talk, (), {}, None)
    assert shorter.text.startswith("<|start|>system\nBe brief.<|end|>")
    assert f"<|start|>{role}\nThe clock says nine.<|end|>" in shorter.text
    longer = renderer.render([*talk, Message("assistant", "Tea."), late, question], (), {}, None)
    assert longer.text.startswith(shorter.text)
    assert longer.boundaries[: len(shorter.boundaries)] == shorter.boundaries
