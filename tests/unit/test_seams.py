"""A session's own ids survive up to where its text does, however the end of it comes back."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.sessions import History, splice
from gateway.chat.boundaries import AddedTokens
from gateway.chat.seams import kept

_SPECIAL = {"<s>": 0, "<e>": 1}
_ADDED = AddedTokens.of(_SPECIAL, _SPECIAL)


def _encode(text: str) -> tuple[int, ...]:
    """Pairs of a letter are one token, so the cut of generated text matters."""
    ids, place = [], 0
    while place < len(text):
        special = next((t for t in _SPECIAL if text.startswith(t, place)), None)
        pair = text[place : place + 2]
        piece = special or (pair if len(pair) == 2 and pair[0] == pair[1] else text[place])
        ids.append(_SPECIAL[piece] if special else ord(piece[0]) + (1000 if len(piece) == 2 else 0))
        place += len(piece)
    return tuple(ids)


def _spelled(text: str) -> tuple[int, ...]:
    """As a model may write it: letter by letter."""
    ids: list[int] = []
    for part in _ADDED.pattern.split(text):
        ids += [*map(ord, part), -1]
    marks = [token for _, token in _ADDED.places(text)]
    return tuple(marks.pop(0) if each == -1 else each for each in ids[:-1])


def _ids(history: History | None, text: str) -> tuple[int, ...]:
    return splice(
        kept(history, text, _ADDED, _encode), text, _encode, _ADDED.special_ids.__contains__
    )


def _history(text: str, *others: History) -> History:
    return History(text, _spelled(text), others)


def test_a_changed_end_leaves_all_before_it_as_it_was() -> None:
    before = _history("<s>aa<e><s>bb<e><s>cc dd")
    text = "<s>aa<e><s>bb<e><s>cc  dd<e>"
    assert _ids(before, text) == (*_spelled("<s>aa<e><s>bb<e>"), *_encode("<s>cc  dd<e>"))
    assert _ids(before, text) != _encode(text)


def test_a_text_that_goes_on_keeps_all_ids() -> None:
    before = _history("<s>aa<e><s>cc")
    assert _ids(before, "<s>aa<e><s>cc<e>dd") == (*before.token_ids, *_encode("<e>dd"))


def test_an_answer_that_was_cut_in_the_middle_keeps_all_ids_before_it() -> None:
    """What follows it is no special token, and may merge with its end."""
    before = _history("<s>aa<e><s>cc")
    assert _ids(before, "<s>aa<e><s>ccc<e>") == (*_spelled("<s>aa<e>"), *_encode("<s>ccc<e>"))


def test_the_branch_that_shares_most_is_gone_on_from() -> None:
    main = _history("<s>aa<e><s>cc")
    side = _history("<s>bb<e><s>dd", main)
    assert _ids(side, "<s>aa<e><s>cx") == (*_spelled("<s>aa<e>"), *_encode("<s>cx"))
    assert _ids(side, "<s>bb<e><s>dx") == (*_spelled("<s>bb<e>"), *_encode("<s>dx"))


@pytest.mark.parametrize("text", ["aa", "", "<s>", "<sss"])
def test_what_shares_no_special_token_is_tokenized_anew(text: str) -> None:
    assert _ids(_history("<saa"), text) == _encode(text)
    assert _ids(None, text) == _encode(text)


def test_a_special_token_that_letters_spell_makes_no_seam() -> None:
    """Its place in the text says nothing of the others' places among the ids."""
    spelled = History("<s>aa<e>bb<e>cc", (0, *map(ord, "aa<e>bb"), 1, *map(ord, "cc")))
    text = "<s>aa<e>bb<e>xx"
    assert _ids(spelled, text) == _encode(text)


_TEXT = st.lists(st.sampled_from(["<s>", "<e>", "aa", "a", "b", "<", " "]), max_size=8).map("".join)


@given(_TEXT, _TEXT, _TEXT)
@example("<s>aa<e>", "", "aa")
def test_the_ids_always_spell_the_text(head: str, old: str, new: str) -> None:
    text = head + new
    ids = _ids(_history(head + old), text)
    names = {token: name for name, token in _SPECIAL.items()}
    assert "".join(names.get(i) or (chr(i) if i < 1000 else chr(i - 1000) * 2) for i in ids) == text
