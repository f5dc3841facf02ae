"""A thousand turns that end anyhow, in virtual time: none leaves a lane, a task, a timer or a queue entry behind."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref

from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.errors import Cancelled, DeadlineExceeded, QueueFull, RingserveError
from coordinator.requests import Finished, Request, SessionId, TokenDelta
from coordinator.streams import JobStream
from fakering.clock import VirtualClock
from fakering.model import FakeModel
from fakering.ring import FakeRing
from fakering.texts import novel

_MODEL = FakeModel(vocab_size=80, seed=9)
_SETTINGS = SchedulerSettings(
    frame_rows=48, chunk_rows=16, min_chunk_rows=4, min_copy_rows=4, queue_limit=8
)
_HEAD = novel(40, 1, 80)
_MUCH_LATER = 1e6


class _Turn:
    """A turn, its stream, and what came of it."""

    def __init__(self, request: Request, stream: JobStream) -> None:
        self.request = request
        self.stream = stream
        self.tokens: list[int] = []
        self.end: Finished | RingserveError | None = None

    def read(self) -> None:
        """Takes what has come; never waits."""
        while self.end is None:
            step = anext(self.stream)
            try:
                step.send(None)
                step.close()
                return  # it waits for news
            except StopIteration as told:
                if isinstance(told.value, TokenDelta):
                    self.tokens.extend(told.value.tokens)
                elif isinstance(told.value, Finished):
                    self.end = told.value
            except RingserveError as error:
                self.end = error

    def check(self) -> None:
        expected = _MODEL.oracle(self.request.prompt, self.request.max_new_tokens)
        got = tuple(self.tokens)
        assert got == expected[: len(got)]
        assert not isinstance(self.end, Finished) or got == expected


def _request(dice: random.Random, now: float) -> Request:
    tail = tuple(dice.randrange(80) for _ in range(dice.randint(1, 30)))
    session = SessionId(f"s{dice.randrange(12)}") if dice.random() < 0.7 else None
    deadline = now + dice.uniform(0.0, 1.0) if dice.random() < 0.5 else None
    return Request(
        (*_HEAD[: dice.randint(0, 40)], *tail),
        max_new_tokens=dice.randint(1, 60),
        session=session,
        draft=dice.random() < 0.7,
        deadline_s=deadline,
        priority=dice.randint(-2, 2),
    )


async def _churn(
    driver: RingDriver, clock: VirtualClock, dice: random.Random, turns: int
) -> tuple[list[_Turn], int]:
    """Submits, cancels, closes sessions and lets time go by; returns the turns and how many found the queue full."""
    played: list[_Turn] = []
    live: list[_Turn] = []
    full = 0
    while len(played) < turns:
        request = _request(dice, clock.now())
        try:
            live.append(_Turn(request, driver.submit(request)))
            played.append(live[-1])
        except QueueFull:
            full += 1
        if live and dice.random() < 0.4:
            dice.choice(live).stream.cancel()
        if dice.random() < 0.02:
            driver.close_session(SessionId(f"s{dice.randrange(12)}"))
        clock.advance(dice.choice((0.0, 0.02, 0.2)))
        for _ in range(4):
            await asyncio.sleep(0)
        for turn in live:
            turn.read()
        live = [turn for turn in live if turn.end is None]
    return played, full


async def test_1000_cancels_and_deadlines_leave_nothing_behind() -> None:
    clock, dice = VirtualClock(), random.Random(1)
    ring = FakeRing(
        2, 3, 256, vocab_size=80, clock=clock, step_s=0.01, row_s=0.001, language=_MODEL
    )
    driver = RingDriver("ring", ring, _SETTINGS, clock)
    await driver.start(lambda progress: None)
    tasks = asyncio.all_tasks()
    played, full = await _churn(driver, clock, dice, 1300)
    await clock.run_until_idle()
    for turn in played:
        turn.read()
        turn.check()
    ends = [type(turn.end) for turn in played]
    assert set(ends) == {Cancelled, DeadlineExceeded, Finished}
    assert ends.count(Cancelled) + ends.count(DeadlineExceeded) >= 1000
    assert min(ends.count(kind) for kind in set(ends)) > 30
    assert full > 0
    status = driver.status()
    assert (status.busy_lanes, status.running_jobs, status.waiting_jobs) == (0, 0, 0)
    assert status.epoch == 0
    assert status.counts.refusals == 0
    assert clock.next_due() is None, "a timer is left"
    assert asyncio.all_tasks() == tasks
    _assert_lanes_are_free(driver)
    await _assert_replicas_agree(driver, ring, clock)
    await driver.stop()


def _assert_lanes_are_free(driver: RingDriver) -> None:
    requests = [Request((n, n + 1), max_new_tokens=100, deadline_s=_MUCH_LATER) for n in range(3)]
    streams = [driver.submit(request) for request in requests]
    assert driver.status().busy_lanes > 0
    for stream in streams:
        stream.cancel()
    assert driver.status().busy_lanes == 0


async def _assert_replicas_agree(driver: RingDriver, ring: FakeRing, clock: VirtualClock) -> None:
    """After all this the rows are still what the ledgers say: a turn is reused, and right."""
    await clock.run_until_idle()
    assert clock.now() < _MUCH_LATER, "a deadline outlived its job"
    prompt = novel(60, 77, 80)
    for _ in range(2):
        turn = _Turn(request := Request(prompt, max_new_tokens=20), driver.submit(request))
        await clock.run_until_idle()
        turn.read()
        turn.check()
    assert isinstance(turn.end, Finished)
    assert turn.end.usage.cached_prefix == 60, "all rows, and the memo of the last one"


async def test_no_stream_outlives_its_turn() -> None:
    """A reference that is forgotten somewhere keeps a turn's tokens alive."""
    seen: list[weakref.ref[object]] = []
    clock, dice = VirtualClock(), random.Random(3)
    ring = FakeRing(2, 3, 256, vocab_size=80, clock=clock, step_s=0.01, language=_MODEL)
    driver = RingDriver("ring", ring, _SETTINGS, clock)
    await driver.start(lambda progress: None)
    for number in range(60):
        stream = driver.submit(_request(dice, clock.now()))
        seen.append(weakref.ref(stream))
        if number % 3:
            clock.advance(0.02 * (number % 7))
            await clock.settle()
            stream.cancel()
        else:
            await clock.run_until_idle()
    del stream
    await clock.run_until_idle()
    gc.collect()
    assert [ref for ref in seen if ref() is not None] == []
    await driver.stop()
