"""How many threads a stage's calls use: among busy neighbours, and in a frame that has the ring to itself.

Decides the two numbers. Stages on one host share its cores: while a lone frame is in one of them the others have
nothing to compute, so that one takes their cores too. Which frames are alone is the coordinator's to say.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from stage.config import RingConfig


@dataclass(frozen=True, slots=True)
class Cores:
    """Threads of one stage's compute. Torch keeps the number for each thread that calls it."""

    shared: int = 1
    alone: int = 1

    def use(self, alone: bool = False) -> None:
        torch.set_num_threads(self.alone if alone else self.shared)


def cores_of(config: RingConfig, device: str, stages_here: int) -> Cores:
    """`stages_here`: the ring's stages on this host, this one included."""
    if device != "cpu":
        return Cores(config.threads, config.threads)
    pooled = min(config.threads * stages_here, len(os.sched_getaffinity(0)))
    return Cores(config.threads, max(config.threads, pooled))
