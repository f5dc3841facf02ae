"""A ring of real processes as tests of losses use it: frames on their way, and who ran where."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

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
        self.prompt = texts.novel(ROWS + 4, 1, self.hand.info.vocab_size)
        self.told.clear()

    async def heal(self) -> Holding:
        epoch = Epoch(next(self.epochs))
        held = await self.ring.open_epoch(epoch)
        self.hand.ledger.reset(epoch, held)
        self.hand._expected.clear()
        self.hand._replies.clear()
        return held

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
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.02)  # noqa: ASYNC110


def processes(pids: tuple[int, ...]) -> list[ProcessHandle]:
    return [ProcessHandle(pid) for pid in pids]


async def all_end(handles: list[ProcessHandle], within_s: float) -> bool:
    ended = [await asyncio.to_thread(handle.await_exit, within_s) for handle in handles]
    for handle in handles:
        handle.close()
    return all(ended)


def stage_processes() -> set[int]:
    """The processes of Ray's that run a stage, by how Ray names them."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if (folder / "cmdline").read_bytes().startswith(b"ray::StageActor"):
                    found.add(int(folder.name))
            except OSError:
                pass
    return found
