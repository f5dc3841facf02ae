"""What `ringserve chat` is told: one frozen record, checked when it is made. Defaults are written here once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from coordinator.errors import InvalidSetting
from gateway.server_address import ServerAddress


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Raises InvalidSetting."""

    server: ServerAddress
    system: str | None = None
    temperature: float = 0.0
    max_tokens: int = 512  # of each answer; a small model may never stop by itself
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidSetting("max_tokens", f"must be at least 1, got {self.max_tokens}")
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 100):
            raise InvalidSetting(
                "temperature", f"must be between 0 and 100, got {self.temperature}"
            )
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise InvalidSetting("seed", "must fit in 64 bits, unsigned")
