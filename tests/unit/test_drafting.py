"""Prompt lookup proposes what followed before, and acceptance keeps what was right."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.acceptance import accept
from coordinator.drafters.ngram import NgramDrafter

_TOKENS = st.lists(st.integers(0, 3), max_size=60)


def _naive_draft(context: list[int], guess: list[int], limit: int) -> tuple[int, ...]:
    """The latest earlier place of the last tokens; what stands there, going on into itself."""
    text = [*context, *guess]
    for size in (3, 2):
        tail = text[-size:]
        for end in range(len(context) - 1, size - 1, -1):
            if len(tail) == size and context[end - size : end] == tail:
                for place in range(end, end + limit):
                    text.append(text[place])
                return tuple(text[len(context) + len(guess) :])
    return ()


@given(_TOKENS, st.lists(st.integers(0, 3), max_size=4), st.integers(1, 9), st.integers(1, 7))
def test_drafts_equal_a_search_of_the_whole_context(
    context: list[int], guess: list[int], limit: int, step: int
) -> None:
    drafter = NgramDrafter()
    for start in range(0, len(context), step):
        drafter.extend(context[start : start + step])
    assert drafter.draft(guess, limit) == _naive_draft(context, guess, limit)


def test_nothing_is_drafted_for_novel_text() -> None:
    drafter = NgramDrafter()
    drafter.extend(range(100))
    assert drafter.draft((), 4) == ()
    assert drafter.draft((), 0) == ()


@given(_TOKENS, st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_right_drafts_are_accepted_up_to_the_first_wrong_one(
    guess: list[int], sampled: list[int]
) -> None:
    verdict = accept(guess, sampled)
    pairs = list(zip(guess, sampled, strict=False))
    right = [a == b for a, b in pairs]
    assert verdict.accepted == (right.index(False) if False in right else len(pairs))
    assert verdict.failed == (False in right)
    # What was sampled behind the last right draft is decided too, where this frame sampled it.
    assert verdict.tokens == tuple(sampled[: verdict.accepted + 1])
