"""Decides, for each asked row, which token follows: logits, history, spec and position in, token id out.

A pure function. It may not keep state, read a clock or let one row of a call touch another: the same
row gives the same token alone or packed, on every retry, with any number of stages.

Order: penalties (repetition, then frequency and presence), logit bias, mask, temperature, top-k, top-p, min-p.
The last four stand as in transformers' generate(); the bias comes after the penalties, so that a bias is
what a client sees added. Ties at a truncation's edge are all kept: which of equals goes would be a sort's whim.

Noise is counter-based: Philox-4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
with the seed as its key and the position in its counter, so position p needs no earlier draw. Raw words are
used, because numpy fixes those for ever but not its distributions. Adding Gumbel noise to logits/T and taking
the argmax samples the softmax; the same argmax is taken here as weight / Exponential, one logarithm cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from coordinator.errors import BrokenInvariant, InvalidValue
from coordinator.requests import RowLogprobs, SamplingSpec

if TYPE_CHECKING:
    from torch import Tensor

History = Sequence[int] | np.ndarray  # [rows] of int64: taken as it is, not copied

# Philox's second key word: keeps these draws apart from any other use of the same seed.
_NOISE_DOMAIN = 0x72696E6773616D70
_MANTISSA = (1 << 53) - 1

# top_p looks at this many of the likeliest tokens before it looks at more: a sort of 150,000 takes 13 ms.
_FIRST_GUESS = 1024


@dataclass(frozen=True, slots=True)
class AskedRow:
    """What one row's token depends on besides its logits."""

    position: int  # of the token: the number of tokens before it
    sampling: SamplingSpec
    # Token ids from row 0 on, all below the vocabulary's size; those from `position` on are not looked at. Only a
    # spec that reads_history needs any.
    history: History = ()
    prompt_tokens: int = 0  # history from here on was generated
    mask: bytes = b""  # which tokens may be sampled, as in coordinator.constraints.Constraint

    def __post_init__(self) -> None:
        if reads_history(self.sampling) and len(self.history) < self.position:
            raise BrokenInvariant(f"a history of {len(self.history)} at position {self.position}")


@dataclass(frozen=True, slots=True)
class SampledRow:
    token: int
    logprobs: RowLogprobs | None = None


class NotFinite(BrokenInvariant):
    """A row's logits hold NaN or +inf, or nothing but -inf where its mask lets it look: no token would be right.

    `rows` are their indices in the call. Nothing was decided; the caller may ask again without them.
    """

    def __init__(self, rows: tuple[int, ...], story: Sequence[str]) -> None:
        super().__init__("the model's logits are not finite; no token can be sampled", story)
        self.rows = rows


def reads_history(spec: SamplingSpec) -> bool:
    """Whether the tokens before it change what a row's token is."""
    counts = spec.presence_penalty != 0.0 or spec.frequency_penalty != 0.0
    return counts or spec.repetition_penalty != 1.0


def check_spec(spec: SamplingSpec, vocab_size: int) -> None:
    """Raises InvalidValue for what only the vocabulary's size can tell: for the frame's door."""
    tokens = [token for token, _ in spec.logit_bias]
    if not tokens:
        return
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocab_size:
            raise InvalidValue(
                "logit_bias", f"token id {token} is outside the vocabulary of {vocab_size}"
            )


def sample_rows(logits: Tensor, asked: Sequence[AskedRow]) -> list[SampledRow]:
    """One token a row, in order; logits are [asked, vocab]. Raises NotFinite, and InvalidValue as check_spec."""
    if not asked:
        return []
    highest, likeliest = logits.max(dim=-1)  # [asked]; the first of equals, NaN if there is one
    allowed = _Allowed.of(asked, logits.shape[1])
    if allowed is not None:
        allowed.look(logits, highest, likeliest)
    _refuse_not_finite(highest, asked)
    greedy = likeliest.tolist()
    # The rows of a segment share one spec, and a bias may name the whole vocabulary.
    specs = {id(row.sampling): row.sampling for row in asked}
    biases = {key: _Bias.of(spec, logits.shape[1]) for key, spec in specs.items()}
    return [
        SampledRow(greedy[i])
        if _is_plain_argmax(row.sampling)
        else _sample(logits[i], row, biases[id(row.sampling)], allowed and allowed.at(i))
        for i, row in enumerate(asked)
    ]


@dataclass(frozen=True, slots=True)
class _Bias:
    """A spec's logit_bias as arrays: [entries] each, in the order in which they are added."""

    tokens: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, spec: SamplingSpec, vocab_size: int) -> _Bias | None:
        if not spec.logit_bias:
            return None
        check_spec(spec, vocab_size)
        count = len(spec.logit_bias)
        tokens = np.fromiter((token for token, _ in spec.logit_bias), np.int64, count)
        values = np.fromiter((value for _, value in spec.logit_bias), np.float64, count)
        return cls(tokens, values)

    def add_to(self, logits: Tensor) -> None:
        # Unlike `+=` with an index, this adds every entry of a token that is named twice.
        np.add.at(logits.numpy(), self.tokens, self.values)


@dataclass(frozen=True, slots=True)
class _Allowed:
    """What the masked rows of a call may sample: [masked rows, vocab] of bool, and which rows those are."""

    rows: tuple[int, ...]
    tokens: Tensor

    @classmethod
    def of(cls, asked: Sequence[AskedRow], vocab_size: int) -> _Allowed | None:
        rows = tuple(i for i, row in enumerate(asked) if row.mask)
        if not rows:
            return None
        packed = np.zeros((len(rows), -(-vocab_size // 8)), dtype=np.uint8)
        for line, i in zip(packed, rows, strict=True):
            mask = np.frombuffer(asked[i].mask, dtype=np.uint8)[: len(line)]
            line[: len(mask)] = mask
        bits = np.unpackbits(packed, axis=1, count=vocab_size, bitorder="little")
        return cls(rows, torch.from_numpy(bits.view(np.bool_)))

    def at(self, row: int) -> Tensor | None:
        return self.tokens[self.rows.index(row)] if row in self.rows else None

    def look(self, logits: Tensor, highest: Tensor, likeliest: Tensor) -> None:
        """Puts in the highest logits that the masked rows may look at. What is not finite stays so."""
        said = likeliest.tolist()
        # A model that follows its grammar needs no second look.
        wrong = [n for n, i in enumerate(self.rows) if not self.tokens[n, said[i]]]
        if not wrong:
            return
        rows = torch.tensor([self.rows[n] for n in wrong], device=logits.device)
        hidden = ~self.tokens[wrong].to(logits.device)
        top = logits[rows].masked_fill_(hidden, -torch.inf).max(dim=-1)
        finite = torch.isfinite(highest[rows])
        highest[rows] = torch.where(finite, top.values, highest[rows])
        likeliest[rows] = top.indices


def _refuse_not_finite(highest: Tensor, asked: Sequence[AskedRow]) -> None:
    finite = torch.isfinite(highest).tolist()
    bad = tuple(i for i, ok in enumerate(finite) if not ok)
    if bad:
        raise NotFinite(bad, [f"row {i} of the call, position {asked[i].position}" for i in bad])


def _is_plain_argmax(spec: SamplingSpec) -> bool:
    return spec.temperature == 0.0 and spec.logprobs is None and not _changes_logits(spec)


def _changes_logits(spec: SamplingSpec) -> bool:
    return bool(spec.logit_bias) or reads_history(spec)


def _sample(
    raw_row: Tensor, row: AskedRow, bias: _Bias | None, allowed: Tensor | None
) -> SampledRow:
    raw = raw_row.detach().to("cpu", torch.float64)  # [vocab]
    logits = _adjusted(raw, row, bias)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    token = _pick(logits, row.sampling, position=row.position)
    return SampledRow(token, _logprobs(raw, token, row.sampling.logprobs))


def _adjusted(raw: Tensor, row: AskedRow, bias: _Bias | None) -> Tensor:
    """The logits after penalties and bias; `raw` itself when there are none."""
    spec = row.sampling
    if not _changes_logits(spec):
        return raw
    logits = raw.clone()
    if spec.repetition_penalty != 1.0:
        _penalize_repetition(logits, _ids(row.history[: row.position]), spec.repetition_penalty)
    if spec.presence_penalty != 0.0 or spec.frequency_penalty != 0.0:
        _penalize_counts(logits, _ids(row.history[row.prompt_tokens : row.position]), spec)
    if bias is not None:
        bias.add_to(logits)
    return logits


def _ids(tokens: History) -> Tensor:
    return torch.from_numpy(np.asarray(tokens, dtype=np.int64))


def _penalize_repetition(logits: Tensor, tokens: Tensor, penalty: float) -> None:
    # Gathered before anything is written: a token that stands twice in the history is penalized once.
    seen = logits[tokens]
    logits[tokens] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _penalize_counts(logits: Tensor, generated: Tensor, spec: SamplingSpec) -> None:
    counts = torch.bincount(generated, minlength=logits.shape[0])
    logits -= spec.frequency_penalty * counts + spec.presence_penalty * (counts > 0)


def _pick(logits: Tensor, spec: SamplingSpec, *, position: int) -> int:
    if spec.temperature == 0.0:
        return int(logits.argmax())
    weights = torch.exp((logits - logits.max()) / spec.temperature)  # [vocab], the likeliest is 1
    keep = _keep_from(weights, spec)
    if keep > 0.0:
        weights = torch.where(weights >= keep, weights, 0.0)
    return int((weights / _exponential(spec.seed, position, weights.shape[0])).argmax())


def _keep_from(weights: Tensor, spec: SamplingSpec) -> float:
    """The least weight that survives top-k, top-p and min-p; 0 when all do."""
    keep = 0.0
    if 0 < spec.top_k < weights.shape[0]:
        keep = float(weights.topk(spec.top_k).values[-1])
    if spec.top_p < 1.0:
        keep = max(keep, _nucleus_from(weights, keep, spec.top_p))
    return max(keep, spec.min_p)  # the likeliest weighs 1


def _nucleus_from(weights: Tensor, keep: float, top_p: float) -> float:
    """The weight of the token with which the likeliest ones, counted from the top, reach top_p of the total.

    The total is of what top-k left, as if its probabilities had been made to sum to 1 again.
    """
    total = float(torch.where(weights >= keep, weights, 0.0).sum())
    # Tokens lighter than this hold less than 1 - top_p together, even if all of them were: never reached.
    floor = max(keep, (1.0 - top_p) * total / weights.shape[0])
    candidates = weights[weights >= floor]
    size = _FIRST_GUESS
    while True:
        top = candidates.topk(min(size, candidates.shape[0])).values
        reached = int(torch.searchsorted(top.cumsum(0), top_p * total))
        if reached < top.shape[0]:
            return float(top[reached])
        if top.shape[0] == candidates.shape[0]:
            return floor  # rounding: even all together do not quite reach it
        size *= 16


def _exponential(seed: int, position: int, size: int) -> Tensor:
    """Exp(1) draws, one a token id: minus the logarithm of a Gumbel's exponential."""
    key = np.array([seed, _NOISE_DOMAIN], dtype=np.uint64)
    counter = np.array([0, position, 0, 0], dtype=np.uint64)
    words = np.random.Philox(counter=counter, key=key).random_raw(size)
    uniform = torch.from_numpy(words.view(np.int64)).bitwise_and_(_MANTISSA).double()
    return uniform.add_(0.5).mul_(2.0**-53).log_().neg_()


def _logprobs(raw: Tensor, token: int, alternatives: int | None) -> RowLogprobs | None:
    if alternatives is None:
        return None
    total = raw.logsumexp(0)
    if alternatives == 0:
        return RowLogprobs(float(raw[token] - total))
    values, ids = raw.topk(min(alternatives, raw.shape[0]))
    pairs = zip(ids.tolist(), (values - total).tolist(), strict=True)
    top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
    return RowLogprobs(float(raw[token] - total), tuple(top))
