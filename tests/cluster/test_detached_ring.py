"""A ring that outlives its gateway: found, claimed, gone on with; and left alone as long as its gateway lives."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from coordinator.errors import RingTaken, SetupError
from coordinator.frames import Epoch
from coordinator.ring import RingInfo, StageProgress
from fakering import texts
from fakering.hand import Hand
from stage.config import RingConfig
from stage.lease import Served
from tests.cluster.watched_ring import all_end, processes, until

if TYPE_CHECKING:
    from stage.ray_ring import RayCluster, RayRing
    from stage.ray_ring.census import RingSight

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]

LEASE_S = 1.5


@pytest.fixture(scope="module", autouse=True)
def sockets() -> Iterator[Path]:
    """Where this module's rings keep their sockets."""
    with (
        tempfile.TemporaryDirectory(prefix="rings-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> RingConfig:
    return RingConfig(
        tiny_model,
        "tiny",
        ((0, 2), (2, 4)),
        2,
        64,
        cpu_share=0.1,
        detached=True,
        name="tiny-0",
        probe_s=0.2,
        lease_s=LEASE_S,
    )


class Gateways:
    """Those of one test, each with a ring object of its own, as if each were a process."""

    def __init__(self, config: RingConfig, cluster: RayCluster) -> None:
        self._config = config
        self._cluster = cluster
        self._ports = count(1)
        self.rings: list[RayRing] = []
        self.told: list[StageProgress] = []

    async def start(self, **changes: object) -> tuple[RayRing, RingInfo]:
        from stage.ray_ring import RayRing

        served = Served(f"127.0.0.1:{next(self._ports)}")
        ring = RayRing(replace(self._config, **changes), self._cluster, lambda: served)  # type: ignore[arg-type]
        self.rings.append(ring)
        self.told.clear()
        return ring, await ring.start(self.told.append)


@pytest_asyncio.fixture(loop_scope="session")
async def gateways(config: RingConfig, ray_cluster: RayCluster) -> AsyncIterator[Gateways]:
    """Of one ring, which stays from test to test."""
    gateways = Gateways(config, ray_cluster)
    yield gateways
    for ring in gateways.rings:
        await ring.stop()


@pytest.fixture(scope="module", autouse=True)
def ending(config: RingConfig, ray_cluster: RayCluster) -> Iterator[None]:
    from stage.ray_ring.census import end_all

    yield
    end_all(config.name)


def hand_of(ring: RayRing, info: RingInfo) -> Hand:
    """A coordinator that goes on from what the ring holds."""
    hand = Hand(ring, info)
    hand.ledger.reset(info.epoch, info.held)
    return hand


async def fall_silent(ring: RayRing, *, is_over: bool = False) -> None:
    """As a gateway does that was killed, or stopped for a while: it asks nothing, hears nothing, and its calls are left
    as they are. `is_over`: its leases have run out by now.
    """
    from stage.ray_ring.detached import give_back

    started = ring._started
    assert started is not None
    started._stop_renewing()
    for member in started.seats.members:
        member.unwatch()
        member._living.cancel()
    if is_over:
        assert started._owner is not None
        await give_back(started.seats.members, started._owner, 10.0)


async def sight(name: str) -> RingSight | None:
    from stage.ray_ring.census import rings

    return next((ring for ring in await rings() if ring.name == name), None)


async def test_a_ring_that_was_left_is_gone_on_with_and_loads_nothing(gateways: Gateways) -> None:
    one, info = await gateways.start()
    prompt = texts.novel(20, 1, info.vocab_size)
    answer = (await hand_of(one, info).turn(0, prompt, 4)).tokens
    pids = one.pids
    await one.stop()
    assert one.pids == ()

    left = await sight("tiny-0")
    assert left is not None
    assert (left.model, left.epoch, left.tenure, left.rows[0]) == ("tiny", info.epoch, None, 23)
    assert [stage.pid for stage in left.stages] == list(pids)

    two, later = await gateways.start()
    assert (two.pids, later.epoch, gateways.told) == (pids, info.epoch + 1, [])
    assert tuple(later.held.lane(0).tokens) == (*prompt, *answer[:-1])
    warm = await hand_of(two, later).turn(0, prompt, 4, cached_prefix=16)
    assert (warm.tokens, warm.prefilled) == (answer, 4)


async def test_a_ring_is_not_taken_from_a_gateway_that_lives(gateways: Gateways) -> None:
    one, info = await gateways.start()
    named = f"127.0.0.1:1 .host .*, pid {os.getpid()}"
    with pytest.raises(SetupError, match=f"tiny-0 is driven by a gateway that serves at {named}"):
        await gateways.start()
    hand = hand_of(one, info)
    assert len((await hand.turn(0, texts.novel(9, 2, info.vocab_size), 3)).tokens) == 3
    found = await sight("tiny-0")
    assert found is not None
    assert found.tenure is not None
    assert found.tenure.owner.grpc == "127.0.0.1:1"


async def test_a_gateway_that_fell_silent_loses_the_ring_and_disturbs_its_successor_no_more(
    gateways: Gateways,
) -> None:
    one, info = await gateways.start()
    hand = hand_of(one, info)
    prompt = texts.novel(9, 3, info.vocab_size)
    answer = (await hand.turn(0, prompt, 3)).tokens
    await fall_silent(one)
    two, later = await gateways.start()
    assert (two.pids, later.epoch) == (one.pids, info.epoch + 1)

    # What it still sends goes nowhere, and what it asks for is not done.
    frame = hand.send_prefill(0, hand.new_job(), texts.novel(9, 4, info.vocab_size))[0]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await hand.reply_to(frame)
    with pytest.raises(RingTaken, match="taken from this gateway, by a gateway .* at 127.0.0.1:2 "):
        await one.open_epoch(Epoch(later.epoch + 1))
    assert not one.health().ready
    pids = two.pids
    await one.stop()

    warm = await hand_of(two, later).turn(0, prompt, 3, cached_prefix=8)
    assert (warm.tokens, two.pids) == (answer, pids)
    found = await sight("tiny-0")
    assert found is not None
    assert found.tenure is not None
    assert found.tenure.owner.grpc == "127.0.0.1:2"


async def test_a_gateway_that_was_overtaken_ends_nothing_of_its_successor(
    gateways: Gateways,
) -> None:
    """As one that is told to drain its ring for good, or whose start fails, when it goes on after a while."""
    from stage.ray_ring.census import group_of

    one, _ = await gateways.start()
    await fall_silent(one, is_over=True)
    two, info = await gateways.start()
    one.dissolve()
    await one.stop()
    assert group_of("tiny-0") is not None
    assert len((await hand_of(two, info).turn(0, (5, 6, 7), 2)).tokens) == 2


async def test_gateways_that_died_leave_no_calls_and_no_sockets_behind(
    gateways: Gateways, sockets: Path
) -> None:
    """An actor takes so many calls at a time; each gateway has two that come back only at an end."""
    from stage.actor import CONCURRENT_CALLS

    pids: tuple[int, ...] = ()
    for _ in range(CONCURRENT_CALLS + 1):
        ring, info = await gateways.start()
        assert pids in ((), ring.pids)
        pids = ring.pids
        await fall_silent(ring, is_over=True)
    assert len((await hand_of(ring, info).turn(0, (5, 6, 7), 2)).tokens) == 2
    await until(lambda: len(os.listdir(sockets)) == 1)


async def test_a_spare_is_gone_on_with_too(gateways: Gateways) -> None:
    spared = {"name": "spared-0", "spares": 1}
    one, _ = await gateways.start(**spared)
    pids = one.pids
    await until(lambda: len(one.spares) == 1)
    (spare,) = one.spares
    await one.stop()
    handles = processes(pids[1:])
    os.kill(pids[1], signal.SIGKILL)
    assert await all_end(handles, 5.0)

    two, info = await gateways.start(**spared)
    assert (two.pids, gateways.told) == ((pids[0], spare), [])
    assert len((await hand_of(two, info).turn(0, (5, 6, 7), 2)).tokens) == 2
    two.dissolve()
    handles = processes(two.pids)
    await two.stop()
    assert await all_end(handles, 5.0)
    assert await sight("spared-0") is None


async def test_a_stage_that_died_meanwhile_is_made_anew_and_the_others_are_not(
    gateways: Gateways,
) -> None:
    one, info = await gateways.start()
    prompt = texts.novel(9, 5, info.vocab_size)
    answer = (await hand_of(one, info).turn(0, prompt, 3)).tokens
    pids = one.pids
    await one.stop()
    handles = processes(pids[1:])
    os.kill(pids[1], signal.SIGKILL)
    assert await all_end(handles, 5.0)

    two, info = await gateways.start()
    assert two.pids[0] == pids[0]
    assert two.pids[1] != pids[1]
    assert {news.stage for news in gateways.told} == {1}
    assert not any(lane.tokens for lane in info.held.lanes)
    assert (await hand_of(two, info).turn(0, prompt, 3)).tokens == answer


async def test_a_stage_that_hangs_meanwhile_is_made_anew(gateways: Gateways) -> None:
    one, _ = await gateways.start(call_s=2.0)
    pids = one.pids
    await one.stop()
    os.kill(pids[0], signal.SIGSTOP)
    two, info = await gateways.start(call_s=2.0)
    assert two.pids[1] == pids[1]
    assert two.pids[0] != pids[0]
    assert len((await hand_of(two, info).turn(0, (5, 6, 7), 2)).tokens) == 2


async def test_a_loss_is_healed_as_in_any_ring_and_the_next_gateway_finds_the_new_stage(
    gateways: Gateways,
) -> None:
    one, info = await gateways.start()
    pids = one.pids
    os.kill(pids[0], signal.SIGKILL)
    await until(lambda: not one.health().ready)
    await one.open_epoch(Epoch(info.epoch + 1))
    healed = one.pids
    assert healed[0] != pids[0]
    await one.stop()
    two, later = await gateways.start()
    assert (two.pids, later.epoch) == (healed, info.epoch + 2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lanes": 3}, "has lanes 2, wanted 3"),
        ({"max_rows": 128}, "has max_rows 64, wanted 128"),
        ({"splits": ((0, 1), (1, 4))}, r"has splits \(\(0, 2\), \(2, 4\)\), wanted"),
        ({"dtype": "bfloat16"}, "has dtype float32, wanted bfloat16"),
        ({"numerics": "fast"}, "has numerics auto, wanted fast"),
    ],
)
async def test_another_ring_of_that_name_is_left_alone(
    gateways: Gateways, changes: dict[str, object], told: str
) -> None:
    if await sight("tiny-0") is None:
        ring, _ = await gateways.start()
        await ring.stop()
    with pytest.raises(SetupError, match=f"{told}.*: end it with `ringserve stop tiny-0`"):
        await gateways.start(**changes)
    found = await sight("tiny-0")
    assert found is not None
    assert found.tenure is None


async def test_a_dissolved_ring_ends_with_its_gateway(gateways: Gateways) -> None:
    ring, _ = await gateways.start()
    handles = processes(ring.pids)
    ring.dissolve()
    await ring.stop()
    assert await all_end(handles, 5.0)
    assert await sight("tiny-0") is None


async def test_what_a_start_made_that_failed_is_ended(gateways: Gateways, tmp_path: Path) -> None:
    with pytest.raises(SetupError):
        await gateways.start(model_dir=tmp_path, name="broken-0")
    assert await sight("broken-0") is None


async def test_of_two_that_make_a_ring_at_once_one_does(gateways: Gateways) -> None:
    results = await asyncio.gather(gateways.start(), gateways.start(), return_exceptions=True)
    failures = [each for each in results if isinstance(each, BaseException)]
    assert [type(each) for each in failures] == [SetupError]
    (made,) = (each for each in results if not isinstance(each, BaseException))
    assert made[0].health().ready


async def test_a_ring_that_is_stopped_by_hand_is_not_made_anew_by_its_gateway(
    gateways: Gateways,
) -> None:
    from stage.ray_ring.census import end_ring

    ring, info = await gateways.start()
    handles = processes(ring.pids)
    with pytest.raises(SetupError, match="tiny-0 is driven by a gateway .* or give --force"):
        await end_ring("tiny-0")
    await end_ring("tiny-0", force=True)
    assert await all_end(handles, 5.0)
    assert not ring.health().ready
    with pytest.raises(RingTaken, match="taken from this gateway, by `ringserve stop --force`"):
        await ring.open_epoch(Epoch(info.epoch + 1))
    assert await sight("tiny-0") is None
