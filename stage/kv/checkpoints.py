"""Checkpoints of a stage's recurrent layers, in host memory and on disk: the states at chain nodes' ends.

Decides how a state lies in a block of bytes, and whether there is room for one. Which are worth keeping is the
coordinator's, and which exist the ledger's business. A stage without recurrent layers has nothing to keep, and says
yes to all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from coordinator.frames import NodeId
from coordinator.nodes import Node
from stage.kv.kept import DiskShelf, KeptNode, KeptNodes
from stage.kv.mirror import Key, Record
from stage.kv.outbox import Mirrored
from stage.kv.states import LaneStates, SavedState

# What a stage without recurrent layers says that it has room for.
_ANY = 2**31 - 1
# A tensor of a state begins at such an address, whatever the ones before it hold: each is a view of its bytes.
_ALIGNED = 64
# Bytes of a file that are not the state: its header, with the shapes of a layer's tensors and the node's tokens.
_HEAD_BYTES = 1024
_HEAD_BYTES_BY_TENSOR = 64

Layout = Sequence[tuple[tuple[int, ...], torch.dtype]]


class Checkpoints:
    """One thread calls it, that of the stage's frames."""

    def __init__(
        self,
        states: LaneStates,
        budget: int,
        disk: DiskShelf | None = None,
        mirrored: Mirrored | None = None,
    ) -> None:
        self._states = states
        self._disk = disk
        self._saved = KeptNodes(
            budget, disk, lambda node: _empty(states.layout(node.end)), mirrored
        )
        self._fetched: dict[NodeId, KeptNode] = {}  # what the frame in work loads

    def __len__(self) -> int:
        """Those that lie in memory."""
        return len(self._saved)

    @property
    def nbytes(self) -> int:
        return self._saved.nbytes

    @property
    def capacity(self) -> int:
        """How many the coordinator may count on."""
        if not self._states.layers:
            return _ANY
        widest = self._states.layout(self._states.block - 1)
        in_memory = self._saved.budget // max(_size(widest), 1)
        if self._disk is None or not in_memory:
            return min(in_memory, _ANY)
        head_bytes = _HEAD_BYTES + _HEAD_BYTES_BY_TENSOR * len(widest)
        return min(max(in_memory, self._disk.budget // (_size(widest) + head_bytes)), _ANY)

    def on_disk(self) -> tuple[NodeId, ...]:
        """Those that a start finds; they are read when they are loaded."""
        return tuple(node.id for node in self._saved.on_disk())

    def held(self, nodes: Iterable[NodeId]) -> Iterator[NodeId]:
        """Those nodes that have one, as far as can be told without reading any."""
        return (node for node in nodes if not self._states.layers or node in self._saved)

    def fetch(self, node: NodeId) -> bool:
        """Gets hold of one that is about to be loaded, until `release`; False when it cannot be had."""
        kept = self._saved.get(node) if self._states.layers else None
        if kept is not None:
            self._fetched[node] = kept
        return kept is not None or not self._states.layers

    def load(self, lane: int, rows: int, node: NodeId) -> None:
        """Takes the lane up at `rows` from a fetched checkpoint."""
        if self._states.layers:
            tensors = _views(self._fetched[node].data, self._states.layout(rows))
            self._states.load(lane, rows, SavedState(rows, tuple(tensors)))

    def release(self) -> None:
        self._fetched.clear()

    def save(self, lane: int, node: Node) -> bool:
        """Keeps the lane's state at the node's end, which it must hold; False when there is no room for it."""
        if not self._states.layers or node.id in self._saved:
            return True
        layout = self._states.layout(node.end)

        def copied() -> Tensor:
            data = _empty(layout)
            self._states.save_into(lane, node.end, tuple(_views(data, layout)))
            return data

        return self._saved.keep(node, _size(layout), copied)

    def drop(self, nodes: Iterable[NodeId]) -> None:
        self._saved.drop(nodes)

    def forget(self, nodes: Iterable[NodeId]) -> None:
        """As drop, but for what lies on disk."""
        self._saved.forget(nodes)

    def lacks(self, key: Key) -> bool:
        """Whether it could be taken back."""
        return self._saved.lacks(key)

    def take_back(self, record: Record) -> Node | None:
        """Keeps a state that the neighbour kept, if it is what a stage like this one kept and there is room."""
        return self._saved.take_back(record)

    def take_gone(self) -> tuple[NodeId, ...]:
        """Those that have been given up since this was asked last."""
        return self._saved.take_gone()


def _places(layout: Layout) -> Iterator[tuple[int, int]]:
    """Where each tensor's bytes begin and end."""
    end = 0
    for shape, dtype in layout:
        start = -(-end // _ALIGNED) * _ALIGNED
        end = start + torch.Size(shape).numel() * dtype.itemsize
        yield start, end


def _size(layout: Layout) -> int:
    return max((end for _, end in _places(layout)), default=0)


def _empty(layout: Layout) -> Tensor:
    # Zeros: the gaps are written to a file too, and must not tell what lay there before.
    return torch.zeros(_size(layout), dtype=torch.uint8)


def _views(data: Tensor, layout: Layout) -> Iterator[Tensor]:
    for (shape, dtype), (start, end) in zip(layout, _places(layout), strict=True):
        yield data[start:end].view(dtype).view(shape)
