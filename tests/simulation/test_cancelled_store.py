"""Turns over a small chain store, cancelled at every point at which they can be: nothing leaks.

The real driver on a fake ring of three stages, in virtual time, with fewer lanes than sessions and a store of a few
nodes: rows are stored, given up and loaded all the time. A turn is played again and again, cancelled a point later each
time, while stages lose nodes, keep nothing, or answer late or never, and an operator meddles. Hypothesis draws what
goes wrong; every point is visited for each of its draws.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.errors import Cancelled, InvalidValue
from coordinator.foresight import Wish
from coordinator.frames import JobId, LaneId
from coordinator.requests import Finished, Request, SessionId, TokenDelta
from fakering.cancelling import Cut, Steps, When
from fakering.clock import VirtualClock
from fakering.faults import Delay, Drop, Fault, KeepNothing, LoseNode
from fakering.model import FakeModel
from fakering.texts import novel
from fakering.watched import WatchedRing

STAGES, LANES, MAX_ROWS, HOST_ROWS = 3, 2, 64, 96
SESSIONS = 4
MODEL = FakeModel(vocab_size=50, seed=4)
SETTINGS = SchedulerSettings(
    frame_rows=16, chunk_rows=8, min_chunk_rows=2, min_copy_rows=3, node_rows=4, reply_timeout_s=2.0
)
HEAD = novel(8, 1, 50)
ANSWER = 6
# Turns of the loop in which all that a frame's arrival sets off has happened.
TURNS = 10
# Draws for each kind of trouble and of cut.
DRAWS = 2
# More points than any turn here has.
MOST_POINTS = 300


@dataclass(frozen=True)
class Meanwhile:
    """A cut between two things that happen on the ring, wherever the turn waits then."""

    at: int


@dataclass(frozen=True)
class OneWait:
    """One wait is given up when its news have come, and the turn goes on."""

    at: int


AnyCut = Cut | Meanwhile | OneWait
WAYS: dict[str, Callable[[int], AnyCut]] = {
    "at once": lambda at: Cut(at, When.AT_ONCE),
    "with the news": lambda at: Cut(at, When.WITH_THE_NEWS),
    "meanwhile": Meanwhile,
    "one wait": OneWait,
}


@dataclass
class Turn:
    request: Request
    cut: AnyCut | None = None
    tokens: list[int] = field(default_factory=list)
    end: Finished | None = None
    was_cut: bool = False
    job: JobId | None = None
    task: asyncio.Task[None] = field(init=False)

    def begin(self, driver: RingDriver) -> None:
        work = self._play(driver)
        match self.cut:
            case Cut():
                work = Steps(work, self.cut).run()
            case OneWait(at):
                work = Steps(work, Cut(at, When.WITH_THE_NEWS)).run()
        self.task = asyncio.create_task(work)

    async def _play(self, driver: RingDriver) -> None:
        async with driver.submit(self.request) as stream:
            self.job = stream.job
            while self.end is None:
                try:
                    event = await anext(stream)
                except asyncio.CancelledError:
                    self.was_cut = True
                    if not isinstance(self.cut, OneWait):
                        raise
                    continue
                if isinstance(event, TokenDelta):
                    self.tokens.extend(event.tokens)
                elif isinstance(event, Finished):
                    self.end = event

    def check(self, *may_raise: type[Exception]) -> None:
        """What it was told is right, and all of it unless the turn was cut."""
        expected, got = MODEL.oracle(self.request.prompt, ANSWER), tuple(self.tokens)
        assert got == expected[: len(got)]
        assert self.task.done(), "it waits for ever"
        if self.end is not None:
            assert got == expected
        elif self.task.cancelled():
            assert self.was_cut
        else:
            assert isinstance(self.task.exception(), may_raise), repr(self.task.exception())


@dataclass(frozen=True)
class Trouble:
    """What goes wrong beside a turn: at a stage, or by an operator's hand when so much has happened."""

    kind: str
    nth: int = 0
    stage: int = 0
    seconds: float = 0.0

    def fault(self) -> Fault | None:
        match self.kind:
            case "loses":
                return LoseNode(self.stage, self.nth, which=self.nth)
            case "keeps nothing":
                return KeepNothing(self.stage, self.nth)
            case "late":
                return Delay(self.stage + 1, self.nth, self.seconds)
            case "never":
                return Drop(self.stage + 1, self.nth)
        return None


FAULTS = ["loses", "keeps nothing", "late", "never"]
MEDDLING = ["drops", "pins", "closes", "foresees"]


def trouble_of(kind: str) -> st.SearchStrategy[Trouble]:
    if kind in MEDDLING:
        return st.builds(Trouble, st.just(kind), st.integers(1, 40))
    in_frames, in_stages = st.integers(0, 12), st.integers(0, STAGES - 1)
    return st.builds(
        Trouble, st.just(kind), in_frames, in_stages, st.sampled_from([0.02, 0.3, 3.0])
    )


anything = st.lists(st.sampled_from(FAULTS + MEDDLING).flatmap(trouble_of), max_size=2)


class World:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.clock = VirtualClock()
        shape = {"language": MODEL, "host_rows": HOST_ROWS, "step_s": 0.01, "row_s": 0.001}
        self.ring = WatchedRing(STAGES, LANES, MAX_ROWS, clock=self.clock, **shape)
        self.driver = RingDriver("ring", self.ring, SETTINGS, self.clock)
        self.partial = 0  # moments at which some stages had a node and others not

    async def start(self) -> None:
        await self.driver.start(lambda progress: None)
        self.core = self.driver._scheduler
        assert self.core is not None
        self.index = self.core.retention.index
        for _ in range(3):
            await self.play(None, (), ahead=1)

    def request(self) -> Request:
        """Of one of more sessions than lanes, most of which begin alike."""
        number = self.dice.randrange(SESSIONS)
        head = HEAD if number else ()
        fresh = tuple(self.dice.randrange(50) for _ in range(self.dice.randint(2, 14)))
        return Request(
            (*head, *novel(9, 10 + number, 50), *fresh),
            max_new_tokens=ANSWER,
            anchor=len(head),
            session=SessionId(f"s{number}") if number < SESSIONS - 1 else None,
            draft=self.dice.random() < 0.5,
        )

    def begin(self, request: Request, cut: AnyCut | None = None) -> Turn:
        turn = Turn(request, cut)
        turn.begin(self.driver)
        return turn

    async def step(self) -> bool:
        """Lets the next thing happen; False when nothing will."""
        for _ in range(TURNS):
            await asyncio.sleep(0)
        self.check_published()
        due = self.clock.next_due()
        if due is not None:
            self.clock.advance_to(due)
        return due is not None

    async def play(self, cut: AnyCut | None, troubles: Sequence[Trouble], ahead: int) -> Turn:
        """A turn beside others, cut or not; when all is at rest the same is asked again, and nothing goes wrong."""
        self.ring.suffer([fault for t in troubles if (fault := t.fault()) is not None])
        turns = [self.begin(self.request()) for _ in range(ahead)]
        turns.append(turn := self.begin(self.request(), cut))
        happened = 0
        while await self.step():
            happened += 1
            if isinstance(cut, Meanwhile) and happened == cut.at:
                turn.was_cut = turn.task.cancel()
            if turn.task.done():
                assert turn.job not in self.driver._jobs, "its job goes on without it"
            for trouble in troubles:
                if trouble.nth == happened:
                    self.meddle(trouble.kind)
        closed = any(trouble.kind == "closes" for trouble in troubles)
        self.check(turns, *([Cancelled] if closed else []))
        self.ring.suffer(())
        after = self.begin(turn.request)
        while await self.step():
            pass
        self.check([after])
        return turn

    def meddle(self, kind: str) -> None:
        """Any of the calls that operators and gateways make meanwhile."""
        nodes, session = self.driver.nodes(), SessionId(f"s{self.dice.randrange(SESSIONS)}")
        if kind == "drops" and nodes:
            self.driver.drop_node(self.dice.choice(nodes).id)
        elif kind == "pins":
            with suppress(InvalidValue):
                self.driver.pin(HEAD)
        elif kind == "closes":
            self.driver.close_session(session)
        elif kind == "foresees":
            self.driver.foresee(Wish(session, (*HEAD, *novel(12, 77, 50))))

    # What must hold

    def check_published(self) -> None:
        """At any moment: what a look-up may find, every stage has, but for what one of them lost unasked."""
        assert self.ring.breaches == []
        everywhere = self.ring.kept_everywhere()
        self.ring.harmed &= self.index._entries.keys()
        assert {status.id for status in self.driver.nodes()} <= everywhere | self.ring.harmed
        self.partial += everywhere != self.ring.kept_somewhere()

    def check(self, turns: Sequence[Turn], *may_raise: type[Exception]) -> None:
        for turn in turns:
            turn.check(*may_raise)
        self.check_nothing_is_left()
        self.check_pins()
        self.check_replicas()

    def check_nothing_is_left(self) -> None:
        """No job, lane, queue entry, frame, ticket, timer or task."""
        status, core = self.driver.status(), self.core
        assert status.ready
        assert (status.busy_lanes, status.running_jobs, status.waiting_jobs) == (0, 0, 0)
        assert self.driver.idle
        assert (core._flight._frames, core._queue._lines, core.retention._tickets) == ({}, {}, {})
        assert all(entry.published for entry in self.index._entries.values())
        assert self.clock.next_due() is None
        busy = {task for task in asyncio.all_tasks() if not task.done()}
        assert busy == {asyncio.current_task(), self.driver._reader}

    def check_pins(self) -> None:
        """Each is somebody's, and the sums are right."""
        entries, anchors = self.index._entries, self.core.retention.anchors
        holders = [*anchors._heads.values(), *anchors._by_hand.values()]
        for node, entry in entries.items():
            assert entry.node.parent in entries or entry.node.start == 0, "it hangs on nothing"
            assert entry.pins <= sum(node in nodes for nodes in holders), "a pin without a holder"
        pinned = sum(entry.node.rows for entry in entries.values() if entry.pins)
        assert self.index.pinned_rows == pinned
        assert self.index.rows == sum(entry.node.rows for entry in entries.values()) <= HOST_ROWS

    def check_replicas(self) -> None:
        """All know the same nodes with the same rows, and no lane has fewer rows than the coordinator believes."""
        replica, nodes = self.core.ledger, set(self.index._entries)
        assert nodes == set(replica.nodes.ids())
        for stage in self.ring.network.stages:
            assert nodes == set(stage.ledger.nodes.ids()) == set(stage.kept)
            for node, kept in stage.kept.items():
                assert list(kept.tokens) == list(self.index.node(node).tokens)
            for lane in map(LaneId, range(LANES)):
                ours = replica.tokens(lane)
                assert ours == stage.ledger.tokens(lane, len(ours))


# Every point, one after the other


@dataclass
class Seen:
    cuts: int = 0
    loads: int = 0
    partial: int = 0
    refusals: int = 0


async def sweep(seed: int, way: str, troubles: Sequence[Trouble], ahead: int) -> Seen:
    """Cuts a turn at its every point, a later one each time, until turns end before their points have come."""
    world, seen = World(seed), Seen()
    await world.start()
    at = whole = 0
    while whole < 4:  # they differ in length
        at += 1
        turn = await world.play(WAYS[way](at), troubles, ahead)
        seen.cuts += turn.was_cut
        whole = 0 if turn.was_cut else whole + 1
        assert at < MOST_POINTS, "the turns are never whole"
    seen.loads, seen.partial = world.ring.loads, world.partial
    seen.refusals = world.driver.status().counts.refusals
    await world.driver.stop()
    return seen


quick = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # an example is a hundred turns, and a smaller one no easier to read
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [*FAULTS, "drops"])
def test_a_turn_cut_at_any_point_leaves_nothing_behind(way: str, kind: str) -> None:
    """One thing goes wrong beside every cut, and others with it."""
    seen: list[Seen] = []

    @settings(quick, max_examples=DRAWS)
    @given(st.integers(0, 999), trouble_of(kind), anything, st.integers(0, LANES))
    def swept(seed: int, first: Trouble, more: list[Trouble], ahead: int) -> None:
        seen.append(asyncio.run(sweep(seed, way, [first, *more], ahead)))

    swept()
    assert sum(one.cuts for one in seen) >= 3 * DRAWS
    assert sum(one.loads for one in seen) > sum(one.cuts for one in seen) / 8
    assert sum(one.partial for one in seen) > 0


@pytest.mark.parametrize("stage", range(STAGES))
def test_what_only_some_stages_keep_is_never_tried(stage: int) -> None:
    """Partial publish (k of n): one stage keeps nothing, every time; it would refuse a load of it, and none is sent."""
    seen = asyncio.run(sweep(7, "meanwhile", [Trouble("keeps nothing", 2, stage)], ahead=1))
    assert seen.cuts > 20
    assert seen.partial > seen.cuts
    assert seen.loads > 5
    assert seen.refusals == 0


class CancelMachine(RuleBasedStateMachine):
    """The same in any order, over one ring that is never made anew."""

    @initialize(seed=st.integers(0, 999))
    def begin(self, seed: int) -> None:
        self.runner = asyncio.Runner()
        self.world = World(seed)
        self.runner.run(self.world.start())

    @rule(
        way=st.sampled_from(list(WAYS)),
        at=st.integers(1, 40),
        troubles=anything,
        ahead=st.integers(0, LANES + 1),
    )
    def a_turn_is_cut(self, way: str, at: int, troubles: list[Trouble], ahead: int) -> None:
        self.runner.run(self.world.play(WAYS[way](at), troubles, ahead))

    @rule(kind=st.sampled_from(MEDDLING))
    def an_operator_meddles(self, kind: str) -> None:
        async def meddle() -> None:
            self.world.meddle(kind)
            while await self.world.step():
                pass
            self.world.check([])

        self.runner.run(meddle())

    @invariant()
    def no_stage_is_asked_for_what_it_never_had(self) -> None:
        assert self.world.ring.breaches == []

    def teardown(self) -> None:
        self.runner.run(self.world.driver.stop())
        self.runner.close()


CancelMachine.TestCase.settings = settings(quick, max_examples=12, stateful_step_count=15)
TestCutInAnyOrder = CancelMachine.TestCase
