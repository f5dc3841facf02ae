"""Puts together what watches a process, as its settings say: metrics and log lines, and traces where they are wanted.

It watches nothing itself, and decides nothing about turns or rings.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from coordinator.requests import SessionId
from gateway.observing.metrics.exposition import Metrics
from gateway.observing.observers import TurnObserver
from gateway.observing.settings import ObserveSettings
from gateway.observing.tracing import open_traces
from gateway.observing.turn_log import TurnLog


@dataclass(frozen=True, slots=True)
class Observing:
    metrics: Metrics
    turns: tuple[TurnObserver, ...]  # the metrics' among them


@asynccontextmanager
async def open_observing(
    settings: ObserveSettings, model: str, digest: Callable[[SessionId], str]
) -> AsyncIterator[Observing]:
    """On leaving, the last traces are sent. `digest` names sessions in log lines. Raises InvalidSetting."""
    metrics = Metrics(settings.metrics_prefix, model)
    async with open_traces(settings.otlp_endpoint, model) as traces:
        yield Observing(metrics, (metrics.turns, TurnLog(digest), *traces))
