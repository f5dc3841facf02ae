"""Masked rows sample what their mask lets follow, by the same rules; rows beside them notice nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from coordinator.requests import GREEDY, SamplingSpec
from fakering.toys import mask_of
from stage.sampling import AskedRow, NotFinite, sample_rows

VOCAB = 203  # no multiple of 8
SPECS = {
    "greedy": GREEDY,
    "plain": SamplingSpec(seed=3),
    "top_k": SamplingSpec(seed=4, top_k=3),
    "top_p": SamplingSpec(seed=5, top_p=0.6),
    "min_p": SamplingSpec(seed=6, min_p=0.3),
    "cold": SamplingSpec(seed=7, temperature=0.01),
    "penalties": SamplingSpec(seed=8, presence_penalty=1.0, repetition_penalty=1.3),
    "bias": SamplingSpec(temperature=0.0, logit_bias=((7, 50.0), (9, -50.0))),
    "told": SamplingSpec(temperature=0.0, logprobs=3),
}


def packed(allowed: list[int], size: int = VOCAB) -> bytes:
    return mask_of(allowed, size)


def logits_of(rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def rows_of(spec: SamplingSpec, count: int, mask: bytes = b"") -> list[AskedRow]:
    return [AskedRow(n + 1, spec, range(n + 1), 1, mask) for n in range(count)]


@pytest.mark.parametrize("name", SPECS)
def test_a_mask_is_as_if_the_other_logits_were_minus_infinity(name: str) -> None:
    allowed = sorted(random.Random(2).sample(range(VOCAB), 20))
    logits = logits_of(60)
    hidden = torch.full_like(logits, -torch.inf)
    hidden[:, allowed] = logits[:, allowed]
    spec = replace(SPECS[name], logprobs=None)
    masked = sample_rows(logits, rows_of(spec, 60, packed(allowed)))
    assert masked == sample_rows(hidden, rows_of(spec, 60))
    assert {row.token for row in masked} <= set(allowed)
    assert masked != sample_rows(logits, rows_of(spec, 60))


@pytest.mark.parametrize("name", SPECS)
def test_a_mask_that_lets_everything_follow_changes_nothing(name: str) -> None:
    logits, spec = logits_of(40), SPECS[name]
    free = sample_rows(logits, rows_of(spec, 40))
    assert sample_rows(logits, rows_of(spec, 40, packed(list(range(VOCAB))))) == free


def test_rows_without_a_mask_are_the_same_beside_rows_with_one() -> None:
    dice = random.Random(5)
    logits = logits_of(90)
    specs = [dice.choice(list(SPECS.values())) for _ in range(90)]
    free = [AskedRow(n + 1, spec, range(n + 1), 1) for n, spec in enumerate(specs)]
    masks = [packed(dice.sample(range(VOCAB), 9)) if n % 3 else b"" for n in range(90)]
    mixed = [replace(row, mask=mask) for row, mask in zip(free, masks, strict=True)]
    alone, beside = sample_rows(logits, free), sample_rows(logits, mixed)
    for n in range(90):
        [single] = sample_rows(logits[n : n + 1], [mixed[n]])
        assert beside[n] == single
        if not masks[n]:
            assert beside[n] == alone[n]


def test_log_probabilities_stay_those_before_the_mask() -> None:
    [logits], spec = logits_of(1), SPECS["told"]
    [row] = sample_rows(logits[None], rows_of(spec, 1, packed([11])))
    [free] = sample_rows(logits[None], rows_of(spec, 1))
    assert row.token == 11
    assert row.logprobs is not None
    assert free.logprobs is not None
    assert row.logprobs.top == free.logprobs.top
    expected = float(logits.double().log_softmax(0)[11])
    assert row.logprobs.chosen == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("spec", [GREEDY, SamplingSpec(seed=1)], ids=["greedy", "sampled"])
def test_a_mask_may_be_shorter_or_longer_than_the_vocabulary(spec: SamplingSpec) -> None:
    """Ids beyond its end may not follow; a tokenizer may be smaller than its model, or larger."""
    logits = logits_of(40)
    short = sample_rows(logits, rows_of(spec, 40, packed([1, 2, 5], size=8)))
    assert {row.token for row in short} <= {1, 2, 5}
    long = sample_rows(logits, rows_of(spec, 40, packed([200, VOCAB, 290], size=300)))
    assert {row.token for row in long} == {200}


@pytest.mark.parametrize("spec", [GREEDY, SamplingSpec(seed=1)], ids=["greedy", "sampled"])
def test_a_row_whose_only_allowed_logits_are_impossible_is_refused(spec: SamplingSpec) -> None:
    logits = logits_of(3)
    logits[1, 4] = -torch.inf
    rows = [*rows_of(spec, 1), *rows_of(spec, 2, packed([4]))]
    with pytest.raises(NotFinite) as caught:
        sample_rows(logits, rows)
    assert caught.value.rows == (1,)


def test_a_row_with_a_nan_is_refused_also_where_its_mask_does_not_look() -> None:
    logits = logits_of(1)
    logits[0, 9] = torch.nan
    with pytest.raises(NotFinite):
        sample_rows(logits, rows_of(GREEDY, 1, packed([4])))
