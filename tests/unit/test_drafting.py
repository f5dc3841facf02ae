"""Prompt lookup proposes what followed before, and acceptance keeps what was right."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.acceptance import accept
from coordinator.drafters.ngram import NgramDrafter

_TOKENS = st.lists(st.integers(0, 3), max_size=60)


def _naive_draft(context: list[int], limit: int) -> tuple[int, ...]:
    for size in (3, 2):
        tail = context[-size:]
        for end in range(len(context) - 1, size - 1, -1):
            if len(tail) == size and context[end - size : end] == tail:
                return tuple(context[end : end + limit])
    return ()


@given(_TOKENS, st.integers(1, 5), st.integers(1, 7))
def test_drafts_equal_a_search_of_the_whole_context(
    context: list[int], limit: int, step: int
) -> None:
    drafter = NgramDrafter()
    for start in range(0, len(context), step):
        drafter.extend(context[start : start + step])
    assert drafter.draft(limit) == _naive_draft(context, limit)


def test_nothing_is_drafted_for_novel_text() -> None:
    drafter = NgramDrafter()
    drafter.extend(range(100))
    assert drafter.draft(4) == ()
    assert drafter.draft(0) == ()


@given(_TOKENS, _TOKENS)
def test_the_accepted_drafts_are_the_common_prefix_and_one_more_is_decided(
    drafts: list[int], right: list[int]
) -> None:
    sampled = (*right, *([9] * (len(drafts) + 1)))[: len(drafts) + 1]
    verdict = accept(drafts, sampled)
    assert verdict.tokens == sampled[: verdict.accepted + 1]
    assert list(verdict.tokens[:-1]) == drafts[: verdict.accepted]
    if verdict.accepted < len(drafts):
        assert drafts[verdict.accepted] != sampled[verdict.accepted]
