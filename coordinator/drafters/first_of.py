"""Several drafters as one: the first that has an idea is heard, so the cheapest goes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.drafters import Drafter, DrafterFactory
from coordinator.frames import JobId


class FirstOf:
    """A drafter is asked only where those before it had no idea; one that thinks is waited for."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)

    def extend(self, tokens: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.extend(tokens)

    def draft(self, guess: Sequence[int], limit: int) -> tuple[int, ...] | None:
        for drafter in self._drafters:
            drafts = drafter.draft(guess, limit)
            if drafts is None or drafts:
                return drafts
        return ()

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()


def first_of(*factories: DrafterFactory) -> DrafterFactory:
    def make(job: JobId, wake: Callable[[], object], tenant: str) -> Drafter:
        return FirstOf([factory(job, wake, tenant) for factory in factories])

    return make
