"""What a session's next prompt is known to begin with, while its client runs a tool or its user types.

Decides by rendering the conversation as the template will render it then: the answer among the earlier messages, where
a template may leave out what the model thought. It matters only where that differs from the rows that are there; and
a guess of what comes next is never part of it.
"""

from __future__ import annotations

from coordinator.errors import InvalidValue
from coordinator.foresight import Wish
from coordinator.prefixes import common_prefix
from coordinator.requests import SessionId
from coordinator.sessions import History
from gateway.chat.messages import Message
from gateway.chat.tokenizer import ChatTokenizer, RenderedPrompt
from gateway.turns import ChatPrompt

# They begin differently: what two prompts share that end in these is what any next one begins with.
_NEXT = (Message("user", "Alpha"), Message("user", "0"))


def next_wish(
    tokenizer: ChatTokenizer,
    session: SessionId,
    prompt: ChatPrompt,
    said: str,
    history: History,
    *,
    remade: bool = False,
) -> Wish | None:
    """None where the rows are there already, or the template refuses: the next turn will tell.

    `said` is the answer's text as its client got it, `history` what the session's rows hold. `remade`: rows that are
    there are wanted all the same.
    """
    try:
        one = _rendered(tokenizer, prompt, said, history, _NEXT[0])
        if one.text.startswith(history.text) and not remade:
            return None
        other = _rendered(tokenizer, prompt, said, history, _NEXT[1])
    except InvalidValue:
        return None
    shared = common_prefix(one.token_ids, other.token_ids)
    boundaries = tuple(place for place in one.boundaries if place < shared)
    return Wish(session, one.token_ids[:shared], boundaries) if shared else None


def _rendered(
    tokenizer: ChatTokenizer, prompt: ChatPrompt, said: str, history: History, following: Message
) -> RenderedPrompt:
    messages = (*prompt.messages, Message("assistant", said), following)
    return tokenizer.render(messages, prompt.tools, prompt.template_args, history)
