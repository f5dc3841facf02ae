"""One started ring for the whole suite, since real ones take seconds; each test gets it in a new epoch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count

import pytest
import pytest_asyncio

from coordinator.frames import Epoch
from coordinator.ring import Ring
from fakering.hand import Hand

LANES = 3
MAX_ROWS = 64


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def ring(ring_factory: Callable[..., Ring]) -> AsyncIterator[Ring]:
    ring = ring_factory(lanes=LANES, max_rows=MAX_ROWS)
    try:
        await ring.start(lambda progress: None)
        yield ring
    finally:
        await ring.stop()
        await ring.stop()


@pytest.fixture(scope="session")
def epochs() -> Iterator[int]:
    # Steps leave room for a test that opens an epoch itself.
    return count(10, 10)


@pytest_asyncio.fixture(loop_scope="session")
async def hand(ring: Ring, epochs: Iterator[int]) -> Hand:
    hand = Hand(ring, ring.capacity())
    await hand.open_epoch(Epoch(next(epochs)))
    return hand
