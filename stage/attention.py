"""How a frame's rows attend to their lanes' KV rows, and how calls are padded to be row-invariant.

Decides the paddings, the masks and the kernel. Registers one attention and one experts implementation
with transformers, which then builds no mask and keeps no cache of its own. May not know the model:
layers arrive one by one, with the frame's attention passed through as a keyword. Keeps that an exact
row depends on its own inputs and on the rows before it only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coordinator.errors import BrokenInvariant, ModelUnusable
from stage.kv.rows import KvRows, LayerShape, whole_blocks

ATTENTION = "ringserve_rows"
EXPERTS = "ringserve_padded"

# A GEMM of 1 row, and of 2 or 3, rounds differently from all larger ones (MKL, fp32, AVX2 and AVX-512).
# With several threads MKL hands out rows one by one below 12, and element-wise kernels end on a scalar
# loop: multiples of 4 agree in all of these.
ROW_QUANTUM = 4
# scaled_dot_product_attention takes query rows in blocks of 32, 64 or 256; the last block is a GEMM of the rest.
QUERY_BLOCK = 32


class Numerics(StrEnum):
    """Whether calls are padded so that a row's result does not depend on what shares its call."""

    EXACT = "exact"
    FAST = "fast"


@dataclass(frozen=True, slots=True)
class RowSegment:
    """Consecutive rows of one lane within a batch."""

    lane: int
    start: int
    width: int

    @property
    def end(self) -> int:
        return self.start + self.width


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """What a layer asks of its attention beyond causality."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class FrameAttention(Protocol):
    """What a layer's attention is handed to, once per layer and call."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules
    ) -> Tensor:
        """Take [heads, rows, dim] of the call's rows and return [rows, heads, value_dim]."""


def padded_rows(rows: int) -> int:
    """The number of rows that a GEMM or an attention call gets, so that none of them depends on their number."""
    return -(-rows // ROW_QUANTUM) * ROW_QUANTUM


class _Span:
    """One segment's part of a call: where its rows lie in the call and how far its keys reach."""

    def __init__(self, segment: RowSegment, offset: int, numerics: Numerics) -> None:
        self.segment = segment
        self.rows = slice(offset, offset + segment.width)
        self.numerics = numerics
        exact = numerics is Numerics.EXACT
        self.n_keys = whole_blocks(segment.end) if exact else segment.end
        self._masks: dict[tuple[int | None, int], Tensor | None] = {}

    def padded(self, queries: int) -> int:
        return padded_rows(queries) if self.numerics is Numerics.EXACT else queries

    def mask(self, window: int | None, repeats: int, like: Tensor) -> Tensor | None:
        """[queries, keys], 0 where a query may look and -inf elsewhere, the segment's rows `repeats` times over.

        Built once per frame and kind of layer."""
        key = (window, repeats)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, repeats, like)
        return self._masks[key]

    def _build_mask(self, window: int | None, repeats: int, like: Tensor) -> Tensor | None:
        segment = self.segment
        sees_all = (
            segment.width == 1
            and self.n_keys == segment.end
            and (window is None or window >= segment.end)
        )
        if sees_all:
            return None
        positions = torch.arange(segment.start, segment.end, device=like.device).repeat(repeats)
        positions = F.pad(
            positions, (0, self.padded(len(positions)) - len(positions)), value=segment.start
        )[:, None]
        keys = torch.arange(self.n_keys, device=like.device)[None, :]
        hidden = (
            keys > positions
            if window is None
            else (keys > positions) | (keys <= positions - window)
        )
        return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(
            hidden, float("-inf")
        )


class RowAttention:
    """One frame's attention over static rows: writes each segment's rows, reads all rows up to them."""

    def __init__(
        self,
        segments: Sequence[RowSegment],
        rows: KvRows,
        layers: Sequence[int],
        numerics: Numerics,
    ) -> None:
        """`layers`: the numbers of the model's layers that attend, in the order of their rows."""
        self._rows = rows
        self._ordinals = {layer: ordinal for ordinal, layer in enumerate(layers)}
        self._spans: list[_Span] = []
        self.layers_seen = 0
        for segment in segments:
            offset = self._spans[-1].rows.stop if self._spans else 0
            self._spans.append(_Span(segment, offset, numerics))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules
    ) -> Tensor:
        self.layers_seen += 1
        layer = self._ordinals[layer]
        used, n_rows = self._spans[-1].rows.stop, query.shape[1]
        if len(self._spans) == 1 and used == n_rows:
            return self._attend_span(self._spans[0], layer, query, key, value, rules)
        out = query.new_empty((n_rows, query.shape[0], value.shape[2]))  # [rows, heads, value_dim]
        for span in self._spans:
            out[span.rows] = self._attend_span(span, layer, query, key, value, rules)
        # Padding rows repeat the last row in all they do, so that they cost a mixture no experts of their own.
        out[used:] = out[used - 1]
        return out

    def _attend_span(
        self,
        span: _Span,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rules: AttentionRules,
    ) -> Tensor:
        segment = span.segment
        self._rows.write(layer, segment.lane, segment.start, key[:, span.rows], value[:, span.rows])
        keys, values = self._rows.view(layer, segment.lane, span.n_keys)
        return _kernel(keys, values, rules)(query[:, span.rows], keys, values, span, rules)


class ShapeSurvey:
    """Learns from one call what each layer's KV entry looks like; attends to nothing."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules
    ) -> Tensor:
        if layer in self.shapes:
            raise ModelUnusable(f"layer {layer} attends twice; such models are not supported")
        self.shapes[layer] = LayerShape(key.shape[0], key.shape[2], value.shape[2])
        return query.new_zeros((query.shape[1], query.shape[0], value.shape[2]))


def _kernel(keys: Tensor, values: Tensor, rules: AttentionRules) -> Callable[..., Tensor]:
    # With keys and values of unequal width torch takes a slow path of its own.
    simple = rules.softcap is None and rules.sinks is None and keys.shape[2] == values.shape[2]
    return _fused if simple else _plain


def _fused(
    query: Tensor, keys: Tensor, values: Tensor, span: _Span, rules: AttentionRules
) -> Tensor:
    """scaled_dot_product_attention of [heads, width, dim] over [kv_heads, keys, dim], giving [width, heads, dim]."""
    kv_heads, groups, width = keys.shape[0], query.shape[0] // keys.shape[0], query.shape[1]
    repeats = groups if groups * width <= QUERY_BLOCK else 1
    if repeats > 1:
        # Few rows: the query heads of one KV head become rows of one call, which reads each key once for all of them.
        query = query.reshape(1, kv_heads, groups * width, -1)
        keys, values = keys[None], values[None]
    else:
        # KV heads become the batch and their query heads share them by a stride of 0: nothing is copied.
        query = query.unflatten(0, (kv_heads, groups))
        keys, values = (
            keys[:, None].expand(-1, groups, -1, -1),
            values[:, None].expand(-1, groups, -1, -1),
        )
    mask = span.mask(rules.window, repeats, query)
    out = F.scaled_dot_product_attention(
        _pad_queries(query, span),
        keys,
        values,
        attn_mask=None if mask is None else mask[None, None],
        scale=rules.scaling,
    )[:, :, : repeats * width]
    return out.reshape(kv_heads, groups, width, -1).permute(2, 0, 1, 3).flatten(1, 2)


def _plain(
    query: Tensor, keys: Tensor, values: Tensor, span: _Span, rules: AttentionRules
) -> Tensor:
    """As _fused, for what that does not know: soft-capping and sinks. Follows transformers' eager attention."""
    kv_heads, groups, width = keys.shape[0], query.shape[0] // keys.shape[0], query.shape[1]
    folded = _pad_queries(query.reshape(kv_heads, groups * width, -1), span)
    scores = torch.bmm(folded, keys.transpose(1, 2)) * rules.scaling  # [kv_heads, queries, keys]
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    mask = span.mask(rules.window, groups, query)
    if mask is not None:
        scores = scores + mask
    weights = _softmax(scores, rules.sinks, width).to(values.dtype)
    out = torch.bmm(weights, values)[:, : groups * width]
    return out.reshape(kv_heads, groups, width, -1).permute(2, 0, 1, 3).flatten(1, 2)


def _pad_queries(query: Tensor, span: _Span) -> Tensor:
    missing = span.padded(query.shape[-2]) - query.shape[-2]
    return F.pad(query, (0, 0, 0, missing)) if missing else query


def _softmax(scores: Tensor, sinks: Tensor | None, width: int) -> Tensor:
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32)
    sink = sinks.view(scores.shape[0], -1, 1).repeat_interleave(
        width, dim=1
    )  # [kv_heads, groups * width, 1]
    sink = F.pad(sink, (0, 0, 0, scores.shape[1] - sink.shape[1]))
    return torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]


def attend_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    ring_frame: FrameAttention | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; query, key and value are [1, heads, rows, dim]."""
    if ring_frame is None:
        raise BrokenInvariant(f"{type(module).__name__} lost the frame on its way to attention")
    if position_bias is not None or not getattr(module, "is_causal", True):
        raise ModelUnusable(f"{type(module).__name__} is not plain causal attention")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    rules = AttentionRules(scaling, sliding_window, softcap, s_aux)
    return ring_frame.attend(module.layer_idx, query[0], key[0], value[0], rules)[None], None


def run_experts(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """A mixture's experts one by one, each call padded like any other GEMM; hidden is [rows, hidden]."""
    out = torch.zeros_like(hidden)
    for expert in top_k_index.unique().tolist():
        rows, slot = torch.where(top_k_index == expert)
        filled = F.pad(rows, (0, padded_rows(len(rows)) - len(rows)), value=0)
        result = _run_expert(module, expert, hidden[filled])[: len(rows)]
        out.index_add_(0, rows, (result * top_k_weights[rows, slot, None]).to(out.dtype))
    return out


def _run_expert(module: Any, expert: int, rows: Tensor) -> Tensor:
    name = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _project(module, name, expert, rows)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    result = _project(module, "down_proj", expert, inner)
    return module.post_expert_norm(result) if module.has_post_expert_norm else result


def _project(module: Any, name: str, expert: int, rows: Tensor) -> Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return F.linear(rows, weight.T if module.is_transposed else weight, bias)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend_rows)
ALL_EXPERTS_FUNCTIONS.register(EXPERTS, run_experts)
