"""Lanes that an earlier gateway left are read as texts: a session that is not known here goes on from its own ids."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.held import HeldLane, Holding
from coordinator.nodes import root_of
from coordinator.sessions import History, splice
from fakering.ring import FakeRing
from gateway.chat.boundaries import AddedTokens
from gateway.chat.byte_tokenizer import byte_tokenizer
from gateway.chat.seams import as_far_as, kept
from gateway.inherited import Inherited

_MARKS = {"<s>": 0, "<e>": 1}
_ADDED = AddedTokens.of(_MARKS, _MARKS)


def _encode(text: str) -> tuple[int, ...]:
    """A letter a token, unless two are alike: those are one."""
    ids, place = [], 0
    while place < len(text):
        mark = next((mark for mark in _MARKS if text.startswith(mark, place)), None)
        pair = text[place : place + 2]
        piece = mark or (pair if len(pair) == 2 and pair[0] == pair[1] else text[place])
        ids.append(_MARKS[piece] if mark else ord(piece[0]) + 1000 * (len(piece) - 1))
        place += len(piece)
    return tuple(ids)


def _lane(*pieces: str) -> History:
    """A lane whose tokens spell these pieces."""
    ids, ends, end = [], [], 0
    for piece in pieces:
        letter = ord(piece) if len(piece) == 1 else 5000 + len(ids)
        ids.append(_MARKS.get(piece, letter))
        end += len(piece)
        ends.append(end)
    return History("".join(pieces), tuple(ids), ends=tuple(ends))


def _ids(history: History, text: str) -> tuple[int, ...]:
    return splice(
        kept(history, text, _ADDED, _encode), text, _encode, _ADDED.special_ids.__contains__
    )


def test_an_answer_keeps_the_ids_that_it_was_said_with() -> None:
    lane = _lane("<s>", "u", "<e>", "<s>", "o", "ok")
    text = "<s>u<e><s>ook<e><s>v"
    assert _ids(lane, text) == (*lane.token_ids, *_encode("<e><s>v"))
    assert _ids(lane, text) != _encode(text)


def test_drafts_that_failed_at_a_lanes_end_are_left_out() -> None:
    said = _lane("<s>", "u", "<e>", "<s>", "o", "ok")
    lane = _lane("<s>", "u", "<e>", "<s>", "o", "ok", "never", "said")
    assert _ids(lane, "<s>u<e><s>ook<e><s>v") == (*said.token_ids, *_encode("<e><s>v"))


def test_rows_beyond_the_answer_that_came_true_are_kept_too() -> None:
    lane = _lane("<s>", "o", "ok", "<e>", "<s>", "v", "wrong")
    assert _ids(lane, "<s>ook<e><s>vv") == (*lane.token_ids[:4], *_encode("<s>vv"))


def test_an_answer_that_was_cut_is_completed_behind_its_last_row() -> None:
    """Of its last token there is no row, and so no id: it is the text's again."""
    lane = _lane("<s>", "u", "<e>", "<s>", "o", "o", "k")
    assert _ids(lane, "<s>u<e><s>ookaa<e><s>v") == (*lane.token_ids, *_encode("aa<e><s>v"))


def test_a_clients_own_words_make_the_tokens_that_they_always_make() -> None:
    """A prompt that begins as another one did is no answer that was cut."""
    lane = History("<s>aabc", _encode("<s>aabc"), ends=(3, 5, 6, 7))
    text = "<s>aabb<e>"
    assert _ids(lane, text) == _encode(text)
    assert len(_encode("<s>aab") + _encode("b<e>")) > len(_encode(text)), "nothing is shown"


def test_half_a_character_at_the_end_is_left_out() -> None:
    """Its text is known with its last part only: a lane may end in front of that."""
    whole = _lane("<s>", "a")
    lane = History("<s>a", (*whole.token_ids, 77), ends=(3, 4, 4))
    assert _ids(lane, "<s>a<e>") == (*whole.token_ids, *_encode("<e>"))


def test_of_several_lanes_the_one_that_fits_best_is_gone_on_from() -> None:
    far, near = _lane("<s>", "u", "<e>", "x"), _lane("<s>", "u", "<e>", "<s>", "oo")
    lanes = replace(far, others=(near,))
    assert _ids(lanes, "<s>u<e><s>oo<e>") == (*near.token_ids, *_encode("<e>"))


def test_a_sessions_own_history_is_as_it_was() -> None:
    history = History("<s>a", (0, 97))
    assert as_far_as(history, "<s>b") is history
    assert as_far_as(None, "<s>b") is None


@dataclass
class _Rings:
    """As much of a router as is asked."""

    infos: tuple[Any, ...]

    def rings(self) -> tuple[Any, ...]:
        return tuple(SimpleNamespace(info=info) for info in self.infos)


@pytest.fixture
async def inherited() -> Inherited:
    tokenizer = byte_tokenizer()
    ring = FakeRing(2, 3, 64, vocab_size=tokenizer.vocab_size)
    info = await ring.start(lambda _: None)
    await ring.stop()

    def held(text: str, tenant: str) -> HeldLane:
        ids = array("i", tokenizer.encode(text))
        return HeldLane(ids, root_of(info.model_fingerprint, tenant))

    lanes = (held("nobody's", ""), held("one's é", "one"), HeldLane(), held("other's", "other"))
    router: Any = _Rings((None, replace(info, held=Holding(lanes))))
    return Inherited(router, tokenizer)


async def test_nobody_goes_on_from_another_tenants_lanes(inherited: Inherited) -> None:
    for tenant, text in (("", "nobody's"), ("one", "one's é"), ("other", "other's")):
        history = inherited.history(inherited.lanes(tenant))
        assert history is not None
        assert [each.text for each in history.branches()] == [text]
    assert inherited.history(inherited.lanes("a third one")) is None


async def test_ends_tell_how_much_text_the_first_ids_are(inherited: Inherited) -> None:
    history = inherited.history(inherited.lanes("one"))
    assert history is not None
    assert history.ends == (1, 2, 3, 4, 5, 6, 6, 7)
    assert inherited.history(inherited.lanes("one")) == history
