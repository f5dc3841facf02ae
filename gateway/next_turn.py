"""What a session's next prompt is known to begin with, while its client runs a tool or its user types.

Decides by rendering the conversation as the template will render it then: the answer among the earlier messages, where
a template may leave out what the model thought. It matters only where that differs from the rows that are there; and
a guess of what comes next is never part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from coordinator.errors import InvalidValue
from coordinator.foresight import Wish
from coordinator.prefixes import common_prefix
from coordinator.requests import SessionId
from coordinator.sessions import History
from gateway.chat.messages import Message
from gateway.chat.tokenizer import ChatTokenizer, RenderedPrompt
from gateway.turns import ChatPrompt


def next_wish(
    tokenizer: ChatTokenizer,
    session: SessionId,
    prompt: ChatPrompt,
    said: Message,
    history: History,
    *,
    remade: bool = False,
    tenant: str = "",
) -> Wish | None:
    """None where the rows are there already, or the template refuses: the next turn will tell.

    `said` is the answer as its client will send it back, `history` what the session's rows hold. `remade`: rows that
    are there are wanted all the same.
    """
    try:
        one = _rendered(tokenizer, prompt, said, history, "Alpha")
        if one.text.startswith(history.text) and not remade:
            return None
        other = _rendered(tokenizer, prompt, said, history, "0")
    except InvalidValue:
        return None
    shared = common_prefix(one.token_ids, other.token_ids)
    boundaries = tuple(place for place in one.boundaries if place < shared)
    return Wish(session, one.token_ids[:shared], boundaries, tenant) if shared else None


def _rendered(
    tokenizer: ChatTokenizer, prompt: ChatPrompt, said: Message, history: History, word: str
) -> RenderedPrompt:
    """With what comes next. What two prompts share whose next words begin differently, any prompt begins with."""
    if prompt.begun:
        said = replace(said, content=prompt.begun + (said.content or ""))
    messages = (*prompt.messages, said, *_following(said, word))
    return tokenizer.render(messages, prompt.tools, prompt.template_args, history)


def _following(said: Message, word: str) -> Iterator[Message]:
    """Calls are followed by their results, anything else by what the user says."""
    if not said.tool_calls:
        yield Message("user", word)
    for call in said.tool_calls:
        yield Message("tool", word, name=call.name, tool_call_id=call.id)
