"""What a run of the storm is told to do: one frozen record, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.errors import InvalidSetting
from gateway.chaos.faults import Patience
from gateway.chaos.storm import DEADLY, Fault
from gateway.chaos.traffic import Shape


@dataclass(frozen=True, slots=True)
class StormOptions:
    """`kills` and `minutes` None: each fault once. Raises InvalidSetting."""

    seed: int = 0
    faults: tuple[Fault, ...] = tuple(Fault)
    streams: int = 4
    kills: int | None = None
    minutes: float | None = None
    every_s: float = 5.0  # from one fault to the next, at least
    shape: Shape = field(default_factory=Shape)
    patience: Patience = field(default_factory=Patience)
    soak: Path | None = None  # what all processes take goes there
    plot: Path | None = None  # and a picture of it there

    def spell(self, stages: int) -> int | None:
        """How many faults in a row strike one stage: in a soak the others are to live for long, through many epochs."""
        if self.soak is None or self.minutes is None:
            return None
        return max(1, math.ceil(60 * self.minutes / self.every_s / stages))

    def __post_init__(self) -> None:
        for name in ("streams", "kills", "minutes", "every_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidSetting(name, f"must be greater than 0, got {value}")
        if self.kills is not None and DEADLY.isdisjoint(self.faults):
            raise InvalidSetting("kills", "none of the faults kills")
        if self.plot is not None and self.soak is None:
            raise InvalidSetting("plot", "draws what --soak looks at")
