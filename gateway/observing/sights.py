"""What a process remembers of itself for whoever looks: one record that launch.py makes and the HTTP front shows.

It decides nothing, and nothing is decided by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.observing.loading import LoadRecord
from gateway.observing.metrics.exposition import Metrics
from gateway.observing.recent_turns import RecentTurns


@dataclass(frozen=True, slots=True)
class Sights:
    turns: RecentTurns = field(default_factory=RecentTurns)
    loading: LoadRecord = field(default_factory=LoadRecord)
    metrics: Metrics | None = None  # None: nobody counts
