"""A session's own ids are spliced into its next prompt, and only where no tokenizer could merge."""

from __future__ import annotations

from coordinator.requests import SessionId
from coordinator.sessions import History, SessionTable, splice

_END = 0  # the one special token of the toy tokenizer below: "|"


def _encode(text: str) -> list[int]:
    """Greedy pairs: 'ab' is one token, so the cut of generated text matters."""
    ids, place = [], 0
    while place < len(text):
        width = 2 if text[place : place + 2] == "ab" else 1
        piece = text[place : place + width]
        ids.append(_END if piece == "|" else 1000 if piece == "ab" else ord(piece))
        place += width
    return ids


def _is_special(token: int) -> bool:
    return token == _END


def test_generated_ids_survive_although_their_text_tokenizes_otherwise() -> None:
    history = History("q|ab|", (ord("q"), _END, ord("a"), ord("b"), _END))
    ids = splice(history, "q|ab|next", _encode, _is_special)
    assert ids == (*history.token_ids, *_encode("next"))
    assert list(ids) != _encode("q|ab|next")


def test_a_seam_before_a_special_token_is_good_too() -> None:
    history = History("q|a", (ord("q"), _END, ord("a")))
    assert splice(history, "q|a|b", _encode, _is_special) == (*history.token_ids, _END, ord("b"))


def test_a_seam_inside_a_word_is_tokenized_anew() -> None:
    history = History("q|a", (ord("q"), _END, ord("a")))
    assert list(splice(history, "q|ab", _encode, _is_special)) == _encode("q|ab")


def test_edited_history_is_tokenized_anew() -> None:
    history = History("q|ab|", (ord("q"), _END, ord("a"), ord("b"), _END))
    assert list(splice(history, "Q|ab|next", _encode, _is_special)) == _encode("Q|ab|next")
    assert list(splice(None, "q|", _encode, _is_special)) == _encode("q|")


def test_an_exact_resend_keeps_its_ids() -> None:
    history = History("q|ab|", (ord("q"), _END, ord("a"), ord("b"), _END))
    assert splice(history, "q|ab|", _encode, _is_special) == history.token_ids


def test_a_branch_in_between_leaves_a_conversation_its_ids() -> None:
    """A side call of the same session, such as for a title, has another beginning and ids of its own."""
    table, session = SessionTable(limit=2), SessionId("1")
    main = History("q|ab|", (ord("q"), _END, ord("a"), ord("b"), _END))
    side = History("t|ab|", (ord("t"), _END, ord("a"), ord("b"), _END))
    for history in (main, side):
        table.remember(session, history)
    known = table.history(session)
    assert known == History(side.text, side.token_ids, (main,))
    assert splice(known, "q|ab|next", _encode, _is_special) == (*main.token_ids, *_encode("next"))
    assert splice(known, "t|ab|next", _encode, _is_special) == (*side.token_ids, *_encode("next"))
    longer = History("q|ab|next|", (*main.token_ids, *_encode("next|")))
    table.remember(session, longer)
    assert table.history(session) == History(longer.text, longer.token_ids, (side,))


def test_branches_are_few_and_count_as_bytes() -> None:
    table, session = SessionTable(limit=2, history_bytes=50_000), SessionId("1")
    for name in "abcdefgh":
        table.remember(session, History(name * 1000, (1,) * 1000))  # some 9 kB
    known = table.history(session)
    assert known is not None
    assert [each.text[0] for each in known.branches()] == ["h", "g", "f", "e"]
    table.remember(SessionId("2"), History("x" * 1000, (1,) * 1000))
    assert table.history(session) is not None
    table.remember(SessionId("2"), History("y" * 1000, (1,) * 1000))
    assert table.history(session) is None
    assert len(table) == 2


def test_the_session_used_longest_ago_is_forgotten_first() -> None:
    table = SessionTable(limit=2)
    one, two, three = SessionId("1"), SessionId("2"), SessionId("3")
    table.pin(one, "ring0")
    table.pin(two, "ring1")
    table.remember(one, History("x", (1,)))
    table.pin(three, "ring0")
    assert one in table
    assert two not in table
    assert len(table) == 2
    assert table.ring(one) == "ring0"
    assert table.history(one) == History("x", (1,))
    assert table.forget(one)
    assert not table.forget(one)


def test_histories_are_bounded_in_bytes_and_the_oldest_go_first() -> None:
    one, two = SessionId("1"), SessionId("2")
    history = History("x" * 1000, (1,) * 1000)  # some 9 kB
    table = SessionTable(limit=9, history_bytes=20_000)
    table.pin(one, "ring0")
    for session in (one, two, one, one):
        table.remember(session, history)
    assert table.history(two) == table.history(one) == history
    table.remember(SessionId("3"), history)
    assert table.history(two) is None
    assert table.history(one) == history
    assert two in table
    table.forget(one)
    table.remember(two, history)
    assert table.history(SessionId("3")) == table.history(two) == history


def test_a_history_beyond_all_bounds_is_not_kept() -> None:
    table = SessionTable(limit=1, history_bytes=100)
    for session in (SessionId("1"), SessionId("2")):
        table.remember(session, History("x", (1,) * 100))
        assert table.history(session) is None
        assert len(table) == 1
