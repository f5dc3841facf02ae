"""A grammar that takes too long for each token costs its own turn, and not everybody's time."""

from __future__ import annotations

import time
from itertools import count

import pytest

from coordinator.constraints import Constraint
from coordinator.errors import ConstraintFailed
from gateway.chat.byte_tokenizer import ByteTokenizer
from gateway.chat.grammar import Grammars
from gateway.turns import GrammarKind, GrammarSpec


@pytest.fixture
def constraint() -> Constraint:
    return Grammars(ByteTokenizer()).constraint(GrammarSpec(GrammarKind.REGEX, "a*"))


def _every_question_takes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    ticks = count()
    monkeypatch.setattr(time, "thread_time", lambda: next(ticks) * seconds)


def _ids(tokens: int) -> tuple[int, ...]:
    return tuple(b"a" * tokens)


def _go_on(constraint: Constraint, tokens: int) -> int:
    """How many tokens it got to."""
    for said in range(tokens):
        try:
            constraint.masks(_ids(said), ())
        except ConstraintFailed:
            return said
    return tokens


def test_a_grammar_of_slow_tokens_fails(
    constraint: Constraint, monkeypatch: pytest.MonkeyPatch
) -> None:
    _every_question_takes(monkeypatch, 0.1)
    assert 5 < _go_on(constraint, 100) < 20


def test_a_grammar_may_be_slow_once_and_a_little_always(
    constraint: Constraint, monkeypatch: pytest.MonkeyPatch
) -> None:
    _every_question_takes(monkeypatch, 0.9)
    assert _go_on(constraint, 2) == 2
    _every_question_takes(monkeypatch, 0.019)
    assert _go_on(constraint, 500) == 500


def test_drafts_cost_no_turn_its_grammar(
    constraint: Constraint, monkeypatch: pytest.MonkeyPatch
) -> None:
    _every_question_takes(monkeypatch, 0.1)
    for said in range(1, 100):
        assert len(constraint.masks(_ids(said), _ids(7))) == 8
