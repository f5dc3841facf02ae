"""One process's metrics put together, and their text for whoever scrapes it.

It makes the observers; who calls them is launch.py's business.
"""

from __future__ import annotations

from prometheus_client import ProcessCollector
from prometheus_client.exposition import choose_encoder

from coordinator.clock import Clock
from coordinator.router import Router
from gateway.observing.metrics.look import RingLook
from gateway.observing.metrics.naming import Naming
from gateway.observing.metrics.rings import RingMetrics
from gateway.observing.metrics.turns import TurnMetrics


class Metrics:
    """`turns` and `rings` are to be told what happens. `text` is called on the event loop."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self._naming = Naming(prefix, model_name)
        self.turns = TurnMetrics(self._naming)
        self.rings = RingMetrics(self._naming)
        ProcessCollector(registry=self._naming.registry)

    def look_at(self, router: Router, clock: Clock, block_rows: int) -> None:
        """From now on the rings' state is read whenever somebody scrapes."""
        self._naming.registry.register(RingLook(self._naming, router, clock, block_rows))

    def text(self, accept: str) -> tuple[bytes, str]:
        """The metrics and their content type, which is OpenMetrics' where the scraper accepts that."""
        encode, content_type = choose_encoder(accept)
        return encode(self._naming.registry), content_type
