"""Makes Prometheus' counters and histograms of our families, in one registry under one prefix.

Nothing is registered globally: two services of one process do not see each other's figures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase

from gateway.observing.metrics.families import Family, Kind

MODEL = "model_name"

Scraped = CounterMetricFamily | GaugeMetricFamily
M = TypeVar("M", bound=MetricWrapperBase)


class Labelled(dict[str | tuple[str, ...], M]):
    """A metric's series by their own labels' values, each made once."""

    def __init__(self, metric: M, model_name: str) -> None:
        self._metric = metric
        self._model_name = model_name

    def __missing__(self, values: str | tuple[str, ...]) -> M:
        own = (values,) if isinstance(values, str) else values
        made = self[values] = self._metric.labels(self._model_name, *own)
        return made


@dataclass(frozen=True, slots=True)
class Naming:
    prefix: str
    model_name: str
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def counter(self, family: Family) -> Counter:
        """The one series of a family without labels."""
        return self._counter(family).labels(self.model_name)

    def counters(self, family: Family) -> Labelled[Counter]:
        return Labelled(self._counter(family), self.model_name)

    def histogram(self, family: Family) -> Histogram:
        return self._histogram(family).labels(self.model_name)

    def histograms(self, family: Family) -> Labelled[Histogram]:
        return Labelled(self._histogram(family), self.model_name)

    def scraped(self, family: Family) -> Scraped:
        """An empty family that a collector fills."""
        kind = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
        return kind(self.prefix + family.name, family.help, labels=(MODEL, *family.labels))

    def _counter(self, family: Family) -> Counter:
        name, labels = self.prefix + family.name, (MODEL, *family.labels)
        return Counter(name, family.help, labels, registry=self.registry)

    def _histogram(self, family: Family) -> Histogram:
        return Histogram(
            self.prefix + family.name,
            family.help,
            (MODEL, *family.labels),
            buckets=family.buckets,
            registry=self.registry,
        )
