"""Gateways that want one ring, with lost and late messages, pauses and deaths: no epoch is ever two gateways'.

A gateway's program runs call by call, so that anything may happen between two of them. What a stage takes is decided
by epoch alone here: in truth a frame would also have to come through sockets that were closed.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stage.lease import Owner, Tenure, claim_all
from stage.runner import Outdated, Runner
from stage.tenancy import Tenancy

GATEWAYS, STAGES, LEASE_S = 2, 2, 5.0

gateways = st.integers(0, GATEWAYS - 1)
# Who acts, how many of its calls are answered, and how much time passes behind that.
moves = st.lists(
    st.tuples(gateways, st.sampled_from((1, 2, 4, 5, 6, 99)), st.sampled_from((0.0, 2.0, LEASE_S))),
    min_size=1,
    max_size=8,
)


@dataclass
class Call:
    """One call of a stage, on its way. `await` gives its result, or raises TimeoutError."""

    run: Callable[[], Any]

    def __await__(self) -> Generator[Call, Any, Any]:
        return (yield self)


class Stage:
    def __init__(self, world: LeaseMachine) -> None:
        self.runner = Runner()
        self.tenancy = Tenancy(LEASE_S, self.runner, now=lambda: world.now)
        self.epoch = 0
        self.taken: dict[int, set[str]] = {}  # by epoch: whose frames

    def rest(self, turn: int) -> None:
        assert self.runner.rest(turn, 0.0)

    def open_epoch(self, turn: int, epoch: int) -> None:
        with self.runner.within(turn):
            self.epoch = epoch

    def take(self, epoch: int, owner: str) -> bool:
        if self.epoch != epoch:
            return False
        self.taken.setdefault(epoch, set()).add(owner)
        return True


@dataclass
class Gateway:
    owner: Owner
    program: Coroutine[Call, Any, None] | None = None
    waits_for: Call | None = None
    epoch: int | None = None  # that it drives


class LeaseMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.stages = [Stage(self) for _ in range(STAGES)]
        self.gateways = [Gateway(Owner(f"gateway-{n}", "", n)) for n in range(GATEWAYS)]
        self.late: list[Call] = []

    # What a gateway does

    async def drive(self, gateway: Gateway) -> None:
        """Claims, then opens an epoch later than all that the stages have seen, then sends. What they have seen counts
        only if they were still its own when they told it: each turn begins with a claim, as RayRing's.
        """
        stages = [Remote(self, index) for index in range(STAGES)]
        if await claim_all(stages, gateway.owner) is not None:
            return
        seen = [await stage.seen() for stage in stages]
        turn = 1 + max(turn for turn, _ in seen)
        epoch = 1 + max(epoch for _, epoch in seen)
        if await claim_all(stages, gateway.owner) is not None:
            return
        for stage in stages:
            await stage.rest(turn)
        for stage in stages:
            await stage.open_epoch(turn, epoch)
        gateway.epoch = epoch

    def step(self, gateway: Gateway, result: Any = None, error: Exception | None = None) -> None:
        assert gateway.program is not None
        try:
            if error is not None:
                gateway.waits_for = gateway.program.throw(error)
            else:
                gateway.waits_for = gateway.program.send(result)
        except (StopIteration, TimeoutError, Outdated):
            gateway.program = gateway.waits_for = None

    def answer(self, gateway: Gateway) -> None:
        assert gateway.waits_for is not None
        try:
            result = gateway.waits_for.run()
        except Outdated as error:
            self.step(gateway, error=error)
        else:
            self.step(gateway, result)

    def begin_to_drive(self, gateway: Gateway) -> None:
        gateway.epoch = None
        gateway.program = self.drive(gateway)
        self.step(gateway)

    @rule(moves=moves)
    def go_on(self, moves: list[tuple[int, int, float]]) -> None:
        """Now this gateway has some calls answered and now that one, and drives the ring if it may."""
        for number, calls, seconds in moves:
            gateway = self.gateways[number]
            if gateway.program is None and gateway.epoch is None:
                self.begin_to_drive(gateway)
            while gateway.waits_for is not None and calls:
                self.answer(gateway)
                calls -= 1
            if gateway.epoch is not None:
                self.passed(gateway.epoch, gateway.owner.id)
            self.now += seconds

    @rule(number=gateways)
    def open_another_epoch(self, number: int) -> None:
        """The driver heals its ring; that it has lost it meanwhile it learns from the stages."""
        gateway = self.gateways[number]
        if gateway.epoch is not None:
            self.begin_to_drive(gateway)

    @rule(number=gateways, loss=st.sampled_from(("the call", "the answer", "late")))
    def lose_a_message(self, number: int, loss: str) -> None:
        gateway = self.gateways[number]
        if gateway.waits_for is None:
            return
        if loss == "the answer":
            with suppress(Outdated):
                gateway.waits_for.run()
        elif loss == "late":
            self.late.append(gateway.waits_for)
        self.step(gateway, error=TimeoutError())

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def deliver_a_late_one(self, data: st.DataObject) -> None:
        with suppress(Outdated):
            self.late.pop(data.draw(st.integers(0, len(self.late) - 1))).run()

    @rule(number=gateways, late=st.booleans())
    def renew(self, number: int, late: bool) -> None:
        """Whether it is still the owner's it may hear too late."""
        gateway = self.gateways[number]
        if gateway.epoch is None:
            return
        for index in range(STAGES):
            if late:
                self.late.append(Call(partial(self.renewed, index, gateway)))
            elif not self.renewed(index, gateway):
                gateway.epoch = None
                return

    def renewed(self, index: int, gateway: Gateway) -> bool:
        return self.stages[index].tenancy.renew(gateway.owner.id)

    @rule(number=gateways, in_order=st.booleans())
    def end(self, number: int, in_order: bool) -> None:
        gateway = self.gateways[number]
        if gateway.program is not None:
            gateway.program.close()
        if gateway.epoch is not None and in_order:
            for stage in self.stages:
                stage.tenancy.release(gateway.owner.id)
        owner = Owner(f"{gateway.owner.id}+", "", gateway.owner.pid)
        self.gateways[number] = Gateway(owner)

    # Frames

    @rule(number=gateways)
    def send_a_late_frame(self, number: int) -> None:
        gateway = self.gateways[number]
        if gateway.epoch is not None:
            self.late.append(Call(partial(self.passed, gateway.epoch, gateway.owner.id)))

    def passed(self, epoch: int, owner: str) -> None:
        """From stage to stage, as far as it is taken."""
        all(stage.take(epoch, owner) for stage in self.stages)

    @rule(index=st.integers(0, STAGES - 1), number=gateways)
    def replace_a_stage(self, index: int, number: int) -> None:
        """By the gateway that drives it, before it opens its next epoch."""
        gateway = self.gateways[number]
        if gateway.epoch is None or not self.renewed(1 - index, gateway):
            return
        self.stages[index] = Stage(self)
        self.begin_to_drive(gateway)

    # What holds

    @invariant()
    def no_epoch_is_two_gateways(self) -> None:
        for stage in getattr(self, "stages", ()):
            assert all(len(owners) == 1 for owners in stage.taken.values()), stage.taken

    def teardown(self) -> None:
        for gateway in getattr(self, "gateways", ()):
            if gateway.program is not None:
                gateway.program.close()


class Remote:
    """A stage as a gateway sees it: each call is one that may be late, or lost."""

    def __init__(self, world: LeaseMachine, index: int) -> None:
        self._world = world
        self._index = index

    @property
    def _stage(self) -> Stage:
        return self._world.stages[self._index]

    async def claim(self, owner: Owner, ended: str) -> Tenure | None:
        held: Tenure | None = await Call(lambda: self._stage.tenancy.claim(owner, ended))
        return held

    async def release(self, owner: str) -> None:
        await Call(lambda: self._stage.tenancy.release(owner))

    async def seen(self) -> tuple[int, int]:
        turn, epoch = await Call(lambda: (self._stage.runner.turn, self._stage.epoch))
        return turn, epoch

    async def rest(self, turn: int) -> None:
        await Call(lambda: self._stage.rest(turn))

    async def open_epoch(self, turn: int, epoch: int) -> None:
        await Call(lambda: self._stage.open_epoch(turn, epoch))


TestLease = LeaseMachine.TestCase
TestLease.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)
