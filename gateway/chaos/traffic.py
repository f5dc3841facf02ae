"""What the storm's streams say: conversations of a small pool, gone on with, asked again, branched, and called aside.

Pure, by the seed alone: the same conversation asks the same whoever plays it, so its cold answers are computed once.
Decides no token: an answer is put in by whoever played the turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from coordinator.requests import GREEDY, SamplingSpec
from gateway.bench.prompts import FILE, prose

Encode = Callable[[str], Sequence[int]]

# Branches, and new tries of one answer, that a conversation has at each of its turns.
_VARIANTS = 2
_HEAD_SENTENCES = 6
# Share of the turns that ask for drafts.
_DRAFTED = 0.8
# Of each stream.
_SESSIONS = 8
# A stream that changes between two conversations gives up lanes all the time, and wants them back.
_CHANGE = 0.4
_TEMPERATURE = 0.8
_ASKS = (
    "Go on from where you stopped.",
    "Which of these steps comes first, and why?",
    "Repeat the last lines without a change.",
    "Name what is missing.",
    "Now the same for the next one.",
)


class Kind(StrEnum):
    """Of a turn, as a client means it."""

    EXTEND = "extend"
    AGAIN = "regenerate"  # the same prompt, other dice
    BRANCH = "branch"  # another question in place of an earlier one
    ASIDE = "side call"  # a prompt of its own in the same session


_KINDS = (*[Kind.EXTEND] * 6, Kind.AGAIN, Kind.BRANCH, Kind.ASIDE)


@dataclass(frozen=True, slots=True)
class Ask:
    """One turn by its exact token ids. Equal asks have equal answers, wherever and whenever they are played."""

    prompt: tuple[int, ...]
    sampling: SamplingSpec
    max_tokens: int
    draft: bool = field(compare=False)  # how it is computed, not what


@dataclass(frozen=True, slots=True)
class Step:
    kind: Kind
    session: str
    ask: Ask


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the conversations."""

    pool: int = 8  # conversations that there are
    turns: int = 5
    answer_tokens: int = 48  # at most, and at least half of it
    aside_tokens: int = 40
    rows: int = 1500  # of a conversation that is gone on with


class Talk:
    """One conversation as one client holds it. `next` asks, `answered` puts in what came back."""

    def __init__(self, number: int, session: str, encode: Encode, shape: Shape) -> None:
        self.number = number
        self.session = session
        self._encode = encode
        self._shape = shape
        # Of each turn with its answer, behind the head.
        self._ends: list[tuple[int, ...]] = [tuple(encode(_head(number)))]
        self._last: tuple[int, ...] = ()  # the last turn's prompt
        self._goes_on = False

    @property
    def turns(self) -> int:
        return len(self._ends) - 1

    @property
    def over(self) -> bool:
        return self.turns >= self._shape.turns or len(self._ends[-1]) > self._shape.rows

    def next(self, kind: Kind, dice: random.Random) -> Step:
        """Before its first turn there is nothing to ask again or to branch from."""
        if not self.turns:
            kind = Kind.EXTEND
        self._goes_on = kind is Kind.EXTEND
        turn, variant = self.turns, dice.randrange(_VARIANTS)
        match kind:
            case Kind.EXTEND:
                variant, prompt = 0, self._asked(turn, 0)
                self._last = prompt
            case Kind.AGAIN:
                prompt = self._last
            case Kind.BRANCH:
                turn = dice.randrange(turn)
                prompt = self._asked(turn, 1 + variant)
            case Kind.ASIDE:
                variant = 0
                said = self._ends[-1][-self._shape.aside_tokens :]
                prompt = (*self._encode("Title of this conversation: "), *said)
        place = random.Random(f"{self.number}/{turn}/{kind}/{variant}")
        most = self._shape.answer_tokens
        length, draft = place.randint(most // 2, most), dice.random() < _DRAFTED
        return Step(kind, self.session, Ask(prompt, _sampling(place), length, draft))

    def answered(self, step: Step, tokens: tuple[int, ...]) -> None:
        """Only an extension is gone on from; the others are leaves."""
        if self._goes_on:
            self._ends.append((*step.ask.prompt, *tokens))

    def _asked(self, turn: int, variant: int) -> tuple[int, ...]:
        return (*self._ends[turn], *self._encode(_said(self.number, turn, variant)))


class Chatter:
    """What one stream says, for ever: two conversations at once, now the one and now the other."""

    def __init__(self, seed: int, stream: int, encode: Encode, shape: Shape) -> None:
        self._dice = random.Random(f"stream/{seed}/{stream}")
        self._stream = stream
        self._encode = encode
        self._shape = shape
        self._begun = 0
        self._talks = [self._begin(), self._begin()]
        self._current = 0

    def next(self) -> Step:
        if self._dice.random() < _CHANGE:
            self._current = 1 - self._current
        if self._talks[self._current].over:
            self._talks[self._current] = self._begin()
        return self._talks[self._current].next(self._dice.choice(_KINDS), self._dice)

    def answered(self, step: Step, tokens: tuple[int, ...]) -> None:
        self._talks[self._current].answered(step, tokens)

    def _begin(self) -> Talk:
        """In a session of its own; the oldest name is used again, since what is kept of sessions is to be bounded."""
        self._begun += 1
        session = f"chaos-{self._stream}-{self._begun % _SESSIONS}"
        return Talk(self._dice.randrange(self._shape.pool), session, self._encode, self._shape)


def longest_head(encode: Encode, shape: Shape) -> int:
    """Tokens that a conversation may begin with, before anything is asked."""
    return max(len(encode(_head(number))) for number in range(shape.pool))


def _sampling(place: random.Random) -> SamplingSpec:
    """Half of the turns are greedy."""
    if place.random() < 0.5:
        return GREEDY
    return SamplingSpec(temperature=_TEMPERATURE, seed=place.randrange(1, 1 << 32))


def _head(number: int) -> str:
    """Two conversations in turn share one; every fourth has a file in it, which its answers quote."""
    text = prose(number // 2, _HEAD_SENTENCES)
    return f"{text}\n{FILE}" if number % 4 == 3 else text


def _said(number: int, turn: int, variant: int) -> str:
    dice = random.Random(f"said/{number}/{turn}/{variant}")
    return f"\nUser: {prose(dice.randrange(1 << 16), 1 + dice.randrange(3))} {dice.choice(_ASKS)}\nAnswer:"
