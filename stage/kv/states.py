"""What a stage's recurrent layers (linear attention, SSM, short convolutions) keep of each lane.

Decides how a recurrence can be taken up again at any of the last rows. The rows of a lane are divided into blocks of
`block` rows, counted from row 0. Kept are the states at the last few blocks' first rows and, from there on, the rows
that go into the recurrence: the state at a row inside of a block is the state at the block's first row and the rows
since. So a rejected draft costs no state of its own, and a block is always computed as one call of the same shape.
May not compute anything; the ledger says which rows are valid. Holds that nothing is allocated after the constructor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from coordinator.errors import BrokenInvariant

# The rows before the last one that a lane can be taken up at, at least: as many unconfirmed drafts may be in flight.
STATE_ROWS = 16
# Rows of a block. A step computes a whole block for its one new row: on a CPU that is work, on a GPU launches are.
CPU_BLOCK = 16
DEVICE_BLOCK = 64


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a layer's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateShape:
    """What one recurrent layer keeps: a state at the first row of a block, and a row for each token since."""

    parts: tuple[StatePart, ...]
    row_width: int


@dataclass(frozen=True, slots=True)
class SavedState:
    """A lane's state at one row count, in host memory: contiguous tensors in the order of `LaneStates.layout`."""

    rows: int
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class RowRange(Protocol):
    """Rows [start, end) of a lane, about to be computed."""

    @property
    def lane(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


def blocks_kept(block: int, state_rows: int) -> int:
    """The blocks whose first state is kept, the last and unfinished one included."""
    return 1 + -(-state_rows // block)


def states_nbytes(
    shapes: Sequence[StateShape],
    *,
    lanes: int,
    block: int,
    dtype: torch.dtype,
    state_rows: int = STATE_ROWS,
) -> int:
    """The bytes that LaneStates of these sizes allocates, the scratch lane included."""
    parts = sum(part.nbytes for shape in shapes for part in shape.parts)
    rows = block * dtype.itemsize * sum(shape.row_width for shape in shapes)
    return (lanes + 1) * blocks_kept(block, state_rows) * (parts + rows)


class LaneStates:
    """The recurrent state of `lanes` lanes and of the scratch lane, which is the number after the last one.

    One thread writes and reads them. Without recurrent layers it keeps nothing and holds every row."""

    def __init__(
        self,
        shapes: Sequence[StateShape],
        *,
        lanes: int,
        block: int,
        dtype: torch.dtype,
        device: torch.device,
        state_rows: int = STATE_ROWS,
    ) -> None:
        if block < 1 or state_rows < 0:
            raise ValueError("a block has rows")
        self.shapes = tuple(shapes)
        self.layers = len(self.shapes)
        self.block = block
        self.scratch_lane = lanes
        self._kept = blocks_kept(block, state_rows)
        # Of each lane: the first and the last row count that the recurrence can be taken up at.
        self._held = [(0, 0)] * (lanes + 1)
        count = (lanes + 1, self._kept)
        self._rows = [
            torch.zeros((*count, block, shape.row_width), dtype=dtype, device=device)
            for shape in self.shapes
        ]
        self._parts = [
            tuple(
                torch.zeros((*count, *part.shape), dtype=part.dtype, device=device)
                for part in shape.parts
            )
            for shape in self.shapes
        ]

    @property
    def state_nbytes(self) -> int:
        """The most bytes that one saved state of a lane has."""
        return sum(_nbytes(shape, dtype) for shape, dtype in self.layout(self.block - 1))

    def held(self, lane: int) -> range:
        """The row counts at which the lane can be taken up: where a segment may start, what can be copied or saved."""
        if not self.layers:
            return range(sys.maxsize)
        first, last = self._held[lane]
        return range(first, last + 1)

    def layout(self, rows: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shape and dtype of each tensor of a state saved at `rows`."""
        since = rows % self.block
        sizes: list[tuple[tuple[int, ...], torch.dtype]] = []
        for shape, kept in zip(self.shapes, self._rows, strict=True):
            sizes += [(part.shape, part.dtype) for part in shape.parts]
            sizes.append(((since, shape.row_width), kept.dtype))
        return tuple(sizes)

    # What a frame does

    def begin(self, segments: Iterable[RowRange]) -> None:
        """Take note of a frame's segments, before its layers compute them in that order.

        Raises BrokenInvariant where a lane's state at a segment's first row is not there: the ledger knew."""
        if not self.layers:
            return
        held = dict(enumerate(self._held))
        for segment in segments:
            first, last = held[segment.lane] if segment.start else (0, 0)
            if not first <= segment.start <= last:
                raise BrokenInvariant(
                    f"no recurrent state of lane {segment.lane} at row {segment.start}"
                )
            held[segment.lane] = max(first, self._oldest(segment.end)), segment.end
            if segment.start == 0:
                self._zero(segment.lane, 0)
        self._held = list(held.values())

    def state(self, layer: int, lane: int, base: int) -> tuple[Tensor, ...]:
        """The layer's state at row `base`, the first of a block, without copying."""
        slot = self._slot(base)
        return tuple(part[lane, slot] for part in self._parts[layer])

    def put_state(self, layer: int, lane: int, base: int, parts: Sequence[Tensor]) -> None:
        for mine, its in zip(self.state(layer, lane, base), parts, strict=True):
            mine.copy_(its)

    def block_rows(self, layer: int, lane: int, base: int) -> Tensor:
        """The rows of the block that begins at `base`: [block, row_width], without copying."""
        return self._rows[layer][lane, self._slot(base)]

    # What is done between frames

    def clear(self, lane: int) -> None:
        """Forget the lane's state: it starts at row 0 again."""
        self._held[lane] = (0, 0)
        for slot in range(self._kept):
            self._zero(lane, slot)

    def copy(self, source: int, target: int, rows: int) -> None:
        """Let `target` be taken up where `source` can be taken up at `rows`."""
        if self.layers and source != target:
            self._check(source, rows)
            for mine, its in zip(self._at(target, rows), self._at(source, rows), strict=True):
                mine.copy_(its)
            self._held[target] = (rows - rows % self.block, rows)

    def save(self, lane: int, rows: int) -> SavedState:
        """A copy of the lane's state at `rows`; on a device its transfer is complete on return."""
        tensors = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in self.layout(rows))
        self.save_into(lane, rows, tensors)
        return SavedState(rows, tensors)

    def save_into(self, lane: int, rows: int, tensors: Sequence[Tensor]) -> None:
        """As save, into host memory of the caller's, in the order of `layout`."""
        if self.layers:
            self._check(lane, rows)
        for its, mine in zip(tensors, self._at(lane, rows), strict=True):
            its.copy_(mine)

    def load(self, lane: int, rows: int, saved: SavedState) -> None:
        """Take the lane up at `rows` from a saved state. Raises ValueError if that is one of another model or row."""
        sizes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in saved.tensors)
        if saved.rows != rows or sizes != self.layout(rows):
            raise ValueError(f"a state at row {saved.rows} is not one at row {rows} of this stage")
        for mine, its in zip(self._at(lane, rows), saved.tensors, strict=True):
            mine.copy_(its)
        self._held[lane] = (rows - rows % self.block, rows)

    def pretend(self, lane: int, rows: int) -> None:
        """Hold a state of zeros at `rows`: for probes, which start anywhere in the scratch lane."""
        self.clear(lane)
        self._held[lane] = (rows - rows % self.block, rows)

    def _check(self, lane: int, rows: int) -> None:
        if rows not in self.held(lane):
            raise BrokenInvariant(f"no recurrent state of lane {lane} at row {rows}")

    def _at(self, lane: int, rows: int) -> Iterator[Tensor]:
        since = rows % self.block
        for layer in range(self.layers):
            yield from self.state(layer, lane, rows - since)
            yield self.block_rows(layer, lane, rows - since)[:since]

    def _oldest(self, rows: int) -> int:
        """The first row of the oldest block that is still kept when the lane ends at `rows`."""
        return max(0, rows - rows % self.block - (self._kept - 1) * self.block)

    def _slot(self, base: int) -> int:
        return base // self.block % self._kept

    def _zero(self, lane: int, slot: int) -> None:
        for parts, rows in zip(self._parts, self._rows, strict=True):
            for tensor in (*parts, rows):
                tensor[lane, slot].zero_()


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
