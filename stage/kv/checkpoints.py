"""Checkpoints of a stage's recurrent layers in host memory, under a budget of bytes: the states at chain nodes' ends.

Decides only whether there is room. Which are worth keeping is the coordinator's, and which exist the ledger's business.
A stage without recurrent layers has nothing to keep, and says yes to all.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.frames import NodeId
from stage.kv.states import LaneStates, SavedState

# What a stage without recurrent layers says that it has room for.
_ANY = 2**31 - 1


class Checkpoints:
    """One thread calls it, that of the stage's frames."""

    def __init__(self, states: LaneStates, budget: int) -> None:
        self.nbytes = 0
        self._states = states
        self._budget = budget
        self._saved: dict[NodeId, SavedState] = {}

    def __len__(self) -> int:
        return len(self._saved)

    @property
    def capacity(self) -> int:
        """How many the coordinator may count on."""
        size = self._states.state_nbytes
        return min(self._budget // size, _ANY) if size else _ANY

    def missing(self, node: NodeId) -> bool:
        return self._states.layers > 0 and node not in self._saved

    def save(self, lane: int, rows: int, node: NodeId) -> bool:
        """Keeps the lane's state at `rows`, which it must hold; False when there is no room for it."""
        if not self._states.layers or node in self._saved:
            return True
        saved = self._states.save(lane, rows)
        if self.nbytes + saved.nbytes > self._budget:
            return False
        self._saved[node] = saved
        self.nbytes += saved.nbytes
        return True

    def load(self, lane: int, rows: int, node: NodeId) -> None:
        """Takes the lane up at `rows` from a checkpoint that is not missing."""
        if self._states.layers:
            self._states.load(lane, rows, self._saved[node])

    def drop(self, nodes: Iterable[NodeId]) -> None:
        for node in nodes:
            saved = self._saved.pop(node, None)
            self.nbytes -= 0 if saved is None else saved.nbytes
