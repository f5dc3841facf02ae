"""Where a ring's stages go in a cluster: what each asks for, packed or spread, and in which order along the nodes.

Pure decisions over what the cluster says of itself. It may not import ray: ray_ring.py asks and carries out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from coordinator.errors import ClusterTooSmall
from stage.config import RingConfig

log = logging.getLogger(__name__)

Resources = Mapping[str, float]
Strategy = Literal["PACK", "STRICT_SPREAD"]


@dataclass(frozen=True, slots=True)
class Share:
    """What one stage asks of its node, by the cluster's names for it."""

    kind: Literal["CPU", "GPU"]
    amount: float
    stages: int

    @property
    def resources(self) -> dict[str, float]:
        return {self.kind: self.amount}

    def check(self, have: Resources) -> None:
        """Raises ClusterTooSmall when all nodes together have less than the stages want."""
        found = have.get(self.kind, 0.0)
        if found < self.amount * self.stages:
            raise self.too_much(f"{found:g} {self.kind}")

    def too_much(self, available: str) -> ClusterTooSmall:
        each = f"{self.stages} stages with {self.amount:g} each"
        wanted = f"{self.amount * self.stages:g} {self.kind} ({each})"
        return ClusterTooSmall(wanted=wanted, available=available)

    def strategy(self, spread: bool, nodes: Sequence[Resources]) -> Strategy:
        """A node for each stage where that was asked for and can be; else as few nodes as will do."""
        able = sum(node.get(self.kind, 0.0) >= self.amount for node in nodes)
        if spread and able >= self.stages:
            return "STRICT_SPREAD"
        if spread:
            log.warning("packed stages=%d reason=only %d nodes could take one", self.stages, able)
        return "PACK"


def share_of(config: RingConfig) -> Share:
    if config.device == "cuda":
        return Share("GPU", 1.0, config.stages)
    return Share("CPU", config.cpu_share, config.stages)


def along_nodes(nodes: Sequence[str], here: str) -> list[int]:
    """The order in which the places on `nodes` become stages: a frame crosses to each other node once."""
    return sorted(range(len(nodes)), key=lambda place: (nodes[place] != here, nodes[place], place))
