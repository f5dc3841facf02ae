"""What a requester is told of the place where its prompt left what its session had.

The text is spelled from the request's own ids: nothing of what stood there before, which may be another's by now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coordinator.requests import Miss
from gateway.chat.folding import OURS
from gateway.chat.tokenizer import ChatTokenizer
from gateway.turns import Excerpt

_LONGEST_SIDE = 40  # characters
# As many as that many characters have bytes: a token spells one at least.
_TOKENS_OF_A_SIDE = 4 * _LONGEST_SIDE


def excerpt(tokenizer: ChatTokenizer, ids: Sequence[int], at: int) -> Excerpt:
    """What the prompt says before the token at this index and from it on."""
    letters = tokenizer.detokenizer(skip_special=False)
    before = letters.feed(ids[max(0, at - _TOKENS_OF_A_SIDE) : at])
    after = letters.feed(ids[at : at + _TOKENS_OF_A_SIDE]) + letters.flush()
    return Excerpt(before[-_LONGEST_SIDE:], after[:_LONGEST_SIDE])


def as_sent(miss: Miss, origins: Sequence[int]) -> Miss:
    """The message's index among those that the client sent; None where it sent none, as for the tools' text.

    `origins` are RenderedPrompt's. What went into another message is told as the first that is in there.
    """
    index = miss.message_index
    if index is None or index >= len(origins):
        return miss
    origin = origins[index]
    return replace(miss, message_index=None if origin == OURS else origin)
