"""Where rows depend on the shapes they were computed in, an idle ring makes generated ones anew, as a cold run does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.foresight import Foresight, Wish
from coordinator.frames import (
    Epoch,
    Frame,
    JobId,
    LaneId,
    OpenLane,
    Segment,
    SegmentKind,
    Seq,
)
from coordinator.lanes import LaneChoice, LaneTable
from coordinator.ledger import Ledger
from coordinator.nodes import root_of
from coordinator.prefixes import digest_of
from coordinator.requests import GREEDY, Request, SessionId, TokenDelta
from fakering.model import FakeModel
from fakering.ring import describe
from fakering.texts import novel
from stage.config import RingConfig
from stage.local_ring import LocalRing

_SETTINGS = SchedulerSettings(chunk_rows=32, min_chunk_rows=8)
_SESSION = SessionId("s")
_PROMPT = novel(100, 1, 199)
_BOUNDARIES = (0, 40, 92)
_ANSWER = 50


class _Ring:
    """A ring of unpadded, so shape-dependent slices, and the logits that its tail sampled from."""

    def __init__(self, model: Path) -> None:
        config = RingConfig(model, "tiny", ((0, 2), (2, 4)), 2, 512, numerics="fast")
        self._ring = LocalRing(config)
        self.driver = RingDriver("ring", self._ring, _SETTINGS, SystemClock())
        self._logits: list[Tensor] = []

    async def start(self) -> None:
        await self.driver.start(lambda progress: None)
        memos = self._ring._threads[-1].stage._memos
        merged = memos.sampled

        def seen(taken: tuple[Segment, ...], logits: Tensor | None) -> Tensor | None:
            output = merged(taken, logits)
            if output is not None and len(output):
                self._logits.append(output[-1].clone())
            return output

        memos.sampled = seen  # type: ignore[method-assign]

    async def ask(self, request: Request) -> tuple[tuple[int, ...], Tensor]:
        self._logits.clear()
        tokens: list[int] = []
        async with self.driver.submit(request) as stream:
            async for event in stream:
                if isinstance(event, TokenDelta):
                    tokens += event.tokens
        return tuple(tokens), self._logits[0]

    async def idle(self) -> None:
        """Until nothing is computed ahead any more."""
        before = -1
        while (rows := self.driver.status().counts.ahead_rows) != before or not rows:
            before = rows
            await asyncio.sleep(0.2)


@asynccontextmanager
async def _ring(model: Path) -> AsyncIterator[_Ring]:
    ring = _Ring(model)
    await ring.start()
    try:
        yield ring
    finally:
        await ring.driver.stop()


async def _two_turns(ring: _Ring, *, foreseen: bool, evicted: bool = False) -> tuple[bool, int]:
    """Whether the second turn's logits are a cold run's, bit for bit, and how many rows were made ahead."""
    first = Request(_PROMPT, GREEDY, _ANSWER, session=_SESSION, draft=False, boundaries=_BOUNDARIES)
    answer, _ = await ring.ask(first)
    said = (*_PROMPT, *answer)
    boundaries = (*_BOUNDARIES, len(said))
    if foreseen:
        ring.driver.foresee(Wish(_SESSION, (*said, 7, 8), boundaries))
        await ring.idle()
    for other in range(2 if evicted else 0):
        await ring.ask(Request(novel(60, 9 + other, 199), GREEDY, 2, session=SessionId(str(other))))
    second = (*said, 7, 8, *novel(30, 2, 199))
    asked = Request(second, GREEDY, 2, session=_SESSION, draft=False, boundaries=boundaries)
    _, warm = await ring.ask(asked)
    cold = Request(second, GREEDY, 2, draft=False, reuse=False, boundaries=boundaries)
    _, fresh = await ring.ask(cold)
    _, again = await ring.ask(cold)
    assert torch.equal(fresh, again), "cold runs differ: this verdict would mean nothing"
    return torch.equal(warm, fresh), ring.driver.status().counts.ahead_rows


async def test_generated_rows_become_those_of_a_cold_run(tiny_model: Path) -> None:
    async with _ring(tiny_model) as ring:
        assert ring.driver.remakes_rows
        same, rows = await _two_turns(ring, foreseen=True)
        assert same
        # From the first cut of the prompt's plan that the prompt's end made, and no row of it before.
        assert rows == _ANSWER + len(_PROMPT) - _BOUNDARIES[-1]


async def test_rows_made_anew_are_those_that_the_store_keeps(tiny_model: Path) -> None:
    async with _ring(tiny_model) as ring:
        same, _ = await _two_turns(ring, foreseen=True, evicted=True)
        assert ring.driver.status().counts.restored_rows > 100
        assert same


async def test_the_test_above_could_fail(tiny_model: Path) -> None:
    async with _ring(tiny_model) as ring:
        same, rows = await _two_turns(ring, foreseen=False)
        assert (same, rows) == (False, 0)


def _foresight(*, exact: bool, state_rows: int = 0) -> tuple[Foresight, Ledger]:
    """A session's lane with a prompt of 100 rows and 50 generated ones behind it."""
    info = replace(describe("fake", FakeModel(vocab_size=200), 1, 1, 512), exact=exact)
    ledger = Ledger(1, 512, state_rows=state_rows)
    lanes = LaneTable(ledger, 8)
    rows = (*_PROMPT, *range(_ANSWER))
    opening = OpenLane(LaneId(0), JobId(1), 0, digest_of(()), root_of(info.model_fingerprint))
    segment = Segment(LaneId(0), JobId(1), 0, rows, SegmentKind.PREFILL)
    ledger.apply(Frame(Epoch(0), Seq(0), (opening,), (segment,)))
    lanes.take(LaneChoice(LaneId(0), 0), JobId(1), _SESSION)
    lanes.release(LaneId(0))
    foresight = Foresight(ledger, lanes, _SETTINGS, info)
    foresight.ended(Request(_PROMPT, session=_SESSION, boundaries=_BOUNDARIES), 0)
    return foresight, ledger


def _wish(*extra: int) -> Wish:
    rows = (*_PROMPT, *range(_ANSWER))
    return Wish(_SESSION, (*rows, *extra), (*_BOUNDARIES, len(rows)))


def test_an_exact_ring_makes_no_row_twice() -> None:
    foresight, _ = _foresight(exact=True)
    foresight.wish(_wish())
    assert foresight.next_step() is None


def test_recurrent_layers_that_cannot_go_back_keep_their_rows() -> None:
    foresight, _ = _foresight(exact=False, state_rows=16)
    foresight.wish(_wish(7, 8))
    assert foresight.next_step() is None


@pytest.mark.parametrize(("cached", "start"), [(0, 92), (92, 92), (95, 92), (40, 92), (50, 40)])
def test_rows_are_made_anew_from_the_last_whole_chunk(cached: int, start: int) -> None:
    """A job that began in the middle of a chunk made another shape of it than the whole one."""
    foresight, _ = _foresight(exact=False)
    foresight.ended(Request(_PROMPT, session=_SESSION, boundaries=_BOUNDARIES), cached)
    foresight.wish(_wish(7, 8))
    step = foresight.next_step()
    assert step is not None
    assert step.opening.cached_prefix == start


def test_what_a_stage_refuses_is_not_wished_for_again() -> None:
    foresight, ledger = _foresight(exact=True)
    foresight.wish(_wish(7, 8))
    assert foresight.next_step() is not None
    foresight.refused(LaneId(0))
    assert foresight.next_step() is None
    assert ledger.valid_rows(LaneId(0)) == 0
