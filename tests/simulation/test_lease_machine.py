"""Gateways that want one ring, with lost and late messages, pauses and deaths: no epoch is ever two gateways'.

A gateway's program runs call by call, so that anything may happen between two of them. What a stage takes is decided
by epoch alone here: in truth a frame would also have to come through a socket that was closed.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.frames import Epoch
from stage.lease import Lease, Owner, Tenure, claim_all

GATEWAYS, STAGES, LEASE_S = 2, 2, 5.0

gateways = st.integers(0, GATEWAYS - 1)
# Who acts, how many of its calls are answered, and how much time passes behind that.
moves = st.lists(
    st.tuples(gateways, st.sampled_from((1, 2, 3, 4, 99)), st.sampled_from((0.0, 2.0, LEASE_S))),
    min_size=1,
    max_size=8,
)


@dataclass
class Call:
    """One call of a stage, on its way. `await` gives its result, or raises TimeoutError."""

    run: Callable[[], Any]

    def __await__(self) -> Generator[Call, Any, Any]:
        return (yield self)


@dataclass
class Stage:
    lease: Lease = field(default_factory=lambda: Lease(LEASE_S))
    taken: dict[int, set[str]] = field(default_factory=dict)  # by epoch: whose frames

    def take(self, epoch: int, owner: str) -> bool:
        if self.lease.epoch != epoch:
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
        self.stages = [Stage() for _ in range(STAGES)]
        self.gateways = [Gateway(Owner(f"gateway-{n}", "", n)) for n in range(GATEWAYS)]
        self.late: list[Call] = []

    # What a gateway does

    def remote(self, index: int) -> Remote:
        return Remote(self, index)

    async def drive(self, gateway: Gateway) -> None:
        """Claims, then opens an epoch later than all that the stages have seen, then sends."""
        stages = [self.remote(index) for index in range(STAGES)]
        if await claim_all(stages, gateway.owner) is not None:
            return
        seen = [await stage.epoch() for stage in stages]
        epoch = Epoch(max(seen) + 1)
        for stage in stages:
            if not await stage.open_epoch(gateway.owner.id, epoch):
                return
        gateway.epoch = epoch

    def step(self, gateway: Gateway, result: Any = None, lost: bool = False) -> None:
        assert gateway.program is not None
        try:
            if lost:
                gateway.waits_for = gateway.program.throw(TimeoutError())
            else:
                gateway.waits_for = gateway.program.send(result)
        except (StopIteration, TimeoutError):
            gateway.program = gateway.waits_for = None

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
                self.step(gateway, gateway.waits_for.run())
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
            gateway.waits_for.run()
        elif loss == "late":
            self.late.append(gateway.waits_for)
        self.step(gateway, lost=True)

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def deliver_a_late_one(self, data: st.DataObject) -> None:
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
        return self.stages[index].lease.renew(gateway.owner.id, self.now)

    @rule(number=gateways, in_order=st.booleans())
    def end(self, number: int, in_order: bool) -> None:
        gateway = self.gateways[number]
        if gateway.program is not None:
            gateway.program.close()
        if gateway.epoch is not None and in_order:
            for stage in self.stages:
                stage.lease.release(gateway.owner.id)
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
        if gateway.epoch is None or not self.stages[1 - index].lease.is_of(gateway.owner.id):
            return
        self.stages[index] = Stage()
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
    def _lease(self) -> Lease:
        return self._world.stages[self._index].lease

    async def claim(self, owner: Owner) -> Tenure | None:
        held: Tenure | None = await Call(lambda: self._lease.claim(owner, self._world.now))
        return held

    async def release(self, owner: str) -> None:
        await Call(lambda: self._lease.release(owner))

    async def epoch(self) -> Epoch:
        epoch: Epoch = await Call(lambda: self._lease.epoch)
        return epoch

    async def open_epoch(self, owner: str, epoch: Epoch) -> bool:
        is_open: bool = await Call(lambda: self._lease.open_epoch(owner, epoch))
        return is_open


TestLease = LeaseMachine.TestCase
TestLease.settings = settings(max_examples=300, stateful_step_count=20, deadline=None)
