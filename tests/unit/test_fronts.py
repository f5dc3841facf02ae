"""Fronts begin in order and drain at the same time; none is left behind when another one cannot begin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.fronts import together


@asynccontextmanager
async def _front(
    name: str, log: list[str], gate: asyncio.Event | None = None
) -> AsyncIterator[str]:
    log.append(f"{name} begins")
    try:
        yield name
    except asyncio.CancelledError:
        log.append(f"{name} is gone")
        raise
    log.append(f"{name} drains")
    if gate is not None:
        await gate.wait()
    log.append(f"{name} ends")


async def test_they_drain_beside_one_another() -> None:
    log: list[str] = []
    gate = asyncio.Event()

    async def serve() -> None:
        async with together(_front("a", log, gate), _front("b", log)) as addresses:
            assert addresses == ("a", "b")

    serving = asyncio.create_task(serve())
    for _ in range(10):
        await asyncio.sleep(0)
    assert log == ["a begins", "b begins", "a drains", "b drains", "b ends"]
    gate.set()
    await serving
    assert log[-1] == "a ends"


async def test_who_wants_to_be_gone_waits_for_no_drain() -> None:
    log: list[str] = []
    begun = asyncio.Event()

    async def serve() -> None:
        async with together(_front("a", log, asyncio.Event()), _front("b", log)):
            begun.set()
            await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    await begun.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert log[2:] == ["a is gone", "b is gone"]


async def test_one_that_cannot_begin_takes_the_others_with_it() -> None:
    log: list[str] = []

    @asynccontextmanager
    async def broken() -> AsyncIterator[str]:
        raise OSError("the port is taken")
        yield ""

    with pytest.raises(OSError, match="taken"):
        async with together(_front("a", log), broken()):
            raise AssertionError("it began all the same")
    assert log == ["a begins", "a is gone"]
