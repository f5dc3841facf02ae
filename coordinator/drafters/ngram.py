"""Prompt lookup: what followed the last tokens when they stood in the context before.

The method is prompt lookup decoding (A. Saxena 2023; transformers' `prompt_lookup_num_tokens`). The
index maps the n-grams seen so far to where they last ended, so a step costs the new tokens and not
the whole context.
"""

from __future__ import annotations

from collections.abc import Sequence

# The longest match first. Two tokens are the least that is not mostly chance.
_SIZES = (3, 2)

_ID_BITS = 31  # token ids fit (frames.Segment): one integer stands for an n-gram


class NgramDrafter:
    def __init__(self) -> None:
        self._context: list[int] = []
        self._ends: dict[int, dict[int, int]] = {size: {} for size in _SIZES}

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            # An n-gram is entered once something follows it, so the context's end never finds
            # itself.
            end = len(self._context)
            for size in _SIZES:
                if end >= size:
                    self._ends[size][self._key(size)] = end
            self._context.append(token)

    def draft(self, limit: int) -> tuple[int, ...]:
        if limit < 1:
            return ()
        for size in _SIZES:
            if len(self._context) > size:
                end = self._ends[size].get(self._key(size))
                if end is not None:
                    return tuple(self._context[end : end + limit])
        return ()

    def _key(self, size: int) -> int:
        key = 0
        for token in self._context[-size:]:
            key = key << _ID_BITS | token
        return key
