"""Drafters propose tokens that a verify frame checks. A bad proposal costs time, never a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """One job's drafter: it is told every token of the context, in order, and asked before each
    verify frame.
    """

    def extend(self, tokens: Sequence[int]) -> None: ...

    def draft(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that may follow the context; none where it has no idea."""
        ...
