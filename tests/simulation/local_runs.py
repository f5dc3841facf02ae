"""Whole runs of random turns over a ring of threads with a tiny model, from a seed: the fuzzer's, of a real ring. For
tests.

Every answer is held against a cold one: the same request, computed row by row on another ring that reuses nothing.
Threads make no two runs alike, so a seed fixes what is asked and what goes wrong, not when.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.errors import (
    Cancelled,
    ConstraintFailed,
    ContextTooLong,
    RingserveError,
    RingUnavailable,
    StageLost,
)
from coordinator.frames import LaneId
from coordinator.requests import Finished, Recovering, Request, Started, TokenDelta
from fakering.faults import (
    Delay,
    Drop,
    Duplicate,
    FaultScript,
    Lose,
    Reorder,
    Stall,
)
from fakering.plan import PlannedJob, random_plan
from stage.config import RingConfig
from stage.local_ring import LocalRing
from tests.simulation.faulty_local import FaultyRing

JOBS = 6
REST_S = 0.4
SETTINGS = SchedulerSettings(
    frame_rows=24,
    chunk_rows=8,
    min_chunk_rows=3,
    min_copy_rows=3,
    node_rows=8,
    reply_timeout_s=0.3,
    heal_backoff_s=0.01,
)
# Of a model that says anything, so that answers are of many lengths.
STOPS = frozenset(range(8))
PATIENCE_S = 60.0


@dataclass
class Turn:
    planned: PlannedJob
    request: Request | None = None
    tokens: list[int] = field(default_factory=list)
    started: Started | None = None
    finished: Finished | None = None
    error: RingserveError | None = None
    recoveries: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Run:
    turns: tuple[Turn, ...]
    epochs: int
    reused: int
    struck: tuple[str, ...]
    restarts: int


class Rig:
    """A ring that suffers, and one that nothing happens to."""

    def __init__(self, model: Path, splits: tuple[tuple[int, int], ...], vocab_size: int) -> None:
        sizes = {"lanes": 3, "max_rows": 128, "rest_s": REST_S}
        self.ring = FaultyRing(RingConfig(model, "tiny", splits, **sizes, kv_host_bytes=2**18))
        whole = ((0, splits[-1][1]),)
        self._cold = LocalRing(RingConfig(model, "tiny", whole, **sizes, kv_host_bytes=0))
        self._reference = RingDriver("cold", self._cold, SETTINGS, SystemClock())
        self._vocab_size = vocab_size
        self._known: dict[Request, tuple[int, ...]] = {}
        self.driver: RingDriver
        self._is_up = asyncio.Event()

    async def start(self) -> None:
        await self._reference.start(lambda _: None)
        await self._take_over()

    async def end(self) -> None:
        await self.driver.stop()
        await self._reference.stop()
        await self.ring.end()

    async def _take_over(self) -> None:
        self.driver = RingDriver("ring", self.ring, SETTINGS, SystemClock())
        await self.driver.start(lambda _: None)
        self._is_up.set()

    async def _restart(self) -> None:
        """The gateway is gone, and another one takes the ring over."""
        self._is_up.clear()
        await self.driver.stop()
        await self._take_over()

    async def play(self, seed: int) -> Run:
        """Raises AssertionError with the seed and what struck."""
        dice = random.Random(seed)
        head = dice.choice((0, 12, 30))
        plan = random_plan(seed, JOBS, self._vocab_size - 1, head=head)
        faults = random_faults(dice, self.ring.stages)
        try:
            return await self.play_plan(plan, faults, restarts=int(dice.random() < 0.25))
        except AssertionError as failed:
            raise AssertionError(f"seed {seed}: {failed}") from failed

    async def play_plan(
        self, plan: Sequence[PlannedJob], faults: FaultScript, restarts: int = 0
    ) -> Run:
        """On an empty ring. Raises AssertionError with what struck."""
        self._is_up.clear()
        await self.driver.stop()
        await self.ring.empty()
        await self._take_over()
        self.ring.struck.clear()
        self.ring.breaches.clear()
        self.ring.suffer(faults)
        opened = self.ring.opened
        turns = tuple(Turn(planned) for planned in plan)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._play(turns, restarts)
                for turn in turns:
                    await self._check(turn)
                await self._check_at_rest()
        except (AssertionError, TimeoutError) as failed:
            told = "\n  ".join(self.ring.struck) or "none"
            raise AssertionError(f"{failed!r}\nfaults that struck:\n  {told}") from failed
        reused = sum(turn.started.cached_prefix for turn in turns if turn.started)
        epochs = self.ring.opened - opened - restarts
        return Run(turns, epochs, reused, tuple(self.ring.struck), restarts)

    async def _play(self, turns: tuple[Turn, ...], restarts: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for turn in turns:
                tasks.create_task(self._turn(turn, turns))
            if restarts:
                await turns[len(turns) // 2].ended.wait()
                await self._restart()

    async def _turn(self, turn: Turn, turns: tuple[Turn, ...]) -> None:
        follows = turn.planned.follows
        earlier = None if follows is None else turns[follows]
        if earlier is not None:
            await earlier.ended.wait()
        before = (None, ()) if earlier is None else (earlier.request, earlier.tokens)
        turn.request = turn.planned.request(*before, STOPS)
        try:
            await self._ask(turn, turn.request)
        except (Cancelled, ContextTooLong, ConstraintFailed, RingUnavailable, StageLost) as error:
            turn.error = error
        finally:
            turn.ended.set()

    async def _ask(self, turn: Turn, request: Request) -> None:
        await self._is_up.wait()
        cancel_after = turn.planned.cancel_after_s
        async with self.driver.submit(request) as stream:
            async for event in stream:
                match event:
                    case Started():
                        assert turn.started is None
                        turn.started = event
                    case TokenDelta(tokens, _):
                        turn.tokens.extend(tokens)
                    case Recovering():
                        turn.recoveries += 1
                    case Finished():
                        turn.finished = event
                if cancel_after is not None and len(turn.tokens) > cancel_after * 20:
                    stream.cancel()

    # What has to be true

    async def _check(self, turn: Turn) -> None:
        assert turn.request is not None
        if isinstance(turn.error, ContextTooLong | RingUnavailable):
            assert not turn.tokens
            return
        expected = await self._cold_answer(turn.request)
        got = tuple(turn.tokens)
        assert got == expected[: len(got)], f"{got} for {expected} after {turn.request}"
        assert turn.finished is None or got == expected, f"{got} for {expected}"
        assert turn.finished is not None or turn.error is not None

    async def _cold_answer(self, request: Request) -> tuple[int, ...]:
        request = replace(request, reuse=False, draft=False, session=None, boundaries=(), anchor=0)
        if request not in self._known:
            turn = Turn(PlannedJob(0.0, ()))
            try:
                async with self._reference.submit(request) as stream:
                    async for event in stream:
                        if isinstance(event, TokenDelta):
                            turn.tokens.extend(event.tokens)
            except ConstraintFailed as error:
                turn.error = error
            self._known[request] = tuple(turn.tokens)
        return self._known[request]

    async def _check_at_rest(self) -> None:
        """The coordinator believes nothing of a stage that is not so."""
        await asyncio.to_thread(self.ring.settle)
        assert not self.ring.breaches, self.ring.breaches
        core = self.driver._scheduler
        assert core is not None
        for _ in range(10_000):
            if core.oldest_in_flight is None and not core.is_recovering:
                break
            await asyncio.sleep(0.002)
        assert core.oldest_in_flight is None
        assert core.down is None
        assert self.driver.idle
        for stage in self.ring.whole_stages():
            for lane in map(LaneId, range(core.ledger.lanes)):
                ours = core.ledger.tokens(lane)
                assert stage.ledger.tokens(lane)[: len(ours)] == ours
            nodes = {node.id for node in core.retention.index.nodes()}
            assert nodes <= set(stage.ledger.nodes.ids())
            assert not stage.store.missing(nodes)


def random_faults(dice: random.Random, stages: int) -> FaultScript:
    """What goes wrong between stages and in them, early enough to meet six short turns."""

    def one() -> Delay | Reorder | Drop | Duplicate | Stall | Lose:
        leg, stage, nth = dice.randrange(stages + 1), dice.randrange(stages), dice.randrange(70)
        seconds = dice.choice((0.01, 0.05, 0.2))
        return dice.choice(
            (
                Drop(leg, nth),
                Duplicate(leg, nth),
                Delay(leg, nth, seconds),
                Reorder(leg, nth, seconds),
                Stall(stage, nth, dice.choice((0.05, 2 * REST_S))),
                Lose(stage, nth, passes_on=dice.random() < 0.5),
            )
        )

    return tuple(one() for _ in range(dice.choice((0, 1, 2, 4))))


@asynccontextmanager
async def rig(
    model: Path, splits: tuple[tuple[int, int], ...], vocab_size: int
) -> AsyncIterator[Rig]:
    made = Rig(model, splits, vocab_size)
    await made.start()
    try:
        yield made
    finally:
        await made.end()
