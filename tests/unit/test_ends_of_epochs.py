"""What ends an epoch, a job or a ring, and what does not: nothing goes on for ever, and nothing is left behind."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable
from dataclasses import replace

import pytest

from coordinator.config import SchedulerSettings
from coordinator.drafters.none import NoDrafter
from coordinator.driver import RingDriver
from coordinator.errors import RingLost, RingUnavailable, StageLost
from coordinator.events import (
    Action,
    Emit,
    EpochOpened,
    Event,
    Fail,
    NodeDropped,
    OpenEpoch,
    ReplyArrived,
    RingBroken,
    Send,
    Submitted,
)
from coordinator.frames import (
    DropNodes,
    Epoch,
    Frame,
    JobId,
    Refusal,
    RefusalCode,
    Reply,
    SegmentReply,
)
from coordinator.held import NOTHING, Holding
from coordinator.nodes import Node, node_id, root_of
from coordinator.requests import Recovering, Request, TokenDelta
from coordinator.scheduler import Scheduler
from fakering.clock import VirtualClock
from fakering.model import FakeModel
from fakering.ring import FakeRing, describe

SETTINGS = SchedulerSettings(
    frame_rows=8, chunk_rows=4, min_chunk_rows=2, heal_attempts=3, node_rows=4, min_copy_rows=1
)
INFO = describe("fake", FakeModel(vocab_size=50), 1, 2, 64)
PROMPT = tuple(range(1, 41))


class Bare:
    """A scheduler whose ring is played by hand."""

    def __init__(self, held: Holding = NOTHING, host_rows: int = 0) -> None:
        info = replace(INFO, held=held, host_rows=host_rows)
        self.scheduler = Scheduler("ring-0", info, SETTINGS)
        self.actions: list[Action] = []
        self.sent: list[Frame] = []

    def feed(self, event: Event) -> list[Action]:
        actions = self.scheduler.on(event)
        self.actions += actions
        if any(isinstance(action, OpenEpoch) for action in actions):
            self.sent.clear()
        self.sent += [action.frame for action in actions if isinstance(action, Send)]
        return actions

    def submit(self, job: int, prompt: Iterable[int] = PROMPT) -> None:
        request = Request(tuple(prompt), max_new_tokens=9, draft=False)
        self.feed(Submitted(JobId(job), request, NoDrafter(), 0.0))

    def reply(self, token: int | None = 7, refusals: tuple[Refusal, ...] = ()) -> list[Action]:
        """To the oldest frame. No token: where there should be one, it lacks."""
        frame = self.sent.pop(0)
        told = () if token is None else (token,)
        parts = tuple(
            SegmentReply(s.lane, s.job, s.start, told if s.sampling is not None else ())
            for s in frame.segments
        )
        return self.feed(ReplyArrived(Reply(frame.epoch, frame.seq, parts, (), refusals), 1.0))

    def lose(self, now: float = 1.0) -> list[Action]:
        return self.feed(RingBroken(self.scheduler.ledger.epoch, "stage 0: died", now))

    def heal(self, held: Holding = NOTHING, now: float = 1.0) -> list[Action]:
        return self.feed(EpochOpened(self.scheduler.ledger.epoch, held, now))


def failed(actions: Iterable[Action]) -> list[JobId]:
    return [a.job for a in actions if isinstance(a, Fail) and isinstance(a.error, StageLost)]


def test_a_prompt_that_ends_a_stage_each_time_is_given_up_and_the_ring_is_not() -> None:
    """Its first chunks are answered: every opening looks like a success."""
    ring = Bare()
    ring.submit(1)
    for _ in range(SETTINGS.heal_attempts):
        ring.reply()
        assert failed(ring.lose()) == []
        ring.heal()
    ring.reply()
    assert failed(ring.lose()) == [1]
    assert (ring.scheduler.waiting, ring.scheduler.running) == (0, 0)
    ring.heal()
    assert ring.scheduler.down is None
    ring.submit(2, range(1, 4))
    assert ring.sent, "others are served"


def test_a_job_that_gets_on_between_losses_is_given_up_never() -> None:
    ring = Bare()
    ring.submit(1, range(1, 4))
    for _ in range(2 * SETTINGS.heal_attempts):
        assert any(isinstance(a, Emit) and isinstance(a.event, TokenDelta) for a in ring.reply())
        told = [a.event for a in ring.lose() if isinstance(a, Emit)]
        assert told == [Recovering("stage 0: died")]
        ring.heal()


def waits(actions: Iterable[Action]) -> list[float]:
    return [action.delay_s for action in actions if isinstance(action, OpenEpoch)]


def test_losses_of_an_idle_ring_that_are_hours_apart_are_not_taken_together() -> None:
    """Nobody asked anything meanwhile, so no reply could show that it was well."""
    ring = Bare()
    for hour in range(3 * SETTINGS.heal_attempts):
        assert waits(ring.lose(3600.0 * hour)) == [0.0]
        ring.heal(now=3600.0 * hour + 20.0)
    assert ring.scheduler.down is None


def test_an_idle_ring_that_is_lost_as_soon_as_it_is_whole_is_given_up() -> None:
    ring, told = Bare(), []
    for minute in range(SETTINGS.heal_attempts + 1):
        told += waits(ring.lose(60.0 * minute))
        ring.heal(now=60.0 * minute + 50.0)
    assert told == [0.0, 0.5, 1.0]
    assert ring.scheduler.down is not None


def test_replies_that_lack_tokens_are_no_sign_of_health() -> None:
    ring = Bare()
    ring.submit(1, range(1, 4))
    delays = []
    while ring.scheduler.down is None:
        for opens in [a for a in ring.reply(token=None) if isinstance(a, OpenEpoch)]:
            delays.append(opens.delay_s)
            ring.heal()
    assert delays == [0.0, 0.5, 1.0]


def test_a_drop_in_a_frame_that_was_refused_as_a_whole_is_sent_again() -> None:
    root = root_of(INFO.model_fingerprint)
    tokens = array("i", PROMPT[:4])
    node = Node(node_id(root, tokens), root, 0, tokens)
    held = Holding(nodes=(node,))
    ring = Bare(held, host_rows=100)
    ring.feed(NodeDropped(node.id, 1.0))
    assert ring.sent[0].ops == (DropNodes((node.id,)),)
    refusal = Refusal(RefusalCode.BAD_FRAME, 0, None, "planted")
    assert any(isinstance(action, OpenEpoch) for action in ring.reply(refusals=(refusal,)))
    ring.heal(held)
    assert node.id not in ring.scheduler.retention.index
    assert ring.sent[0].ops == (DropNodes((node.id,)),)


def test_what_a_waiting_job_needs_is_looked_up_again_when_other_rows_are_held() -> None:
    ring = Bare()
    for job in range(4):
        ring.submit(job, range(job, job + 20))
    waiting = list(ring.scheduler._queue)
    assert waiting
    for job in waiting:
        job.fresh = 1
    ring.lose()
    ring.heal()
    assert [job.fresh for job in waiting] == [None] * len(waiting)


# In the driver


async def _tokens(driver: RingDriver, tokens: int = 12) -> list[int]:
    told: list[int] = []
    async for event in driver.submit(Request(PROMPT, max_new_tokens=tokens)):
        told += event.tokens if isinstance(event, TokenDelta) else ()
    return told


async def _started(ring: FakeRing, clock: VirtualClock) -> RingDriver:
    driver = RingDriver("ring-0", ring, SchedulerSettings(reply_timeout_s=5.0), clock)
    await driver.start(lambda progress: None)
    return driver


async def test_a_fault_of_ours_in_reading_a_reply_ends_the_epoch_at_once_and_no_turn() -> None:
    class Faulty(FakeRing):
        read = 0

        async def next_reply(self) -> Reply:
            self.read += 1
            if self.read == 3:
                raise ZeroDivisionError("planted")
            return await super().next_reply()

    clock = VirtualClock()
    ring = Faulty(2, 2, 256, vocab_size=90, clock=clock, step_s=0.1)
    driver = await _started(ring, clock)
    assert tuple(await clock.drive(_tokens(driver))) == ring.language.oracle(PROMPT, 12)
    assert driver.status().epoch == 1
    assert clock.now() < 5.0, "nobody waited for a reply to be overdue"
    await driver.stop()


async def test_a_loss_while_a_ring_is_stopped_opens_no_epoch() -> None:
    stopping = asyncio.Event()

    class Slow(FakeRing):
        opened = 0

        async def next_reply(self) -> Reply:
            try:
                return await super().next_reply()
            finally:
                if stopping.is_set():
                    await asyncio.sleep(0)

        async def open_epoch(self, epoch: Epoch) -> Holding:
            self.opened += 1
            return await super().open_epoch(epoch)

    clock = VirtualClock()
    ring = Slow(2, 2, 256, vocab_size=90, clock=clock, step_s=0.1)
    driver = await _started(ring, clock)
    tasks = asyncio.all_tasks()
    stopping.set()
    ends = asyncio.ensure_future(driver.stop())
    await asyncio.sleep(0)
    ring._go_down(RingLost(1, "died"))
    with pytest.raises((RingUnavailable, StageLost)):
        await _tokens(driver)
    await ends
    await clock.settle()
    assert ring.opened == 0
    assert asyncio.all_tasks() <= tasks


async def test_a_fault_without_words_leaves_the_ring_down_and_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = VirtualClock()
    driver = await _started(FakeRing(1, 1, 64, vocab_size=90, clock=clock), clock)
    monkeypatch.setattr(Scheduler, "_submit", _wordless)
    with pytest.raises(StageLost):
        await _tokens(driver)
    status = driver.status()
    assert (status.ready, status.reason) == (False, "AssertionError: ")
    await driver.stop()


def _wordless(self: Scheduler, event: Submitted) -> None:
    raise AssertionError
