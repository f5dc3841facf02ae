"""A ring of real processes as tests of losses use it: frames on their way, and who ran where."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING

import psutil

from coordinator.errors import RingLost
from coordinator.frames import Epoch
from coordinator.held import Holding
from coordinator.ring import StageProgress
from fakering import texts
from fakering.hand import Hand
from stage.processes import ProcessHandle

if TYPE_CHECKING:
    from stage.ray_ring import RayRing

ROWS = 16


class Watched:
    """A started ring, and what its loads told."""

    def __init__(self, ring: RayRing) -> None:
        self.ring = ring
        self.told: list[StageProgress] = []
        self.epochs: Iterator[int] = count(1)

    async def start(self) -> None:
        self.hand = Hand(self.ring, await self.ring.start(self.told.append))
        # Without the tokens at which a faulty_actor fails.
        self.prompt = texts.novel(ROWS + 4, 1, self.hand.info.vocab_size - 2)
        self.told.clear()

    async def heal(self) -> Holding:
        return await self.hand.open_epoch(Epoch(next(self.epochs)))

    async def answer(self, lane: int = 0) -> tuple[int, ...]:
        return (await self.hand.turn(lane, self.prompt, 4)).tokens

    async def lose(self, within_s: float = 2.0) -> RingLost:
        """Waits for the loss that something is about to cause, with frames on their way."""
        for _ in range(20):
            self.hand.send_prefill(1, self.hand.new_job(), self.prompt)
        try:
            async with asyncio.timeout(within_s):
                while True:
                    await self.ring.next_reply()
        except RingLost as lost:
            assert not self.ring.health().ready
            return lost


async def until(holds: Callable[[], bool], within_s: float = 30.0) -> None:
    """Asks again and again: what is waited for happens in another process."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came to hold")


def processes(pids: tuple[int, ...]) -> list[ProcessHandle]:
    return [ProcessHandle(pid) for pid in pids]


async def all_end(handles: list[ProcessHandle], within_s: float) -> bool:
    ended = [await asyncio.to_thread(handle.await_exit, within_s) for handle in handles]
    for handle in handles:
        handle.close()
    return all(ended)


def siblings(pid: int) -> set[int]:
    """All stages' processes of the same Ray, by how Ray names them."""
    found = set()
    for process in psutil.Process(pid).parent().children():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::StageActor"):
                found.add(process.pid)
    return found
