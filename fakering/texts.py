"""Prompts as token ids: new ones, repetitive ones, and traps for wrong reuse.

Pure functions of a seed. Nothing here knows what a ring makes of them.
"""

from __future__ import annotations

import random


def novel(length: int, seed: int, vocab_size: int) -> tuple[int, ...]:
    """Tokens in which nothing repeats but by chance."""
    dice = random.Random(seed)
    return tuple(dice.randrange(vocab_size) for _ in range(length))


def repetitive(length: int, seed: int, vocab_size: int, period: int = 7) -> tuple[int, ...]:
    """The same few tokens over and over: a drafter's delight."""
    phrase = novel(period, seed, vocab_size)
    return (phrase * (length // period + 1))[:length]


def changed(tokens: tuple[int, ...], row: int, vocab_size: int) -> tuple[int, ...]:
    """The trap: equally long, and equal but for one row. Reuse that counts positions falls into it."""
    other = (tokens[row] + 1) % vocab_size
    return (*tokens[:row], other, *tokens[row + 1 :])


def shifted(tokens: tuple[int, ...], by: int = 1) -> tuple[int, ...]:
    """The trap for hashes that forget places: the same tokens, each `by` rows later."""
    return tokens[-by:] + tokens[:-by]
