"""A service over fake rings whose turns are counted, and its metrics read as a scraper reads them. For tests."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.requests import SamplingSpec, SessionId
from coordinator.router import Router
from fakering.model import FakeModel
from fakering.ring import FakeRing
from gateway.chat.byte_tokenizer import ByteTokenizer
from gateway.observing.metrics.exposition import Metrics
from gateway.rings import RingSet
from gateway.service import GenerationService
from gateway.turns import TextPrompt, TurnRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from fakering.faults import FaultScript
    from gateway.observing.observers import TurnObserver
    from gateway.turns import TurnEvent

ENDLESS = FakeModel(258, low=32, high=127)
GREEDY = SamplingSpec(temperature=0.0)
PREFIX = "ringserve:"


def turn(
    text: str, tokens: int = 8, session: str | None = None, *, draft: bool = False
) -> TurnRequest:
    return TurnRequest(
        TextPrompt(text),
        session=None if session is None else SessionId(session),
        sampling=GREEDY,
        max_tokens=tokens,
        draft=draft,
    )


class Watched:
    """`faults` are of the first ring, `kind` is that of all rings, `also` are observers beside the metrics."""

    def __init__(
        self,
        *,
        faults: FaultScript = (),
        host_rows: int = 0,
        prefix: str = PREFIX,
        also: Sequence[TurnObserver] = (),
        settings: SchedulerSettings | None = None,
        kind: type[FakeRing] = FakeRing,
    ) -> None:
        settings, clock = settings or SchedulerSettings(), SystemClock()
        self.metrics = Metrics(prefix, "fake")
        self.made: list[FakeRing] = []

        def make(name: str) -> RingDriver:
            script = faults if name == "ring-0" else ()
            sizes: Any = {"vocab_size": 258, "host_rows": host_rows}
            ring = kind(2, 2, 512, language=ENDLESS, faults=script, **sizes)
            self.made.append(ring)
            return RingDriver(name, ring, settings, clock, observers=(self.metrics.rings,))

        self.router = Router((), session_limit=8)
        self.rings = RingSet(self.router, make, lambda _: lambda _: None, lambda: None)
        self.metrics.look_at(self.router, clock, settings.node_rows)
        watching = (self.metrics.turns, *also)
        self.service = GenerationService(
            "fake", self.router, ByteTokenizer(), clock, random.Random(7), watching
        )

    async def run(self, asked: TurnRequest) -> list[TurnEvent]:
        async with aclosing(self.service.generate(asked)) as events:
            return [event async for event in events]

    def figures(self) -> Figures:
        return Figures(self.metrics.text("")[0].decode())


@asynccontextmanager
async def watched(rings: int = 1, **kinds: object) -> AsyncIterator[Watched]:
    made = Watched(**kinds)  # type: ignore[arg-type]
    made.rings.announce(rings)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(made.rings.stop)
        await made.rings.start()
        yield made


class Figures:
    """A scrape. `figures["prompt_tokens_total"]`, `figures["lane_state", "resting"]`: by any of the labels' values."""

    def __init__(self, text: str) -> None:
        self.families = {each.name: each for each in text_string_to_metric_families(text)}

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        for family in self.families.values():
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value

    def __getitem__(self, asked: str | tuple[str, ...]) -> float:
        name, *values = (asked,) if isinstance(asked, str) else asked
        found = [
            value
            for each, labels, value in self.samples()
            if each == PREFIX + name and set(values) <= set(labels.values())
        ]
        assert len(found) == 1, f"{len(found)} series of {asked}"
        return found[0]

    def counted(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Every series that may only rise."""
        rising = ("_total", "_count", "_sum", "_bucket")
        return {
            (name, tuple(sorted(labels.items()))): value
            for name, labels, value in self.samples()
            if name.endswith(rising) and name.startswith(PREFIX)
        }
