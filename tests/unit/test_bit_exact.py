"""Rows are bit-identical however a prompt is cut, packed or split: the built-in model, in float32."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from stage.attention import Numerics, RowSegment
from stage.model.slice import ModelSlice, RowBatch, load_slice
from stage.numerics import probe_numerics

_LAYERS = 30
_LANES = 2
_SPLITS = {1: (0, 30), 2: (0, 15, 30), 3: (0, 7, 21, 30)}
Slices: TypeAlias = list[ModelSlice]


@pytest.fixture(scope="module")
def slices(smollm2_dir: Path) -> dict[int, Slices]:
    """The model on 1, 2 and 3 stages."""
    torch.set_num_threads(1)
    return {stages: _load(smollm2_dir, ends) for stages, ends in _SPLITS.items()}


def _load(folder: Path, ends: tuple[int, ...]) -> Slices:
    return [
        load_slice(
            folder,
            first,
            last,
            lanes=_LANES,
            max_rows=1536,
            dtype=torch.float32,
            device=torch.device("cpu"),
            numerics=Numerics.EXACT,
        )
        for first, last in zip(ends, ends[1:], strict=False)
    ]


def _tokens(count: int) -> tuple[int, ...]:
    dice = random.Random(11)
    return tuple(dice.randrange(49_152) for _ in range(count))


def _random_cuts(count: int, dice: random.Random) -> Iterator[tuple[int, int]]:
    """Frames of 1 to 700 rows; small ones are as likely as large ones."""
    start = 0
    while start < count:
        width = min(int(700 ** dice.random()) + dice.randrange(8), 700, count - start)
        yield start, start + width
        start += width


def _forward(slices: Slices, batch: RowBatch) -> Tensor:
    hidden = None
    for part in slices:
        output = part.forward(batch, hidden)
        hidden = output.hidden
    assert output.logits is not None
    return output.logits


def _run(
    slices: Slices, tokens: tuple[int, ...], cuts: list[tuple[int, int]], dice: random.Random | None
) -> Tensor:
    """Logits of the last row. With `dice`, other lanes' rows share some of the calls."""
    logits = None
    for start, end in cuts:
        segments = [RowSegment(0, start, end - start)]
        rows = tokens[start:end]
        asked = len(rows) - 1
        if dice is not None and dice.random() < 0.5:
            width = dice.randrange(1, 40)
            first = dice.random() < 0.5
            segments.insert(0 if first else 1, RowSegment(1, dice.randrange(100), width))
            other = tuple(dice.randrange(49_152) for _ in range(width))
            rows = (*other, *rows) if first else (*rows, *other)
            asked += width if first else 0
        logits = _forward(slices, RowBatch(rows, tuple(segments), asked=(asked,)))
    assert logits is not None
    return logits.clone()


def _rows(slices: Slices, count: int) -> Tensor:
    """All KV rows of lane 0: [layers, 2, kv_heads, rows, head_dim]."""
    layers = [
        part.rows.view(layer, 0, count) for part in slices for layer in range(part.rows.layers)
    ]
    return torch.stack([torch.stack(layer) for layer in layers]).clone()


def _check(slices: dict[int, Slices], count: int, ways: int, seed: int) -> None:
    tokens, dice = _tokens(count), random.Random(seed)
    whole = [(start, min(start + 512, count)) for start in range(0, count, 512)]
    logits = _run(slices[1], tokens, whole, None)
    rows = _rows(slices[1], count)
    assert rows.shape[0] == _LAYERS
    assert rows[:, :, :, count - 1].abs().sum() > 0
    for way in range(ways):
        stages = 1 + way % 3
        cuts = list(_random_cuts(count, dice))
        got = _run(slices[stages], tokens, cuts, dice if way % 2 else None)
        assert torch.equal(got, logits), (way, stages, cuts)
        assert torch.equal(_rows(slices[stages], count), rows), (way, stages, cuts)


def test_rows_do_not_depend_on_how_a_prompt_is_cut(slices: dict[int, Slices]) -> None:
    _check(slices, count=300, ways=3, seed=1)


def test_the_probe_says_so_and_says_the_contrary_without_paddings(
    slices: dict[int, Slices],
) -> None:
    for part in slices[2]:
        assert str(probe_numerics(part)) == "exact (bit-identical)"
    unpadded = copy(slices[2][1])
    unpadded.numerics = Numerics.FAST
    report = probe_numerics(unpadded)
    assert not report.exact
    assert report.max_difference > 0
    assert str(report).startswith("shape-dependent (max difference")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_fifty_random_ways_of_cutting_1500_tokens(slices: dict[int, Slices]) -> None:
    _check(slices, count=1500, ways=50, seed=2)
