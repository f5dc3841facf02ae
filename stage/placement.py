"""Where a ring's stages go in a cluster: what each asks for, packed or spread, and in which order along the nodes.

Pure decisions over what the cluster says of itself. It may not import ray: ray_ring/ asks and carries out.
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
Strategy = Literal["PACK", "SPREAD", "STRICT_SPREAD"]


@dataclass(frozen=True, slots=True)
class Share:
    """What one stage, or a spare one, asks of its node, by the cluster's names for it."""

    kind: Literal["CPU", "GPU"]
    amount: float
    stages: int
    spares: int = 0

    @property
    def places(self) -> int:
        return self.stages + self.spares

    @property
    def resources(self) -> dict[str, float]:
        return {self.kind: self.amount}

    def check(self, have: Resources) -> None:
        """Raises ClusterTooSmall when all nodes together have less than is wanted."""
        found = have.get(self.kind, 0.0)
        if found < self.amount * self.places:
            raise self.too_much(f"{found:g} {self.kind}")

    def too_much(self, available: str) -> ClusterTooSmall:
        spares = f" and {self.spares} spare" if self.spares else ""
        each = f"{self.stages} stages{spares} with {self.amount:g} each"
        wanted = f"{self.amount * self.places:g} {self.kind} ({each})"
        return ClusterTooSmall(wanted=wanted, available=available)

    def strategy(self, spread: bool, nodes: Sequence[Resources]) -> Strategy:
        """A node for each stage where that was asked for and can be; else as few nodes as will do."""
        able = sum(node.get(self.kind, 0.0) >= self.amount for node in nodes)
        if spread and able >= self.stages:
            # Where spares have to share nodes, only stages need not.
            return "STRICT_SPREAD" if able >= self.places else "SPREAD"
        if spread:
            log.warning("packed stages=%d reason=only %d nodes could take one", self.stages, able)
        return "PACK"


def share_of(config: RingConfig) -> Share:
    if config.device == "cuda":
        return Share("GPU", 1.0, config.stages, config.spares)
    return Share("CPU", config.cpu_share, config.stages, config.spares)


def along_nodes(nodes: Sequence[str], here: str) -> list[int]:
    """The order in which the places on `nodes` become stages: a frame crosses to each other node once."""
    return sorted(range(len(nodes)), key=lambda place: (nodes[place] != here, nodes[place], place))


def for_stages(nodes: Sequence[str], here: str, stages: int, spread: bool) -> list[int]:
    """Which of the places on `nodes` stages get, in their order; the others are spares'."""
    order = along_nodes(nodes, here)
    if spread:
        firsts = {nodes[place]: place for place in reversed(order)}
        order = [*firsts.values(), *(place for place in order if place not in firsts.values())]
    chosen = set(order[:stages])
    return [place for place in along_nodes(nodes, here) if place in chosen]


def keeper_shift(nodes: Sequence[str], kept: Sequence[int | None]) -> int:
    """How many stages behind a stage the one is that keeps its nodes too, round the ring: as most of what they keep
    already lies (`kept`: whose each has), else so that few share a node. `nodes`: of the stages.
    """
    stages = len(nodes)

    def worth(shift: int) -> tuple[int, int, int]:
        keepers = [(index + shift) % stages for index in range(stages)]
        right = sum(kept[keeper] == index for index, keeper in enumerate(keepers))
        apart = sum(nodes[keeper] != nodes[index] for index, keeper in enumerate(keepers))
        return right, apart, -shift

    return max(range(1, stages), key=worth)


def next_spare(held: Sequence[int], stages: int) -> int:
    """The stage that one more spare is loaded for, where those of `held` are there: dealt from the tail backwards."""
    return min(range(stages), key=lambda index: (held.count(index), -index))
