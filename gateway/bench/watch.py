"""How busy each stage was, by asking the server while something else is measured. It decides nothing."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gateway.client import Client

# A frame's compute is counted when its reply comes, so a shorter interval would show frames and not load.
_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Sample:
    """Totals of all rings, since their start: one figure a stage, ring after ring."""

    at_s: float
    busy_s: tuple[float, ...]
    discarded_frames: int
    prefilled_rows: int
    stages: tuple[str, ...]  # what each is called


class Watch:
    """Samples in the order of their times."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    async def look(self, client: Client) -> Sample:
        rings = await client.rings()
        sample = Sample(
            at_s=time.perf_counter(),
            busy_s=tuple(busy for ring in rings for busy in ring.counts.stage_busy_s),
            discarded_frames=sum(ring.counts.discarded_frames for ring in rings),
            prefilled_rows=sum(ring.counts.prefilled_rows for ring in rings),
            stages=tuple(
                f"{ring.name} stage {stage}"
                for ring in rings
                for stage in range(len(ring.counts.stage_busy_s))
            ),
        )
        self.samples.append(sample)
        return sample


@asynccontextmanager
async def watching(client: Client, watch: Watch) -> AsyncIterator[None]:
    """Looks until the block is left."""
    await watch.look(client)
    looking = asyncio.create_task(_look(client, watch), name="bench-watch")
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    await watch.look(client)


async def _look(client: Client, watch: Watch) -> None:
    while True:
        await asyncio.sleep(_EVERY_S)
        await watch.look(client)


def busy_shares(samples: Sequence[Sample], begin_s: float, end_s: float) -> tuple[float, ...]:
    """The share of [begin_s, end_s] in which each stage computed."""
    if end_s <= begin_s or not samples:
        return ()
    pairs = zip(_busy_at(samples, begin_s), _busy_at(samples, end_s), strict=True)
    return tuple(min(1.0, (after - before) / (end_s - begin_s)) for before, after in pairs)


def _busy_at(samples: Sequence[Sample], at_s: float) -> tuple[float, ...]:
    """Between two samples by a straight line."""
    index = bisect_right(samples, at_s, key=lambda sample: sample.at_s)
    if index in (0, len(samples)):
        return samples[min(index, len(samples) - 1)].busy_s
    left, right = samples[index - 1], samples[index]
    share = (at_s - left.at_s) / (right.at_s - left.at_s)
    return tuple(a + (b - a) * share for a, b in zip(left.busy_s, right.busy_s, strict=True))
