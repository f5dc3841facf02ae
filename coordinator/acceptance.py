"""Which drafts of a verify frame are accepted.

Sampling is a function of the rows before it, so a draft is accepted exactly when it equals the token
that the tail sampled in its place (temperature 0 or not): no probabilities are compared and nothing is
lost. The rule is that of greedy speculative decoding (Leviathan et al. 2023, section 2) with the sampled
token as the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Acceptance:
    """`accepted` drafts were right. The decided tokens are they and, unless frames behind this one
    guessed that too, the one sampled after them. `failed`: the next draft was wrong.
    """

    accepted: int
    tokens: tuple[int, ...]
    failed: bool


def accept(guess: Sequence[int], sampled: Sequence[int]) -> Acceptance:
    """`sampled` has one token a row of the frame: the one that follows that row. `guess` are the drafts
    for the same places and, when more frames are in flight, for those behind them.
    """
    accepted = 0
    while accepted < min(len(guess), len(sampled)) and guess[accepted] == sampled[accepted]:
        accepted += 1
    failed = accepted < min(len(guess), len(sampled))
    return Acceptance(accepted, tuple(sampled[: accepted + 1]), failed)
