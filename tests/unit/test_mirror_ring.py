"""Conversations on rings whose stages are lost and get back what another one kept of them, in one process.

A lost stage's copy is what it had told until then; by which way it would have travelled is for other tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.requests import Request, Started, TokenDelta
from fakering import texts
from stage.build import LoadedSlice, StageReport, load_stage, open_stage
from stage.config import RingConfig
from stage.kv.mirror import MirrorShelf
from stage.kv.node_file import ROWS, STATE
from stage.kv.outbox import Outbox
from stage.local_ring import LocalRing
from stage.stage import Stage
from tests.unit.mirror_rig import hear, told

VOCABULARY = 199
NEWS = (7, 8, 9)
BUDGET = 2**22

Splits = tuple[tuple[int, int], ...]
SETTINGS = SchedulerSettings(node_rows=16, heal_backoff_s=0.01)


class Slices:
    """Loads each once: what a new stage finds in it is as empty as a new one's."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[Path, tuple[int, int]], LoadedSlice] = {}

    def load(self, config: RingConfig, index: int) -> LoadedSlice:
        key = config.model_dir, config.splits[index]
        if key not in self._loaded:
            self._loaded[key] = load_stage(config, index, "cpu", lambda _: None, config.stages)
        model = self._loaded[key].model
        for lane in range(config.lanes):
            model.rows.clear(lane, 0)
            model.states.clear(lane)
        return replace(self._loaded[key], index=index)


@pytest.fixture(scope="module")
def slices() -> Slices:
    return Slices()


class MirroredRing(LocalRing):
    """`copies`: of a stage's bytes, so many may be kept elsewhere."""

    def __init__(self, config: RingConfig, slices: Slices, copies: int) -> None:
        super().__init__(config)
        self._slices = slices
        self.outboxes: dict[int, Outbox] = {}
        self.shelves = [MirrorShelf(copies) for _ in config.splits]
        self.taken: list[bool] = []

    async def _build(self, index: int) -> tuple[Stage, StageReport]:
        shelf = self.shelves[index]
        if index in self.outboxes:
            for said in told(self.outboxes[index]):
                hear(shelf, said)
        outbox = self.outboxes[index] = Outbox()
        loaded = self._slices.load(self._config, index)
        stage, report = open_stage(self._config, loaded, self._config.stages, outbox)
        for key in shelf.for_giving():
            record = shelf.get(key)
            assert record is not None
            assert stage.lacks(key)
            self.taken.append(stage.take_back(record))
            assert stage.lacks(key) is not self.taken[-1]
            if self.taken[-1]:
                outbox.came_from_there(record)
        outbox.reconcile(shelf.for_giving())
        return stage, report

    def lose(self, *indices: int) -> None:
        """When their next frame comes."""
        for index in indices:
            stage = self._stages[index]
            assert stage is not None
            stage._compute = _failing  # type: ignore[method-assign]


def _failing(*_: Any) -> Any:
    raise RuntimeError("lost by the test")


class Served:
    def __init__(self, ring: MirroredRing) -> None:
        self.ring = ring
        self.driver = RingDriver("ring-0", ring, SETTINGS, SystemClock())
        self._said = 0

    async def turn(
        self, prompt: Sequence[int], *, reuse: bool = True
    ) -> tuple[tuple[int, ...], int]:
        """Its tokens, and how much was reused."""
        request = Request(tuple(prompt), max_new_tokens=8, reuse=reuse)
        tokens: list[int] = []
        cached = -1
        async with self.driver.submit(request) as stream:
            async for event in stream:
                if isinstance(event, Started):
                    cached = event.cached_prefix
                elif isinstance(event, TokenDelta):
                    tokens += event.tokens
        return tuple(tokens), cached

    async def conversation(self, *lost: int) -> int:
        """Its first turn, another one's that pushes it out of the only lane, the losses, and its second turn, which is
        that of a cold ring. Returns how many rows that reused.
        """
        self._said += 1
        prompt, other = (
            texts.novel(70, seed, VOCABULARY) for seed in (self._said, 1000 + self._said)
        )
        first, _ = await self.turn(prompt)
        await self.turn(other)
        self.ring.lose(*lost)
        second = (*prompt, *first, *NEWS)
        tokens, cached = await self.turn(second)
        assert tokens == (await self.turn(second, reuse=False))[0]
        return cached


@asynccontextmanager
async def served(
    model: Path, splits: Splits, slices: Slices, copies: int = BUDGET
) -> AsyncIterator[Served]:
    config = RingConfig(model, "tiny", splits, 1, 256, kv_host_bytes=BUDGET, mirror=True)
    it = Served(MirroredRing(config, slices, copies))
    await it.driver.start(lambda _: None)
    try:
        yield it
    finally:
        await it.driver.stop()


async def test_lost_stages_cost_no_row_that_was_in_host_memory(
    tiny_model: Path, slices: Slices
) -> None:
    async with served(tiny_model, ((0, 1), (1, 3), (3, 4)), slices) as it:
        undisturbed = await it.conversation()
        assert undisturbed == 64
        for lost in ((0,), (1,), (2,), (0,), (0, 1, 2)):
            assert await it.conversation(*lost) == undisturbed
        assert it.ring.taken
        assert all(it.ring.taken)


@pytest.mark.parametrize(
    ("splits", "losses"),
    [(((0, 2), (2, 4)), ((0, 1),)), (((0, 3), (3, 4)), ((0,), (1,)))],
    ids=["both recurrent", "one recurrent"],
)
async def test_recurrent_states_come_back_with_the_rows(
    tiny_hybrid: Path, splits: Splits, losses: tuple[tuple[int, ...], ...], slices: Slices
) -> None:
    """Also to a stage that has no rows, and beside one that has no states."""
    async with served(tiny_hybrid, splits, slices) as it:
        undisturbed = await it.conversation()
        assert undisturbed >= 64
        for lost in losses:
            assert await it.conversation(*lost) == undisturbed
        assert it.ring.taken
        assert all(it.ring.taken)


async def test_a_state_whose_rows_did_not_come_is_not_kept(
    tiny_hybrid: Path, slices: Slices
) -> None:
    """No drop would ever name it: it is in no ledger."""
    async with served(tiny_hybrid, ((0, 2), (2, 4)), slices) as it:
        await it.conversation()
        shelf, config = MirrorShelf(BUDGET), it.ring._config
        for said in told(it.ring.outboxes[0]):
            hear(shelf, said)
    ends = {key[0] for key in shelf.for_giving() if key[1] == STATE}
    stage, _ = open_stage(config, slices.load(config, 0), 2, Outbox())
    for end in ends:
        state, rows = shelf.get((end, STATE)), shelf.get((end, ROWS))
        assert state is not None
        assert rows is not None
        taken = [stage.take_back(each) for each in (state, rows, state)]
        assert taken == [False, True, True]
    assert set(stage.holding().checkpoints) == ends != set()


async def test_without_a_copy_all_is_computed_again(tiny_model: Path, slices: Slices) -> None:
    """The control of the tests above."""
    async with served(tiny_model, ((0, 2), (2, 4)), slices, copies=0) as it:
        assert await it.conversation() == 64
        assert await it.conversation(0) == 0


async def test_a_copy_of_a_part_gives_back_a_part(tiny_model: Path, slices: Slices) -> None:
    """Of a row, a layer keeps 256 bytes; two nodes of 16 rows are copied, of the first conversation."""
    async with served(tiny_model, ((0, 2), (2, 4)), slices, copies=2 * 16 * 2 * 256) as it:
        assert await it.conversation(0) == 32
        assert await it.conversation(1) == 0


async def test_a_damaged_copy_costs_what_hangs_on_it(
    tiny_model: Path, slices: Slices, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tiny_model, ((0, 2), (2, 4)), slices) as it:
        outbox = it.ring.outboxes[0]
        packed = outbox.take
        records = iter(range(100))

        def damaged(*arguments: Any) -> Any:
            said = packed(*arguments)
            if said is not None and next(records) == 2:
                said.payload[100] ^= 1
            return said

        outbox.take = damaged  # type: ignore[method-assign]
        assert await it.conversation(0) == 32
    assert "missed a mirrored node" in caplog.text
