"""The drafter that proposes nothing: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence


class NoDrafter:
    def extend(self, tokens: Sequence[int]) -> None:
        return None

    def draft(self, guess: Sequence[int], limit: int) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        return None
