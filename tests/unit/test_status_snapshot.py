"""What the status page is told: figures of rings, stages and lanes, and no text and no session's name."""

from __future__ import annotations

import json
import random
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.counts import RingCounts
from coordinator.driver import RingDriver
from coordinator.requests import Miss, MissKind, Request, SamplingSpec, SessionId, TokenDelta
from coordinator.ring import StageProgress
from coordinator.router import Router
from fakering.model import FakeModel
from fakering.ring import FakeRing
from gateway.chat.byte_tokenizer import ByteTokenizer
from gateway.http.status.snapshot import Snapshots, miss_words
from gateway.observing.sights import Sights
from gateway.service import GenerationService
from gateway.turns import TextPrompt, TurnRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from coordinator.status import RingStatus
    from gateway.http.status.snapshot import RingView

SECRET = "the prompt's own words"
ALICE = SessionId("alice@example.org")


class House:
    def __init__(self) -> None:
        clock = SystemClock()
        language = FakeModel(258, low=32, high=127)
        ring = FakeRing(3, 2, 256, vocab_size=258, language=language, host_rows=512)
        self.driver = RingDriver("ring-0", ring, SchedulerSettings(), clock)
        router = Router([self.driver], session_limit=8)
        self.sights = Sights()
        rng, turns = random.Random(7), (self.sights.turns,)
        self.service = GenerationService("fake", router, ByteTokenizer(), clock, rng, turns)
        self.now = 100.0
        self.snapshots = Snapshots(self.service, self.sights, lambda: self.now, lambda: 5000.0)

    async def run(self, text: str, tokens: int = 4) -> None:
        sampling = SamplingSpec(temperature=0.0)
        turn = TurnRequest(
            TextPrompt(text), session=ALICE, sampling=sampling, max_tokens=tokens, ignore_eos=True
        )
        async with aclosing(self.service.generate(turn)) as events:
            async for _ in events:
                pass

    def ring(self) -> RingView:
        (ring,) = self.snapshots.take().rings
        return ring


@asynccontextmanager
async def house() -> AsyncIterator[House]:
    made = House()
    await made.driver.start(made.sights.loading.sink("ring-0"))
    try:
        yield made
    finally:
        await made.driver.stop()


async def test_lanes_tell_whose_rows_they_hold_and_how_many_were_reused() -> None:
    async with house() as made:
        await made.run(SECRET)
        first = made.ring().lanes[0]
        await made.run(SECRET + " and more")
        lane, empty = made.ring().lanes
        assert (first.state, first.reused_rows) == ("resting", 0)
        assert first.valid_rows >= len(SECRET)
        assert (lane.lane, lane.state) == (0, "resting")
        assert lane.session == made.sights.turns.digest(ALICE)
        assert len(SECRET) <= lane.reused_rows < lane.valid_rows
        assert (empty.state, empty.session, empty.valid_rows) == ("empty", None, 0)


async def test_counts_and_turns_are_told_and_no_text_and_no_name() -> None:
    async with house() as made:
        await made.run(SECRET)
        await made.run(SECRET + " and more")
        raw = made.snapshots.encoded()
        told = json.loads(raw)
        (ring,) = told["rings"]
        assert (told["at"], told["model"], ring["state"]) == (5000.0, "fake", "ready")
        assert ring["reused_rows"] >= len(SECRET)
        # The client did not say again what had been answered.
        assert ring["misses"] == {"new_session": 1, "diverged": 1}
        assert ring["store"]["room"] == 512
        later, first = told["turns"]
        assert (first["cached_prefix"], first["why"]) == (0, "first turn of its session")
        assert later["cached_prefix"] >= len(SECRET)
        assert later["why"] == f"differs from token {later['cached_prefix']} on"
        assert later["outcome"] == "length limit"
        assert b"alice" not in raw
        assert b"own words" not in raw


async def test_a_lane_shows_whether_its_job_has_a_token_yet() -> None:
    async with house() as made:
        request = Request((1, 2, 3), session=ALICE, max_new_tokens=200)
        async with made.driver.submit(request) as stream:
            assert made.ring().lanes[0].state == "prefill"
            async for event in stream:
                if isinstance(event, TokenDelta):
                    break
            assert made.ring().lanes[0].state == "decode"
        assert made.ring().lanes[0].state == "resting"


def busied(status: RingStatus, busy_s: tuple[float, ...]) -> RingStatus:
    return replace(status, counts=RingCounts(stage_busy_s=busy_s))


async def test_a_stage_is_busy_by_what_it_computed_in_the_last_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with house() as made:
        status = made.driver.status()
        counted = (10.0, 10.0, 10.0)
        monkeypatch.setattr(made.driver, "status", lambda: busied(status, counted))
        assert [stage.busy for stage in made.ring().stages] == [None, None, None]
        made.now, counted = 102.0, (10.5, 10.0, 12.9)
        # What a long frame computed before the first look counts when it is answered.
        assert [stage.busy for stage in made.ring().stages] == [0.25, 0.0, 1.0]
        for second in range(103, 120):
            made.now, counted = float(second), (10.5, 10.0 + (second - 102) * 0.5, 12.9)
            busy = [stage.busy for stage in made.ring().stages]
        assert busy == [0.0, 0.5, 0.0], "what lies behind the window is forgotten"
        assert [stage.device for stage in made.ring().stages] == ["fake", "fake", "fake"]


async def test_a_ring_that_loads_shows_how_far_its_stages_are() -> None:
    made = House()
    assert (made.ring().state, made.ring().stages) == ("loading", ())
    sink = made.sights.loading.sink("ring-0")
    sink(StageProgress(1, 10, 40, "weights"))
    sink(StageProgress(0, 20, 40, "weights"))
    sink(StageProgress(1, 30, 40, "probe"))
    told = [(s.stage, s.bytes_done, s.bytes_total, s.note) for s in made.ring().stages]
    assert told == [(0, 20, 40, "weights"), (1, 30, 40, "probe")]
    assert made.ring().lanes == ()
    await made.driver.stop()


async def test_a_ring_that_drains_or_is_lost_says_so() -> None:
    async with house() as made:
        made.driver.drain()
        assert made.ring().state == "draining"
    assert made.ring().state == "draining"
    async with house() as other:
        await other.driver.stop()
        down = other.ring()
        assert (down.state, down.reason) == ("down", "the ring was stopped")


@pytest.mark.parametrize(
    ("miss", "words"),
    [
        (Miss(MissKind.DIVERGED, 12, 3), "differs from token 12 on, in messages[3]"),
        (Miss(MissKind.DIVERGED, 12), "differs from token 12 on"),
        *((Miss(kind), None) for kind in MissKind),
    ],
)
def test_every_miss_has_words(miss: Miss, words: str | None) -> None:
    said = miss_words(miss)
    assert said == words if words else len(said) > 10
