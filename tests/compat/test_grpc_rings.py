"""Rings that come and go while clients are served, and turns that go before others, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.errors import ClusterTooSmall, ModelDoesNotFit, SetupError, StageLost
from coordinator.requests import Request, SamplingSpec, SessionId
from coordinator.ring import ProgressSink, RingInfo
from coordinator.router import Router
from fakering.ring import FakeRing
from gateway.cli.app import app
from gateway.client import Client, TurnStream, error_info
from gateway.launch import launch
from gateway.progress import LineBoard
from gateway.rings import RingSet
from gateway.settings import RingKind, ServeSettings
from gateway.turns import TextPrompt, TurnFinished, TurnRequest, TurnStarted

Sites = Callable[..., AbstractAsyncContextManager[Any]]
IDLE = (
    "ready, 0 of 4 lanes busy, 0 running, 0 waiting, 0 sessions, 0 of 131072 rows stored (0 pinned)"
)
NO_ROOM = ClusterTooSmall(wanted="4 GPU", available="2 GPU")


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Client]:
    """A whole process of fake rings of one lane each, as `ringserve serve` runs it."""
    fake = ServeSettings("fake", RingKind.FAKE, lanes=1, **settings)
    async with (
        launch(fake, LineBoard(lambda _: None)) as running,
        Client(running.grpc_address) as client,
    ):
        yield client


def turn(session: str, tokens: int = 8, priority: int = 0) -> TurnRequest:
    return TurnRequest(
        TextPrompt(f"{session} asks"),
        session=SessionId(session),
        sampling=SamplingSpec(temperature=0.0),
        max_tokens=tokens,
        ignore_eos=True,
        priority=priority,
    )


async def started(stream: TurnStream) -> str:
    """The ring that took the turn."""
    event = await anext(stream)
    assert isinstance(event, TurnStarted)
    return event.ring


async def names(client: Client) -> list[str]:
    return [ring.name for ring in await client.rings()]


async def refused(call: Any) -> tuple[str, str, dict[str, str]]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    info = error_info(error.value)
    assert info is not None
    return error.value.code().name, info.reason, info.metadata


async def test_a_ring_added_while_serving_takes_turns() -> None:
    async with serving() as client, client.generate(turn("a", 2000)) as busy:
        assert await started(busy) == "ring-0"
        assert await client.add_ring() == "ring-1"
        assert await names(client) == ["ring-0", "ring-1"]
        async with client.generate(turn("b")) as stream:
            assert await started(stream) == "ring-1"


async def test_a_drained_ring_ends_with_its_last_turn_and_its_session_moves() -> None:
    async with serving(rings=2) as client:
        async with client.generate(turn("a", 300)) as last:
            ring = await started(last)
            assert await client.drain_ring(ring) == 1
            (listed,) = [each for each in await client.rings() if each.name == ring]
            assert (listed.draining, listed.ready, listed.running_jobs) == (True, False, 1)
            async with client.generate(turn("a")) as moved:
                assert await started(moved) != ring
            events = [event async for event in last]
        assert isinstance(events[-1], TurnFinished)
        assert events[-1].usage.generated_tokens == 300
        async with asyncio.timeout(5):
            while ring in await names(client):
                pass
        assert await client.add_ring() == "ring-2"  # a name means one ring for ever


async def test_draining_twice_and_the_last_ring_of_all_is_allowed() -> None:
    async with serving() as client:
        async with client.generate(turn("a", 2000)) as stream:
            await started(stream)
            assert [await client.drain_ring("ring-0") for _ in range(2)] == [1, 1]
            code, reason, _ = await refused(anext(client.generate(turn("b"))))
            assert (code, reason) == ("UNAVAILABLE", "RING_UNAVAILABLE")
        async with asyncio.timeout(5):
            while await names(client):
                pass
        assert await client.add_ring() == "ring-1"
        async with client.generate(turn("a")) as stream:
            assert await started(stream) == "ring-1"


async def test_a_ring_that_is_not_there_cannot_be_drained() -> None:
    async with serving() as client:
        code, reason, facts = await refused(client.drain_ring("ring-9"))
        assert (code, reason, facts["field"]) == ("INVALID_ARGUMENT", "INVALID_VALUE", "name")


async def test_rings_that_nobody_handed_over_cannot_be_changed(site: Sites) -> None:
    async with site() as it:
        for call in (it.client.add_ring(), it.client.drain_ring("ring-0")):
            assert (await refused(call))[:2] == ("FAILED_PRECONDITION", "SETUP_FAILED")


@dataclass
class _Process:
    """What a set of rings works with; its rings start when the gate is opened."""

    router: Router = field(default_factory=lambda: Router((), session_limit=8))
    made: list[_Gated] = field(default_factory=list)
    room: SetupError | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    starting: asyncio.Event = field(default_factory=asyncio.Event)

    def make(self, name: str) -> RingDriver:
        self.made.append(_Gated(self.gate, self.starting))
        return RingDriver(name, self.made[-1], SchedulerSettings(), SystemClock())

    def check_room(self) -> None:
        if self.room is not None:
            raise self.room


class _Gated(FakeRing):
    def __init__(self, gate: asyncio.Event, starting: asyncio.Event) -> None:
        super().__init__(2, 1, 64, vocab_size=90)
        self._gate, self._starting = gate, starting
        self.runs = False

    async def start(self, progress: ProgressSink) -> RingInfo:
        self._starting.set()
        await self._gate.wait()
        self.runs = True
        return await super().start(progress)

    async def stop(self) -> None:
        self.runs = False
        await super().stop()


@asynccontextmanager
async def ring_set(process: _Process) -> AsyncIterator[RingSet]:
    rings = RingSet(process.router, process.make, lambda _: lambda _: None, process.check_room)
    try:
        yield rings
    finally:
        await rings.stop()
    assert not any(ring.runs for ring in process.made)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (NO_ROOM, "RESOURCE_EXHAUSTED", "CLUSTER_TOO_SMALL"),
        (ModelDoesNotFit("needs more"), "RESOURCE_EXHAUSTED", "MODEL_DOES_NOT_FIT"),
        (SetupError("a stage could not be started"), "FAILED_PRECONDITION", "SETUP_FAILED"),
    ],
)
async def test_a_ring_without_room_is_refused_and_the_others_go_on(
    error: SetupError, code: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as client:

        async def start(self: FakeRing, progress: ProgressSink) -> RingInfo:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(FakeRing, "start", start)
            got = await refused(client.add_ring())
        assert got[:2] == (code, reason)
        assert got[2].get("wanted") == getattr(error, "wanted", None)
        assert await names(client) == ["ring-0"]
        async with client.generate(turn("a")) as stream:
            assert await started(stream) == "ring-0"


async def test_a_machine_without_memory_starts_nothing() -> None:
    process = _Process(room=ModelDoesNotFit("needs more"))
    process.gate.set()
    async with ring_set(process) as rings:
        with pytest.raises(ModelDoesNotFit):
            await rings.add()
        assert process.made == []
        process.room = None
        assert await rings.add() == "ring-0"


async def test_whoever_leaves_while_a_ring_loads_leaves_none_behind() -> None:
    process = _Process()
    async with ring_set(process) as rings:
        adding = asyncio.create_task(rings.add())
        async with asyncio.timeout(5):
            await process.starting.wait()
        adding.cancel()
        await asyncio.wait([adding])
        assert process.router.rings() == ()
        process.gate.set()
        assert await rings.add() == "ring-1"
        assert [ring.runs for ring in process.made] == [False, True]


async def test_the_end_of_a_process_ends_a_ring_that_drains() -> None:
    process = _Process()
    process.gate.set()
    async with ring_set(process) as rings:
        name = await rings.add()
        stream = process.router.submit(Request((1, 2, 3)))
        assert rings.drain(name) == 1
        assert [status.name for status in process.router.rings()] == [name]
    with pytest.raises(StageLost):
        async for _ in stream:
            pass
    assert process.router.rings() == ()


async def test_a_turn_of_higher_priority_waits_less() -> None:
    async with serving() as client, client.generate(turn("first", 150)) as busy:
        await started(busy)
        order: list[str] = []

        async def take(session: str, priority: int) -> None:
            async with client.generate(turn(session, priority=priority)) as stream:
                await started(stream)
                order.append(session)
                async for _ in stream:
                    pass

        waiting = []
        for session, priority in (("low", -4), ("low", -4), ("high", 4), ("high", 4)):
            waiting.append(asyncio.create_task(take(session, priority)))
            async with asyncio.timeout(5):
                while (await client.rings())[0].waiting_jobs < len(waiting):
                    pass
        async for _ in busy:
            pass
        await asyncio.gather(*waiting)
        assert order[-1] == "low"
        assert order.index("high") <= 1


async def test_a_priority_out_of_bounds_is_refused() -> None:
    async with serving() as client:
        code, reason, facts = await refused(anext(client.generate(turn("a", priority=9))))
        assert (code, reason, facts["field"]) == ("INVALID_ARGUMENT", "INVALID_VALUE", "priority")


async def test_an_operator_lists_adds_and_drains_on_the_command_line() -> None:
    def ringserve(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["rings", *arguments])
        return result.exit_code, result.output

    fake = ServeSettings("fake", RingKind.FAKE)
    async with launch(fake, LineBoard(lambda _: None)) as running:
        for arguments, told in (
            (("ls",), f"ring-0: {IDLE}\n"),
            (("add",), "ring-1\n"),
            (("drain", "ring-0"), "ring-0 is draining, 0 turns to go\n"),
        ):
            got = await asyncio.to_thread(ringserve, *arguments, "--address", running.grpc_address)
            assert got == (0, told)
        code, told = await asyncio.to_thread(
            ringserve, "drain", "ring-7", "--address", running.grpc_address
        )
        assert (code, told) == (1, "error: name: no ring 'ring-7' runs here\n")
        _, told = await asyncio.to_thread(
            ringserve, "ls", "--json", "--address", running.grpc_address
        )
        assert json.loads(told)["rings"][-1]["name"] == "ring-1"
