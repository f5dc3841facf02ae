"""A fake ring that heals only when it is let, and where a stage of it dies. For tests."""

from __future__ import annotations

import asyncio
from typing import Any

from coordinator.frames import Epoch
from coordinator.held import Holding
from fakering.faults import Lose, Pending
from fakering.ring import FakeRing

# The frame behind a prompt of a few chunks that decodes: in the middle of an answer.
MID_ANSWER = Lose(stage=1, nth=12)


class HeldUp(FakeRing):
    def __init__(self, *sizes: Any, **kinds: Any) -> None:
        super().__init__(*sizes, **kinds)
        self.heals = asyncio.Event()
        self.may_heal = asyncio.Event()

    def lose_next(self, stage: int) -> None:
        """The stage dies of the next frame that reaches it."""
        network = self.network
        network._faults = Pending((Lose(stage, network._reached[stage]),))

    async def open_epoch(self, epoch: Epoch) -> Holding:
        self.heals.set()
        await self.may_heal.wait()
        return await super().open_epoch(epoch)
