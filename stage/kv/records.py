"""Rows as they lie outside of their lane: one record a row, all layers' keys and values of it behind one another.

Decides where in a record each layer lies. Rows of a range are then one block of memory, whatever the layers' shapes:
a part of a range is a slice, two ranges are joined by copying bytes, and a device gets a range in one transfer. It
rounds nothing: what is scattered is what was gathered, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stage.kv.rows import KvRows


@dataclass(frozen=True, slots=True)
class _Field:
    """One layer's part of a record: elements [first, middle) are its key, [middle, last) its value."""

    heads: int
    first: int
    middle: int
    last: int


class RowRecords:
    """Records of one stage's rows. A stage without attention layers has records of no bytes."""

    def __init__(self, rows: KvRows, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._rows = rows
        self._fields = tuple(_fields(rows))
        self.width = self._fields[-1].last if self._fields else 0
        self.row_bytes = self.width * dtype.itemsize

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Of each layer: heads, and the elements of one head's key and value."""
        return tuple(
            (f.heads, (f.middle - f.first) // f.heads, (f.last - f.middle) // f.heads)
            for f in self._fields
        )

    def empty(self, rows: int, *, pinned: bool = False) -> Tensor:
        """Records of undefined content in host memory."""
        return torch.empty((rows, self.width), dtype=self.dtype, pin_memory=pinned)

    def gather(self, lane: int, start: int, end: int) -> Tensor:
        """Rows [start, end) of a lane: [end - start, width], on the rows' device."""
        out = torch.empty((end - start, self.width), dtype=self.dtype, device=self.device)
        for layer, field in enumerate(self._fields):
            keys, values = self._rows.view(layer, lane, end)
            _part(out, field.first, field.middle, field.heads).copy_(keys[:, start:])
            _part(out, field.middle, field.last, field.heads).copy_(values[:, start:])
        return out

    def scatter(self, lane: int, start: int, records: Tensor) -> None:
        """Writes records to a lane's rows from `start` on: one write a layer."""
        for layer, field in enumerate(self._fields):
            key = _part(records, field.first, field.middle, field.heads)
            value = _part(records, field.middle, field.last, field.heads)
            self._rows.write(layer, lane, start, key, value)


def _fields(rows: KvRows) -> Iterator[_Field]:
    first = 0
    for layer in range(rows.layers):
        keys, values = rows.view(layer, rows.scratch_lane, 1)
        middle = first + keys.numel()
        last = middle + values.numel()
        yield _Field(keys.shape[0], first, middle, last)
        first = last


def _part(records: Tensor, first: int, last: int, heads: int) -> Tensor:
    """A view of some elements of each record: [heads, rows, dim]."""
    return records[:, first:last].view(len(records), heads, -1).transpose(0, 1)
