"""One slice of a decoder, called frame by frame.

Decides how a batch of several lanes' rows becomes one call of transformers' own forward, and what comes
out: hidden rows, or the asked rows' logits on the tail. May not judge a frame (stage.py has refused what
is wrong) nor keep anything between calls but its KV rows and recurrent states. All rows go through the
linear layers as one call [1, rows]; attention and recurrences run per segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coordinator.errors import BrokenInvariant, ModelUnusable
from stage.attention import (
    ROW_QUANTUM,
    FrameAttention,
    Numerics,
    RowAttention,
    RowSegment,
    ShapeSurvey,
    padded_rows,
)
from stage.kv.rows import KvRows, LayerShape
from stage.kv.states import CPU_BLOCK, DEVICE_BLOCK, STATE_ROWS, LaneStates, StateShape
from stage.model.damage import unusable
from stage.model.load import Progress, SlicedDecoder, load_decoder
from stage.model.packed import can_pack, packed_rows
from stage.model.recurrent import FrameRecurrence, Recurrence, StateSurvey, wrap_recurrent


@dataclass(frozen=True, slots=True)
class RowBatch:
    """The rows of one frame: all segments' token ids in a row, and which rows need logits."""

    token_ids: tuple[int, ...]
    segments: tuple[RowSegment, ...]
    asked: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.token_ids or sum(segment.width for segment in self.segments) != len(
            self.token_ids
        ):
            raise ValueError("segments do not cover the batch's tokens")
        if any(not 0 <= row < len(self.token_ids) for row in self.asked):
            raise ValueError("a row outside the batch is asked")

    @property
    def positions(self) -> list[int]:
        return [row for segment in self.segments for row in range(segment.start, segment.end)]


@dataclass(frozen=True, slots=True)
class SliceOutput:
    """Hidden rows for the next stage, or on the tail the asked rows' logits in float32."""

    hidden: Tensor | None = None  # [rows, hidden]
    logits: Tensor | None = None  # [asked, vocab]


@dataclass(frozen=True, slots=True)
class LayerSurvey:
    """What each layer keeps, by its number in the model: KV rows, recurrent states, both or nothing."""

    attending: dict[int, LayerShape]
    recurrent: dict[int, StateShape]


class ModelSlice:
    """A loaded slice with its KV rows and recurrent states. One thread calls it."""

    def __init__(
        self,
        decoder: SlicedDecoder,
        rows: KvRows,
        states: LaneStates,
        layers: LayerSurvey,
        numerics: Numerics,
    ) -> None:
        self.decoder = decoder
        self.rows = rows
        self.states = states
        self.numerics = numerics
        self._attending = tuple(layers.attending)
        self._recurrent = tuple(layers.recurrent)
        self._has_packed = can_pack(decoder.dtype, decoder.device)

    @torch.inference_mode()
    def forward(self, batch: RowBatch, hidden: Tensor | None = None) -> SliceOutput:
        """Run the batch and write its rows; `hidden` [rows, hidden] is None on the first stage only."""
        self._check(batch, hidden)
        n_rows = self._padded(len(batch.token_ids))
        frame = RowAttention(batch.segments, self.rows, self._attending, self.numerics)
        recurrence = FrameRecurrence(batch.segments, self.states, self._recurrent)
        positions = self._tensor(_stretch(batch.positions, n_rows))[None]
        inputs = self._inputs(batch, hidden, n_rows)
        if self.decoder.is_tail and batch.asked:
            keep = self._tensor(self._asked(batch))
            logits = _run(
                self.decoder.causal_lm, inputs, positions, frame, recurrence, logits_to_keep=keep
            ).logits
            output = SliceOutput(logits=logits[0, : len(batch.asked)].float())
        else:
            last = _run(
                self.decoder.causal_lm.base_model, inputs, positions, frame, recurrence
            ).last_hidden_state
            output = self._unasked(last[0, : len(batch.token_ids)])
        self._check_seen(frame.layers_seen, recurrence.layers_seen)
        return output

    def _check_seen(self, attended: int, recurred: int) -> None:
        if (attended, recurred) != (len(self._attending), len(self._recurrent)):
            raise BrokenInvariant(f"{attended} layers attended and {recurred} recurred")

    def _check(self, batch: RowBatch, hidden: Tensor | None) -> None:
        if (hidden is None) is not self.decoder.is_head:
            raise BrokenInvariant("hidden rows go to every stage but the first")
        if hidden is not None and hidden.shape != (len(batch.token_ids), self.decoder.hidden_size):
            raise BrokenInvariant(f"hidden rows have shape {tuple(hidden.shape)}")
        for segment in batch.segments:
            if segment.end > self.rows.limit(segment.lane):
                raise BrokenInvariant(f"a segment ends at row {segment.end} of lane {segment.lane}")

    def _inputs(self, batch: RowBatch, hidden: Tensor | None, n_rows: int) -> dict[str, Tensor]:
        if hidden is None:
            return {"input_ids": self._tensor(_stretch(list(batch.token_ids), n_rows))[None]}
        hidden = hidden.to(self.decoder.device, self.decoder.dtype)
        if n_rows > len(hidden):
            hidden = torch.cat((hidden, hidden[-1:].expand(n_rows - len(hidden), -1)))
        return {"inputs_embeds": hidden[None]}

    def _asked(self, batch: RowBatch) -> list[int]:
        """The head is a GEMM too: its rows are padded like any others."""
        return _stretch(list(batch.asked), self._padded(len(batch.asked)))

    def _padded(self, n_rows: int) -> int:
        if self.numerics is Numerics.EXACT:
            # Packed products agree for any number of rows from 2 on, and are slower for 2 rows than for 4.
            is_packed = self.decoder.all_packed
            n_rows = max(n_rows, ROW_QUANTUM) if is_packed else padded_rows(n_rows)
        return packed_rows(n_rows) if self._has_packed else n_rows

    def _unasked(self, hidden: Tensor) -> SliceOutput:
        if not self.decoder.is_tail:
            return SliceOutput(hidden=hidden)
        return SliceOutput(
            logits=torch.empty((0, self.decoder.vocab_size), device=self.decoder.device)
        )

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.decoder.device)


def load_slice(
    folder: Path,
    first: int,
    last: int,
    *,
    lanes: int,
    max_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    numerics: Numerics = Numerics.EXACT,
    state_rows: int = STATE_ROWS,
    progress: Progress | None = None,
) -> ModelSlice:
    """Load layers [first, last) and allocate their KV rows and states. Raises ModelUnusable."""
    decoder = load_decoder(
        folder, first, last, dtype=dtype, device=device, numerics=numerics, progress=progress
    )
    block = CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK
    with unusable(
        f"{folder.name}: layers {first} to {last} cannot be called",
        passing=(torch.OutOfMemoryError,),
    ):
        wrap_recurrent(decoder.causal_lm.base_model.layers[first:last], block)
        layers = survey_layers(decoder)
    kv_shapes, state_shapes = tuple(layers.attending.values()), tuple(layers.recurrent.values())
    rows = KvRows(kv_shapes, lanes=lanes, max_rows=max_rows, dtype=dtype, device=device)
    states = LaneStates(
        state_shapes, lanes=lanes, block=block, dtype=dtype, device=device, state_rows=state_rows
    )
    return ModelSlice(decoder, rows, states, layers, numerics)


@torch.inference_mode()
def survey_layers(decoder: SlicedDecoder) -> LayerSurvey:
    """What each layer keeps: learnt from a small call, since configs say it in many ways.

    Raises ModelUnusable where the model does more around its layers than a slice accounts for."""
    base, name = decoder.causal_lm.base_model, type(decoder.causal_lm).__name__
    size = (1, ROW_QUANTUM, decoder.hidden_size)
    ones = torch.ones(size, dtype=decoder.dtype, device=decoder.device)
    arrived: list[Tensor] = []
    hook = base.layers[decoder.first].register_forward_pre_hook(
        lambda _, args: arrived.extend(args[:1])
    )
    layers, first = _survey(decoder, ones)
    hook.remove()
    if not decoder.is_head and not all(torch.equal(rows, ones) for rows in arrived):
        raise ModelUnusable(f"{name} changes its embeddings on their way to the first layer")
    # Attention and recurrences gave nothing, so that no row may have learnt of another one.
    other = ones.clone()
    other[:, 0, ::2] = -1.0
    if not _alike(first[:, 1:], _survey(decoder, other)[1][:, 1:]):
        raise ModelUnusable(f"{name} mixes rows outside of the attention that a slice knows")
    return layers


def _survey(decoder: SlicedDecoder, rows: Tensor) -> tuple[LayerSurvey, Tensor]:
    attention, states = ShapeSurvey(), StateSurvey()
    positions = torch.arange(rows.shape[1], device=decoder.device)[None]
    inputs = {"inputs_embeds": rows}
    out = _run(decoder.causal_lm.base_model, inputs, positions, attention, states)
    span = range(decoder.first, decoder.last)
    if not (attention.shapes.keys() | states.shapes.keys()) <= set(span):
        raise ModelUnusable("layers are not numbered as they are called")
    shapes, kept = attention.shapes, states.shapes
    layers = LayerSurvey(
        {layer: shapes[layer] for layer in span if layer in shapes},
        {layer: kept[layer] for layer in span if layer in kept},
    )
    return layers, out.last_hidden_state


def _alike(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left.float(), right.float(), rtol=0.02, atol=0.02, equal_nan=True)


def _run(
    module: torch.nn.Module,
    inputs: dict[str, Tensor],
    positions: Tensor,
    frame: FrameAttention,
    recurrence: Recurrence,
    **more: Tensor,
) -> Any:
    return module(
        **inputs,
        position_ids=positions,
        use_cache=False,
        cache=recurrence,
        ring_frame=frame,
        **more,
    )


def _stretch(values: list[int], length: int) -> list[int]:
    """Repeat the last value up to `length`."""
    return values + values[-1:] * (length - len(values))
