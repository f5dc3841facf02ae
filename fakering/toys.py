"""Constraints without a grammar, for rings without a model: a hash of what was said picks what may follow.

They decide what a toy allows, and hold whoever asks to the port's rules: a path that disobeys is never asked about.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.constraints import allows
from fakering.model import mix

_MASK = (1 << 64) - 1


def mask_of(allowed: Iterable[int], vocab_size: int) -> bytes:
    bits = sum(1 << token for token in set(allowed))
    return bits.to_bytes((vocab_size + 7) // 8, "little")


class Disobeyed(AssertionError):
    """A token was decided, or taken for a draft of ours, that may not stand where it does."""


@dataclass(frozen=True, slots=True)
class ToyConstraint:
    """Lets one token in `one_in` follow, and at one place in `forced_in` a single one.

    `memory`: only so many of the last tokens count, so that what was said once may be said again. `fails_at`: it raises
    when it is asked what may follow so many tokens. It keeps nothing between calls.
    """

    vocab_size: int
    seed: int = 0
    one_in: int = 4
    forced_in: int = 5
    memory: int = 2
    fails_at: int | None = None

    def masks(self, decided: Sequence[int], drafts: Sequence[int]) -> tuple[bytes, ...]:
        self._require_obeyed(decided)
        masks = [self._mask(decided)]
        for place, draft in enumerate(drafts):
            reached = len(decided) + place + 1
            if not allows(masks[-1], draft) or reached == self.fails_at:
                break
            masks.append(self._mask((*decided, *drafts[: place + 1])))
        return tuple(masks)

    def forced(self, decided: Sequence[int], limit: int) -> tuple[int, ...]:
        said = list(decided)
        while len(said) < len(decided) + limit and len(self._allowed(said)) == 1:
            said += self._allowed(said)
        return tuple(said[len(decided) :])

    def obeyed(self, tokens: Sequence[int]) -> bool:
        """Whether a whole answer keeps to it."""
        return all(allows(self._mask(tokens[:end]), tokens[end]) for end in range(len(tokens)))

    def _require_obeyed(self, decided: Sequence[int]) -> None:
        # What came before was asked about before.
        if decided and not allows(self._mask(decided[:-1]), decided[-1]):
            raise Disobeyed(f"token {decided[-1]} at place {len(decided) - 1}")

    def _mask(self, said: Sequence[int]) -> bytes:
        if self.fails_at is not None and len(said) >= self.fails_at:
            raise ValueError(f"asked what follows {len(said)} tokens")
        return mask_of(self._allowed(said), self.vocab_size)

    def _allowed(self, said: Sequence[int]) -> list[int]:
        key = mix(self.seed + 1)
        for token in said[-self.memory :]:
            key = mix((key + token + 1) & _MASK)
        first = key % self.vocab_size
        if mix(key ^ 1) % self.forced_in == 0:
            return [first]
        others = (t for t in range(self.vocab_size) if mix(key ^ (t + 2)) % self.one_in == 0)
        return sorted({first, *others})


def random_toy(dice: random.Random, vocab_size: int) -> ToyConstraint:
    """Loose and strict ones, some of which fail on the way."""
    return ToyConstraint(
        vocab_size,
        seed=dice.randrange(1 << 32),
        one_in=dice.choice((2, 4, 30)),
        forced_in=dice.choice((1, 3, 10)),
        memory=dice.choice((1, 2, 8)),
        fails_at=dice.randrange(12) if dice.random() < 0.15 else None,
    )
