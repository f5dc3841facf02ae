"""Sampling is a function: of logits, history, spec and position, and of nothing else."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.errors import BrokenInvariant, InvalidValue
from coordinator.requests import GREEDY, SamplingSpec
from stage.sampling import AskedRow, NotFinite, check_spec, sample_rows

VOCAB = 12
DRAWS = 2500
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, 1.5, -2.0, -3.0, -5.0])


def _row(spec: SamplingSpec, history: tuple[int, ...] = (0,), prompt_tokens: int = 1) -> AskedRow:
    return AskedRow(len(history), spec, history, prompt_tokens)


def _at(position: int, spec: SamplingSpec) -> AskedRow:
    return AskedRow(position, spec, range(position), position)


def _token(logits: torch.Tensor, row: AskedRow) -> int:
    return sample_rows(logits.unsqueeze(0), [row])[0].token


def _softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def _reference(logits: list[float], spec: SamplingSpec) -> list[float]:
    """The exact distribution, by sorting and counting, for logits whose edges are not tied."""
    probs = _softmax([x / spec.temperature for x in logits])
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    if spec.top_k:
        order = order[: spec.top_k]
    total = sum(probs[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass >= spec.top_p:
            break
        kept.append(i)
        mass += probs[i] / total
    kept = [i for i in kept if probs[i] >= spec.min_p * probs[order[0]]]
    total = sum(probs[i] for i in kept)
    return [probs[i] / total if i in kept else 0.0 for i in range(len(probs))]


def _histogram(tokens: list[int]) -> np.ndarray:
    return np.bincount(tokens, minlength=VOCAB) / len(tokens)


def _drawn(spec: SamplingSpec, first: int = 1, logits: torch.Tensor = LOGITS) -> list[int]:
    rows = [_at(position, spec) for position in range(first, first + DRAWS)]
    return [sampled.token for sampled in sample_rows(logits.expand(DRAWS, -1), rows)]


def _variation(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.abs(p - q).sum() / 2)


def _noise_floor(exact: list[float]) -> float:
    """The largest distance that 20 plain draws of the same size have from the exact distribution."""
    rng = np.random.default_rng(7)
    plain = rng.multinomial(DRAWS, np.asarray(exact) / sum(exact), size=20) / DRAWS
    return max(_variation(counts, np.asarray(exact)) for counts in plain)


UNTIED = LOGITS + torch.arange(VOCAB) * 0.01
SPECS = {
    "plain": SamplingSpec(seed=1),
    "cold": SamplingSpec(temperature=0.5, seed=2),
    "hot": SamplingSpec(temperature=1.5, seed=3),
    "top_k": SamplingSpec(top_k=4, seed=4),
    "top_p": SamplingSpec(top_p=0.8, seed=5),
    "min_p": SamplingSpec(min_p=0.2, seed=6),
    "all": SamplingSpec(temperature=1.5, top_k=8, top_p=0.9, min_p=0.1, seed=7),
}


@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_distributed_as_the_exact_softmax_of_the_spec(name: str) -> None:
    exact = _reference(UNTIED.tolist(), SPECS[name])
    drawn = _histogram(_drawn(SPECS[name], logits=UNTIED))
    assert _variation(drawn, np.asarray(exact)) <= 1.5 * _noise_floor(exact)
    assert all(drawn[i] == 0.0 for i in range(VOCAB) if exact[i] == 0.0)


def test_the_distribution_check_notices_a_temperature_that_is_a_little_wrong() -> None:
    exact = _reference(UNTIED.tolist(), replace(SPECS["plain"], temperature=1.25))
    drawn = _histogram(_drawn(SPECS["plain"], logits=UNTIED))
    assert _variation(drawn, np.asarray(exact)) > 1.5 * _noise_floor(exact)


def test_a_row_gives_the_same_token_alone_and_beside_any_other_rows() -> None:
    rng = random.Random(3)
    specs = [
        *SPECS.values(),
        GREEDY,
        SamplingSpec(seed=9, logprobs=2),
        SamplingSpec(presence_penalty=1),
    ]
    rows = [_at(rng.randrange(1, 10), rng.choice(specs)) for _ in range(40)]
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(3))
    alone = [sample_rows(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    order = rng.sample(range(40), 40)
    packed = sample_rows(logits[order], [rows[i] for i in order])
    assert packed == [alone[i] for i in order]


def test_the_same_seed_and_position_give_the_same_token_whatever_the_history_says() -> None:
    spec = SamplingSpec(seed=11)
    tokens = {_token(LOGITS, _row(spec, history)) for history in ((1, 2, 3), (4, 5, 6), (7, 7, 7))}
    assert len(tokens) == 1


def _dependence(first: list[int], second: list[int]) -> float:
    """Pearson's chi-square over the degrees of freedom: near 1 when two draws know nothing of each other."""
    table = np.zeros((3, 3))
    for a, b in zip(first, second, strict=True):
        table[min(a, 2), min(b, 2)] += 1
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    return float(((table - expected) ** 2 / expected).sum() / 4)


def test_neighbouring_positions_and_seeds_draw_independently() -> None:
    here = _drawn(SamplingSpec(seed=1))
    assert _dependence(here[:-1], here[1:]) < 4.0  # chi-square, 4 degrees: 16 is passed once in 300
    assert _dependence(here, _drawn(SamplingSpec(seed=2))) < 4.0
    assert _dependence(here, _drawn(SamplingSpec(seed=1))) > 100.0


def test_noise_is_pinned_so_that_no_release_changes_an_old_seeds_tokens() -> None:
    spec = SamplingSpec(seed=42)
    tokens = [str(_token(LOGITS, _at(position, spec))) for position in range(1, 13)]
    assert " ".join(tokens) == "8 0 8 6 8 8 1 8 8 1 8 0"


def test_temperature_zero_takes_the_lowest_id_of_equals_whatever_truncation_says() -> None:
    logits = torch.tensor([0.0, 3.0, 3.0, 1.0])
    assert _token(logits, _row(GREEDY)) == 1
    assert _token(logits, _row(replace(GREEDY, top_k=1, top_p=0.1, min_p=1.0, seed=5))) == 1
    assert _token(logits, _row(replace(GREEDY, logprobs=0))) == 1


def test_a_tiny_temperature_is_argmax_and_never_divides_into_nothing() -> None:
    for temperature in (1e-300, 1e-9, 1e-3):
        assert _token(UNTIED, _row(SamplingSpec(temperature=temperature, seed=1))) == 0


def test_equals_at_the_edge_of_top_k_and_top_p_are_all_kept() -> None:
    logits = torch.tensor([5.0, 1.0, 1.0, 1.0, -9.0])
    rows = [_at(p, SamplingSpec(temperature=4.0, top_k=2)) for p in range(1, 300)]
    assert {s.token for s in sample_rows(logits.expand(299, -1), rows)} == {0, 1, 2, 3}
    rows = [_at(p, SamplingSpec(temperature=4.0, top_p=0.5)) for p in range(1, 300)]
    assert {s.token for s in sample_rows(logits.expand(299, -1), rows)} == {0, 1, 2, 3}


@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_top_p_of_a_large_flat_vocabulary_keeps_what_a_full_sort_keeps(spread: float) -> None:
    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(1)).double() * spread
    sampled = {_token(logits, _at(p, SamplingSpec(top_p=0.5, seed=p))) for p in range(1, 40)}
    probs = torch.softmax(logits, 0)
    ordered, ids = probs.sort(descending=True, stable=True)
    kept = set(ids[: int(torch.searchsorted(ordered.cumsum(0), 0.5)) + 1].tolist())
    assert sampled <= kept
    assert len(sampled) > 1


penalties = st.floats(-2, 2, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(
    history=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    prompt=st.integers(0, 12),
    repetition=st.floats(0.5, 2.0),
    presence=penalties,
    frequency=penalties,
    bias=st.lists(st.tuples(st.integers(0, VOCAB - 1), st.floats(-5, 5)), max_size=3),
)
def test_penalties_and_bias_give_what_a_naive_loop_gives(
    history: list[int],
    prompt: int,
    repetition: float,
    presence: float,
    frequency: float,
    bias: list[tuple[int, float]],
) -> None:
    prompt = min(prompt, len(history))
    expected = LOGITS.double().tolist()
    for token in set(history):
        value = expected[token]
        expected[token] = value / repetition if value > 0 else value * repetition
    for token in set(history[prompt:]):
        expected[token] -= frequency * history[prompt:].count(token) + presence
    for token, value in bias:
        expected[token] += value
    spec = SamplingSpec(
        temperature=0.0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple(bias),
    )
    token = _token(LOGITS, _row(spec, tuple(history), prompt))
    assert expected[token] == pytest.approx(max(expected), abs=1e-9)


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    spec = SamplingSpec(temperature=0.0, presence_penalty=1.0)
    assert _token(LOGITS, _row(spec, (0, 0), prompt_tokens=2)) == 0
    assert _token(LOGITS, _row(spec, (0, 0), prompt_tokens=1)) == 1


def test_a_history_longer_than_the_position_is_read_up_to_it_only() -> None:
    spec = SamplingSpec(temperature=0.0, presence_penalty=1.0, repetition_penalty=1.5)
    for end in range(1, 6):
        history = np.array([3, 0, 0, 1, 2, 0], dtype=np.int64)
        exact = _token(LOGITS, AskedRow(end, spec, history[:end], 1))
        assert _token(LOGITS, AskedRow(end, spec, history, 1)) == exact


def test_only_a_spec_with_penalties_needs_a_history() -> None:
    for spec in (GREEDY, SamplingSpec(logit_bias=((3, 1.0),), logprobs=2, top_k=3)):
        assert _token(LOGITS, AskedRow(7, spec)) == _token(LOGITS, _at(7, spec))
    with pytest.raises(BrokenInvariant, match="history of 0"):
        AskedRow(7, SamplingSpec(frequency_penalty=0.1))


def test_a_bias_is_read_once_for_all_rows_of_a_call() -> None:
    class Entries(tuple):  # counts how often a spec's bias is walked through
        walks = 0

        def __iter__(self):
            Entries.walks += 1
            return super().__iter__()

    spec = SamplingSpec(logit_bias=Entries((token, 0.5) for token in range(VOCAB)))
    Entries.walks = 0
    sample_rows(LOGITS.expand(1, -1), [_at(1, spec)])
    of_one_row, Entries.walks = Entries.walks, 0
    sample_rows(LOGITS.expand(50, -1), [_at(position, spec) for position in range(1, 51)])
    assert 0 < Entries.walks == of_one_row


def test_logprobs_are_of_the_raw_logits_before_penalties_temperature_and_truncation() -> None:
    spec = SamplingSpec(temperature=0.3, top_k=1, logit_bias=((5, 100.0),), logprobs=3)
    [sampled] = sample_rows(LOGITS.unsqueeze(0), [_row(spec)])
    exact = [math.log(p) for p in _softmax(LOGITS.double().tolist())]
    assert sampled.token == 5
    assert sampled.logprobs is not None
    assert sampled.logprobs.chosen == pytest.approx(exact[5])
    assert [token for token, _ in sampled.logprobs.top] == [0, 1, 8]
    assert [p for _, p in sampled.logprobs.top] == pytest.approx([exact[0], exact[1], exact[8]])


def test_logprobs_do_not_change_the_token() -> None:
    for name, spec in SPECS.items():
        rows = [
            _at(17, spec),
            _at(17, replace(spec, logprobs=0)),
            _at(17, replace(spec, logprobs=20)),
        ]
        tokens = {s.token for s in sample_rows(LOGITS.expand(3, -1), rows)}
        assert len(tokens) == 1, name


def test_a_bias_beyond_the_vocabulary_is_refused_and_never_wraps_around() -> None:
    for token in (-1, VOCAB):
        spec = SamplingSpec(logit_bias=((token, 1.0),))
        with pytest.raises(InvalidValue, match="outside the vocabulary"):
            check_spec(spec, VOCAB)
        with pytest.raises(InvalidValue, match="outside the vocabulary"):
            _token(LOGITS, _row(spec))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", [GREEDY, SamplingSpec()])
def test_logits_that_are_not_finite_are_an_error_that_names_the_row(
    poison: float, spec: SamplingSpec
) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1] = poison if poison < 0 else logits[1]
    logits[1, 4] = poison
    with pytest.raises(NotFinite, match="row 1 of the call, position 6") as caught:
        sample_rows(logits, [_at(5, spec), _at(6, spec), _at(7, spec)])
    assert caught.value.rows == (1,)
    assert isinstance(caught.value, BrokenInvariant)


def test_masked_tokens_are_never_sampled() -> None:
    logits = torch.full((VOCAB,), -math.inf)
    logits[3] = -2.0
    assert {_token(logits, _at(p, SamplingSpec(seed=p))) for p in range(1, 50)} == {3}
