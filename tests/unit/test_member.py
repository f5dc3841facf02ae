"""When an actor counts as lost: dead, or silent for too long while we were listening. No process is started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from coordinator.errors import RingLost
from stage.actor import Probe
from stage.ray_ring import member as member_module
from stage.ray_ring.member import Member, together

PROBE = Probe(turn=1, frames=0, busy_s=0.0)


class Handle:
    """Ray's handle of an actor: each call is answered as the test says."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.pending: dict[str, asyncio.Future[Any]] = {}

    def __getattr__(self, method: str) -> _Method:
        return _Method(self, method)

    def answer(self, method: str, value: object) -> None:
        self.pending[method].set_result(value)

    def fail(self, method: str, error: Exception) -> None:
        self.pending[method].set_exception(error)


class _Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self._handle, self._name = handle, name

    def remote(self, *arguments: object) -> Awaitable[Any]:
        future = asyncio.get_running_loop().create_future()
        self._handle.asked.append(self._name)
        self._handle.pending[self._name] = future
        return future


class Watching:
    def __init__(self) -> None:
        self.handle = Handle()
        self.news: list[str | None] = []
        self.member = Member(self.handle, 0, self._heard)

    def _heard(self, member: Member) -> None:
        self.news.append(member.loss or member.silence)

    async def asked(self, method: str, times: int = 1) -> None:
        await until(lambda: self.handle.asked.count(method) >= times)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(5000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to hold")


@pytest.fixture
async def watching() -> AsyncIterator[Watching]:
    watching = Watching()
    await watching.asked("live")
    yield watching
    await watching.member.leave()


async def test_the_death_of_its_process_ends_every_call_and_is_told_once(
    watching: Watching,
) -> None:
    asking = asyncio.create_task(watching.member.ask("rest", within_s=60.0))
    await watching.asked("rest")
    watching.handle.fail("live", ActorDiedError())
    with pytest.raises(RingLost, match="its process died"):
        await asking
    with pytest.raises(RingLost, match="its process died"):
        await watching.member.ask("rest", within_s=60.0)
    assert watching.news == ["its process died (ActorDiedError)"]


async def test_a_call_without_an_answer_in_time_loses_it(watching: Watching) -> None:
    with pytest.raises(RingLost, match=r"did not answer 'rest' for 0\.05 s"):
        await watching.member.ask("rest", within_s=0.05)
    assert watching.member.loss is not None


async def test_one_that_never_comes_up_is_lost_for_a_reason_that_says_what_to_do(
    watching: Watching,
) -> None:
    with pytest.raises(RingLost, match="no room: see `ray status`"):
        await watching.member.settle(0.05, "no room: see `ray status`")


async def test_a_probe_without_an_answer_makes_it_silent_and_a_late_one_is_heard(
    watching: Watching,
) -> None:
    member = watching.member
    member.watch(0.001, 0.05)
    await watching.asked("probe")
    watching.handle.answer("probe", PROBE)
    await watching.asked("probe", 2)
    await until(lambda: bool(watching.news))
    assert (watching.news, member.loss) == (["did not answer a probe for 0.05 s"], None)
    hearing = asyncio.create_task(member.hear(5.0))
    await asyncio.sleep(0)
    watching.handle.answer("probe", PROBE)
    await hearing
    assert (member.silence, member.loss, member.last) == (None, None, PROBE)


async def test_one_that_stays_silent_is_lost(watching: Watching) -> None:
    member = watching.member
    member.watch(0.001, 0.05)
    await until(lambda: bool(watching.news))
    await member.hear(0.05)
    assert member.loss == "did not answer a probe for 0.05 s"


async def test_an_opening_that_is_given_up_waits_for_no_silent_one_any_more(
    watching: Watching,
) -> None:
    member = watching.member
    member.watch(0.001, 0.05)
    await until(lambda: bool(watching.news))
    before = asyncio.all_tasks()
    hearing = asyncio.create_task(member.hear(60.0))
    await asyncio.sleep(0)
    hearing.cancel()
    await asyncio.wait([hearing])
    await until(lambda: asyncio.all_tasks() <= before)


async def test_time_in_which_we_were_stopped_ourselves_is_no_silence_of_his(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_module, "_STEP_S", 0.1)
    member = watching.member
    member.watch(0.001, 0.3)
    await watching.asked("probe")
    loop = asyncio.get_running_loop()
    loop.call_soon(time.sleep, 0.4)
    loop.call_later(0.45, watching.handle.answer, "probe", PROBE)
    await watching.asked("probe", 2)
    assert (watching.news, member.last) == ([], PROBE)


async def test_the_first_failure_of_several_calls_leaves_none_of_them_behind() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            ended.append("slow")

    async def fails() -> None:
        raise RingLost(1, "died")

    with pytest.raises(RingLost, match="died"):
        await together([slow(), fails()])
    assert ended == ["slow"]
