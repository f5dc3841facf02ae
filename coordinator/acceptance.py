"""Which drafts of a verify frame are accepted.

Sampling is a function of the rows before it, so a draft is accepted exactly when it equals the
token that the tail sampled in its place (temperature 0 or not): no probabilities are compared and
nothing is lost. The rule is that of greedy speculative decoding (Leviathan et al. 2023, section 2)
with the sampled token as the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Acceptance:
    """`accepted` drafts were right; the decided tokens are they and the one sampled after them."""

    accepted: int
    tokens: tuple[int, ...]


def accept(drafts: Sequence[int], sampled: Sequence[int]) -> Acceptance:
    """`sampled` has one token a row of [anchor] + drafts: the token that follows that row."""
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == sampled[accepted]:
        accepted += 1
    return Acceptance(accepted, tuple(sampled[: accepted + 1]))
