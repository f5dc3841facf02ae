"""Waiting for what has no event of its own: it is looked at, again and again, until a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_LOOK_S = 0.02


async def until(is_so: Callable[[], bool], within_s: float) -> bool:
    """False: it was not so in time."""
    ends_s = time.perf_counter() + within_s
    while not is_so():
        if time.perf_counter() > ends_s:
            return False
        await asyncio.sleep(_LOOK_S)
    return True
