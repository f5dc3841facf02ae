"""The last rows' logits of whole prompts, which the tail keeps in host memory for exact resends.

Decides nothing: the coordinator chooses the slots, the ledger says whose logits lie in which. Kept bit for bit, and
sampled on the device that they came from, so that a recalled token is the one that computing would give.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from coordinator.frames import Segment, SegmentKind

# Of a stage's budget for chain nodes: a prompt's logits cost as much as its rows' KV of about ten tokens.
_SHARE = 64
# Prompts, or twice as many as lanes: what clients send again is what they sent last.
_MOST = 64


def memo_slots(budget: int, vocab_size: int, lanes: int) -> int:
    """How many prompts' logits a part of the budget (bytes) has room for; 0 where there are too few to be of use."""
    slots = min(max(_MOST, 2 * lanes), budget // _SHARE // row_bytes(vocab_size))
    return slots if slots > lanes else 0


def row_bytes(vocab_size: int) -> int:
    return vocab_size * torch.float32.itemsize


class Memos:
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._rows: dict[int, Tensor] = {}
        self._device = torch.device("cpu")  # that logits are computed on

    def sampled(self, taken: tuple[Segment, ...], logits: Tensor | None) -> Tensor | None:
        """The computed rows, [asked, vocab], with those that are recalled put in where their segments stand.

        In the frame's order: a slot may be read and written in one frame.
        """
        rows = list(self._passed(taken, logits))
        if all(segment.kind is not SegmentKind.RECALL for segment in taken):
            return logits
        return torch.stack(rows)

    def _passed(self, taken: tuple[Segment, ...], logits: Tensor | None) -> Iterator[Tensor]:
        place = 0
        for segment in taken:
            if segment.kind is SegmentKind.RECALL:
                assert segment.memo is not None
                yield self._rows[segment.memo].to(self._device)
                continue
            for _ in segment.sampled_rows:
                assert logits is not None
                if segment.memo is not None and segment.memo < self.slots:
                    self._keep(segment.memo, logits[place])
                yield logits[place]
                place += 1

    def _keep(self, slot: int, logits: Tensor) -> None:
        self._rows[slot], self._device = logits.to("cpu", copy=True), logits.device
