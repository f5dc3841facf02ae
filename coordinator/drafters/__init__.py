"""Drafters propose tokens that a verify frame checks. A bad proposal costs time, never a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from coordinator.frames import JobId


class Drafter(Protocol):
    """One job's drafter: it is told every token of the context, in order, and asked before each
    verify frame.
    """

    def extend(self, tokens: Sequence[int]) -> None: ...

    def draft(self, guess: Sequence[int], limit: int) -> tuple[int, ...] | None:
        """At most `limit` tokens that may follow the context and, behind it, `guess`: tokens that
        were drafted and are not confirmed yet. Empty where it has no idea.

        None: it is still thinking. It must then wake whoever made it, once, when it knows; the job
        sends nothing until then.
        """
        ...

    def close(self) -> None:
        """The job has ended; whatever the drafter holds for it is given back."""
        ...


# Makes the drafter of one job. The callback is for drafters that think elsewhere: it may be called from any thread.
# The name is the tenant's, of whose jobs alone a drafter may keep anything for this one.
DrafterFactory = Callable[[JobId, Callable[[], object], str], Drafter]
