"""The numerics probe: does a row of this slice, on this device, depend on what shares its call?

Decides which plans are compared: one call against odd cuts, single rows, neighbours and a crossing of a
key block. May touch the scratch lane only, and leaves it empty. Reports what it saw; refusing to start on
it is the caller's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stage.attention import RowSegment
from stage.cores import Cores
from stage.kv.rows import BLOCK_ROWS
from stage.model.slice import ModelSlice, RowBatch

_SEED = 20
# One call of all rows is compared with these cuts of them. They hold every class that kernels were seen to
# tell apart: 1, 2, 3, below 12, a rest of 1 after a block of 32 query rows, and enough rows that several
# threads share an element-wise call unevenly.
_CUTS = ((97,), (1, 2, 3, 5, 7, 33, 46), (62, 35))
# The last rows of one key block and the first of the next one: what is read past a cut differs most here.
_CROSSING_START = BLOCK_ROWS - 8
_CROSSING_CUTS = ((16,), (7, 1, 1, 6, 1), (9, 7))
_NEIGHBOUR_START = BLOCK_ROWS + 100
_NEIGHBOUR_ROWS = 6


@dataclass(frozen=True, slots=True)
class NumericsReport:
    """What the probe found; `max_difference` is over rows' outputs, KV entries and states alike."""

    exact: bool
    max_difference: float

    def __str__(self) -> str:
        if self.exact:
            return "exact (bit-identical)"
        return f"shape-dependent (max difference {self.max_difference:.1e})"


# Told after each call of the model: a large one takes minutes on a CPU, or much longer where that is busy.
Step = Callable[[], None]


def _untold() -> None:
    """Nobody waits."""


def probe_numerics(model: ModelSlice, step: Step = _untold) -> NumericsReport:
    """Compare plans on random rows in the scratch lane; takes about the time of 400 rows."""
    if model.decoder.length_dependent_rope:
        return NumericsReport(exact=False, max_difference=math.inf)
    try:
        differences = [
            _compare(model, 0, _CUTS, step),
            _compare(model, _CROSSING_START, _CROSSING_CUTS, step),
            _compare_with_neighbour(model, step),
        ]
    finally:
        _empty_scratch(model)
    finite = all(map(math.isfinite, differences))
    worst = max(differences) if finite else math.inf
    return NumericsReport(exact=worst == 0.0, max_difference=worst)


def probe_cores(model: ModelSlice, cores: Cores, step: Step = _untold) -> bool:
    """Whether a row is the same computed by all lent cores and by the stage's own; takes the time of 230 rows."""
    if cores.alone == cores.shared:
        return True
    try:
        return all(
            _compare_cores(model, cores, start, plans, step)
            for start, plans in ((0, _CUTS[:2]), (_CROSSING_START, _CROSSING_CUTS[:2]))
        )
    finally:
        cores.use()
        _empty_scratch(model)


def _empty_scratch(model: ModelSlice) -> None:
    model.rows.clear(model.rows.scratch_lane, 0)
    model.states.clear(model.states.scratch_lane)


def _compare_cores(
    model: ModelSlice, cores: Cores, start: int, plans: Sequence[Sequence[int]], step: Step
) -> bool:
    inputs = _random_inputs(model, sum(plans[0]))
    cores.use()
    own = _run_cuts(model, inputs, start, plans[0], step)
    cores.use(alone=True)
    outcomes = (_run_cuts(model, inputs, start, cuts, step) for cuts in plans)
    return all(own.difference(outcome) == 0.0 for outcome in outcomes)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Random rows that every plan cuts differently."""

    token_ids: tuple[int, ...]
    hidden: Tensor | None  # [rows, hidden]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a plan left: the rows' outputs, and their KV entries and recurrent states on all layers."""

    outputs: Tensor
    entries: tuple[Tensor, ...]

    def difference(self, other: _Outcome) -> float:
        pairs = [(self.outputs, other.outputs), *zip(self.entries, other.entries, strict=True)]
        worst = [(mine.float() - its.float()).abs().max() for mine, its in pairs if mine.numel()]
        return torch.stack(worst).max().item()  # unlike max(), this keeps a NaN


def _compare(model: ModelSlice, start: int, plans: Sequence[Sequence[int]], step: Step) -> float:
    inputs = _random_inputs(model, sum(plans[0]))
    first, *others = [_run_cuts(model, inputs, start, cuts, step) for cuts in plans]
    return torch.tensor([first.difference(other) for other in others]).max().item()


def _compare_with_neighbour(model: ModelSlice, step: Step) -> float:
    """The same rows, alone and behind other rows of their call."""
    width = 37
    inputs, other = _random_inputs(model, width), _random_inputs(model, _NEIGHBOUR_ROWS)
    alone = _run_cuts(model, inputs, 0, (width,), step)
    model.states.pretend(model.states.scratch_lane, _NEIGHBOUR_START)
    # Its rows end up far from those compared, so that the scratch lane serves as two.
    segments = (
        RowSegment(model.rows.scratch_lane, _NEIGHBOUR_START, _NEIGHBOUR_ROWS),
        RowSegment(model.rows.scratch_lane, 0, width),
    )
    hidden = (
        None
        if inputs.hidden is None or other.hidden is None
        else torch.cat((other.hidden, inputs.hidden))
    )
    outputs = _call(model, other.token_ids + inputs.token_ids, hidden, segments)[_NEIGHBOUR_ROWS:]
    step()
    return alone.difference(_Outcome(outputs, _entries(model, 0, width)))


def _random_inputs(model: ModelSlice, n_rows: int) -> _Inputs:
    random = torch.Generator().manual_seed(_SEED + n_rows)
    token_ids = torch.randint(model.decoder.vocab_size, (n_rows,), generator=random).tolist()
    if model.decoder.is_head:
        return _Inputs(tuple(token_ids), None)
    hidden = torch.randn((n_rows, model.decoder.hidden_size), generator=random)
    return _Inputs(tuple(token_ids), hidden.to(model.decoder.device, model.decoder.dtype))


def _run_cuts(
    model: ModelSlice, inputs: _Inputs, start: int, cuts: Sequence[int], step: Step
) -> _Outcome:
    outputs, done = [], 0
    model.states.pretend(model.states.scratch_lane, start)
    for width in cuts:
        segment = RowSegment(model.rows.scratch_lane, start + done, width)
        hidden = None if inputs.hidden is None else inputs.hidden[done : done + width]
        outputs.append(_call(model, inputs.token_ids[done : done + width], hidden, (segment,)))
        done += width
        step()
    return _Outcome(torch.cat(outputs), _entries(model, start, done))


def _call(
    model: ModelSlice,
    token_ids: tuple[int, ...],
    hidden: Tensor | None,
    segments: tuple[RowSegment, ...],
) -> Tensor:
    batch = RowBatch(token_ids, segments, asked=tuple(range(len(token_ids))))
    output = model.forward(batch, hidden)
    rows = output.hidden if output.logits is None else output.logits
    assert rows is not None
    return rows


def _entries(model: ModelSlice, start: int, width: int) -> tuple[Tensor, ...]:
    """Copies of the scratch lane's rows from `start` on, and of its recurrent state behind them."""
    rows = model.rows
    views = [rows.view(layer, rows.scratch_lane, start + width) for layer in range(rows.layers)]
    entries = tuple(tensor[:, start:].clone() for pair in views for tensor in pair)
    state = model.states.save(rows.scratch_lane, start + width)
    return entries + tuple(tensor.to(model.decoder.device) for tensor in state.tensors)
