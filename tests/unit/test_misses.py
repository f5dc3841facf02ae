"""The reason for a miss is that of the conversation a prompt goes on from, whatever its session did in between."""

from __future__ import annotations

from coordinator.frames import Epoch
from coordinator.misses import SessionPasts
from coordinator.requests import Miss, MissKind, Request, SessionId

_S = SessionId("s")
_EPOCH = Epoch(0)
_MAIN = tuple(range(100, 200))
_SIDE = (100, 1, 2, 3)


def _miss(pasts: SessionPasts, prompt: tuple[int, ...], cached: int) -> Miss | None:
    return pasts.miss(Request(prompt, session=_S), cached_prefix=cached, epoch=_EPOCH)


def _after(*turns: tuple[int, ...]) -> SessionPasts:
    pasts = SessionPasts(limit=4)
    for tokens in turns:
        pasts.ended(_S, tokens, _EPOCH)
    return pasts


def test_a_conversation_that_was_evicted_during_a_side_call_is_told_so() -> None:
    pasts = _after(_MAIN, _SIDE)
    for cached in (1, 50):
        assert _miss(pasts, (*_MAIN, 7), cached) == Miss(MissKind.EVICTED)
    assert _miss(pasts, (*_MAIN, 7), 100) is None
    assert _miss(pasts, (*_SIDE, 7), 4) is None


def test_a_side_call_diverges_where_it_leaves_the_conversation() -> None:
    assert _miss(_after(_MAIN), _SIDE, 1) == Miss(MissKind.DIVERGED, 1)


def test_another_date_in_the_first_line_is_a_divergence_and_no_eviction() -> None:
    dated = (*_MAIN[:12], 7, *_MAIN[13:])
    assert _miss(_after(_MAIN), dated, 0) == Miss(MissKind.DIVERGED, 12)
    assert _miss(_after(_MAIN), (*_MAIN[:40], 7), 0) == Miss(MissKind.EVICTED)


def test_a_turn_takes_the_place_of_the_one_that_it_went_on_from() -> None:
    longer = (*_MAIN[:90], *range(50))
    pasts = _after(_MAIN, _SIDE, longer)
    assert _miss(pasts, (*longer, 7), 140) is None
    assert _miss(pasts, (*_MAIN, 7), 90) == Miss(MissKind.DIVERGED, 90)


def test_branches_are_few_and_all_of_a_session_is_forgotten_at_once() -> None:
    pasts = _after(*((n, n, n) for n in range(9)))
    assert _miss(pasts, (8, 8, 8, 1), 0) == Miss(MissKind.EVICTED)
    assert _miss(pasts, (0, 0, 0, 1), 0) == Miss(MissKind.DIVERGED, 0)
    pasts.forget(_S)
    assert len(pasts) == 0
    assert _miss(pasts, (8, 8, 8, 1), 0) == Miss(MissKind.NEW_SESSION)


def test_the_bound_counts_every_branch() -> None:
    pasts = SessionPasts(limit=9, most_tokens=10)
    for tokens in ((1,) * 4, (2,) * 4):
        pasts.ended(_S, tokens, _EPOCH)
    pasts.ended(SessionId("t"), (3,) * 2, _EPOCH)
    assert len(pasts) == 2
    pasts.ended(SessionId("t"), (3,) * 3, _EPOCH)
    assert len(pasts) == 1
    assert _miss(pasts, (1,) * 5, 0) == Miss(MissKind.NEW_SESSION)
