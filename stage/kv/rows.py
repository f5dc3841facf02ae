"""The static KV rows of one stage.

Decides where each row lies: `[layers, 2, lanes, kv_heads, rows, head_dim]`, allocated once in the
constructor, so that addresses never move. Only layers that attend have rows; those whose keys or values
have other shapes get buffers of their own. May not know which rows are valid: the ledger does. Holds that
a view up to any multiple of BLOCK_ROWS within a lane is legal and starts out as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# scaled_dot_product_attention takes keys in blocks of 512: every view that ends on one gives the same.
BLOCK_ROWS = 512
# Two blocks, so that the numerics probe can cross from one into the next.
SCRATCH_ROWS = 2 * BLOCK_ROWS


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one token's KV entry looks like in one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


def whole_blocks(rows: int) -> int:
    """The smallest multiple of BLOCK_ROWS that is at least `rows`."""
    return -(-rows // BLOCK_ROWS) * BLOCK_ROWS


def rows_nbytes(
    shapes: Sequence[LayerShape], *, lanes: int, max_rows: int, dtype: torch.dtype
) -> int:
    """The bytes that KvRows of these sizes allocates, the scratch lane included."""
    rows = lanes * whole_blocks(max_rows) + SCRATCH_ROWS
    return rows * dtype.itemsize * sum(shape.width for shape in shapes)


class KvRows:
    """The KV rows of `lanes` lanes and of one smaller scratch lane, which warm-up and probes use.

    One thread writes and reads them. Lanes are 0 to lanes - 1; `scratch_lane` is the number after the last one."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        lanes: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.lanes = lanes
        self.max_rows = max_rows
        self.layers = len(shapes)
        self.scratch_lane = lanes
        self._written = [0] * (lanes + 1)
        self._user = _allocate(shapes, lanes, whole_blocks(max_rows), dtype, device)
        self._scratch = _allocate(shapes, 1, SCRATCH_ROWS, dtype, device)

    def limit(self, lane: int) -> int:
        """The number of rows that the lane takes."""
        return SCRATCH_ROWS if lane == self.scratch_lane else self.max_rows

    def write(self, layer: int, lane: int, start: int, key: Tensor, value: Tensor) -> None:
        """Store rows from `start` on; key and value are [kv_heads, width, dim].

        `layer` counts the layers of this stage that attend."""
        end = start + key.shape[1]
        keys, values = self._lane(layer, lane)
        keys[:, start:end].copy_(key)
        values[:, start:end].copy_(value)
        self._written[lane] = max(self._written[lane], end)

    def view(self, layer: int, lane: int, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the lane's first rows, [kv_heads, rows, dim] each, without copying."""
        keys, values = self._lane(layer, lane)
        return keys[:, :rows], values[:, :rows]

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of one lane into another one, on all layers."""
        for layer in range(self.layers):
            keys, values = self.view(layer, source, rows)
            self.write(layer, target, 0, keys, values)

    def clear(self, lane: int, start: int) -> None:
        """Zero what was ever written from row `start` on.

        Masked rows are still multiplied by zero: a NaN that one conversation left behind would reach the next one."""
        end = self._written[lane]
        for layer in range(self.layers):
            for rows in self._lane(layer, lane):
                rows[:, start:end].zero_()
        self._written[lane] = min(start, end)

    def _lane(self, layer: int, lane: int) -> tuple[Tensor, Tensor]:
        if lane == self.scratch_lane:
            keys, values = self._scratch[layer]
            return keys[0], values[0]
        keys, values = self._user[layer]
        return keys[lane], values[lane]


def _allocate(
    shapes: Sequence[LayerShape], lanes: int, rows: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Per layer, keys and values [lanes, kv_heads, rows, dim]; zeros, since void rows are read under a mask."""
    if not shapes:
        return []
    first = shapes[0]
    if first.key_dim == first.value_dim and all(shape == first for shape in shapes):
        size = (len(shapes), 2, lanes, first.kv_heads, rows, first.key_dim)
        whole = torch.zeros(size, dtype=dtype, device=device)
        return [(layer[0], layer[1]) for layer in whole.unbind(0)]
    return [
        (
            torch.zeros((lanes, shape.kv_heads, rows, shape.key_dim), dtype=dtype, device=device),
            torch.zeros((lanes, shape.kv_heads, rows, shape.value_dim), dtype=dtype, device=device),
        )
        for shape in shapes
    ]
