"""The last rows' logits of whole prompts, which the tail keeps in host memory for exact resends.

Decides nothing: the coordinator chooses the slots, the ledger says whose logits lie in which. Kept bit for bit, and
sampled on the device that they came from, so that a recalled token is the one that computing would give.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from coordinator.frames import Segment, SegmentKind
from coordinator.memos import MemoTable

# Of a stage's budget for chain nodes: a prompt's logits cost as much as its rows' KV of about ten tokens.
_SHARE = 64
# Prompts: what clients send again is what they sent last.
_MOST = 64


def memo_slots(budget: int, vocab_size: int) -> int:
    """How many prompts' logits a part of the budget (bytes) has room for."""
    return min(_MOST, budget // _SHARE // row_bytes(vocab_size))


def row_bytes(vocab_size: int) -> int:
    return vocab_size * torch.float32.itemsize


class Memos:
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._rows: dict[int, Tensor] = {}
        self._device = torch.device("cpu")  # that logits are computed on

    def keep(self, slot: int, logits: Tensor) -> bool:
        """Whether the row could be kept."""
        if slot >= self.slots:
            return False
        self._rows[slot], self._device = logits.to("cpu", copy=True), logits.device
        return True

    def merged(self, taken: tuple[Segment, ...], logits: Tensor | None) -> Tensor | None:
        """The computed rows, with those that are recalled put in where their segments stand."""
        if all(segment.kind is not SegmentKind.RECALL for segment in taken):
            return logits
        return torch.stack(list(self._rows_of(taken, logits)))

    def _rows_of(self, taken: tuple[Segment, ...], logits: Tensor | None) -> Iterator[Tensor]:
        place = 0
        for segment in taken:
            if segment.kind is SegmentKind.RECALL:
                assert segment.memo is not None
                yield self._rows[segment.memo].to(self._device)
                continue
            for _ in segment.sampled_rows:
                assert logits is not None
                yield logits[place]
                place += 1

    def keep_all(self, taken: tuple[Segment, ...], logits: Tensor | None, table: MemoTable) -> None:
        """Keeps what the segments ask for; what cannot be kept is taken out of the table."""
        place = 0
        for segment in taken:
            if segment.kind is SegmentKind.RECALL:
                continue
            if segment.memo is not None:
                assert logits is not None
                if not self.keep(segment.memo, logits[place]):
                    table.drop(segment.memo)
            place += len(segment.sampled_rows)
