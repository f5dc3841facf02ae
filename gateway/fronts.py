"""Several fronts of one service that begin in turn and drain at the same time.

Decides nothing else: one after the other, the last one would take calls for as long as the others drain.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

# For turns that were ended to say so to their clients.
LAST_WORDS_S = 1.0


@asynccontextmanager
async def together(*fronts: AbstractAsyncContextManager[str]) -> AsyncIterator[tuple[str, ...]]:
    """Enters them in order and yields their addresses; leaves them beside one another. Raises what they raise."""
    leave = asyncio.Event()
    holding: list[asyncio.Task[None]] = []
    try:
        addresses = []
        for front in fronts:
            entered: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(_held(front, entered, leave))
            holding.append(task)
            either: set[asyncio.Future[Any]] = {entered, task}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
            addresses.append(entered.result())
        yield tuple(addresses)
    except BaseException:
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)
        raise
    leave.set()
    await asyncio.gather(*holding)


async def _held(
    front: AbstractAsyncContextManager[str], entered: asyncio.Future[str], leave: asyncio.Event
) -> None:
    async with front as address:
        entered.set_result(address)
        await leave.wait()
