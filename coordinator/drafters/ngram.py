"""Prompt lookup: what followed the last tokens when they stood in the context before.

The method is prompt lookup decoding (A. Saxena 2023; transformers' `prompt_lookup_num_tokens`). The
index maps the n-grams seen so far to where they last ended, so a step costs the new tokens and not
the whole context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.drafters import Drafter
from coordinator.frames import JobId

# The longest match first. Two tokens are the least that is not mostly chance.
_SIZES = (3, 2)

_ID_BITS = 31  # token ids fit (frames.Segment): one integer stands for an n-gram


class NgramDrafter:
    def __init__(self) -> None:
        self._context: list[int] = []
        self._ends: dict[int, dict[int, int]] = {size: {} for size in _SIZES}

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            # An n-gram is entered once something follows it, so the context's end never finds itself.
            for size in _SIZES:
                if len(self._context) >= size:
                    self._ends[size][_key(self._context[-size:])] = len(self._context)
            self._context.append(token)

    def draft(self, guess: Sequence[int], limit: int) -> tuple[int, ...]:
        if limit < 1:
            return ()
        tail = (*self._context[-_SIZES[0] :], *guess)
        for size in _SIZES:
            if len(tail) >= size:
                end = self._ends[size].get(_key(tail[-size:]))
                if end is not None:
                    return self._from(end, guess, limit)
        return ()

    def close(self) -> None:
        return None

    def _from(self, end: int, guess: Sequence[int], limit: int) -> tuple[int, ...]:
        """What stands at `end`, and behind the context's end the guess and what was drafted itself:
        text that repeats with a short period goes on repeating.
        """
        text = [*self._context[end : end + limit], *guess][:limit]
        period = len(self._context) + len(guess) - end
        while len(text) < limit:
            text.append(text[len(text) - period])
        return tuple(text)


def ngram_drafter(job: JobId, wake: Callable[[], object], tenant: str) -> Drafter:
    """The DrafterFactory of prompt lookup, which never needs to think."""
    return NgramDrafter()


def _key(tokens: Sequence[int]) -> int:
    key = 0
    for token in tokens:
        key = key << _ID_BITS | token
    return key
