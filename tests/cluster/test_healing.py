"""A ring whose stages die, hang or cannot be replaced: only what was lost is made anew, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from coordinator.errors import RingLost
from coordinator.frames import LaneId, NodeSpan, StoreNodes
from coordinator.nodes import node_id
from stage.config import RingConfig
from tests.cluster.faulty_actor import BREAKS, NEVER_ENDS, StageActorWithFaults
from tests.cluster.watched_ring import ROWS, Watched, all_end, processes, siblings, until

if TYPE_CHECKING:
    from stage.ray_ring import RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session")]

PROBE_TIMEOUT_S = 2.5


@pytest.fixture(scope="module")
def config(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RingConfig:
    return RingConfig(
        tiny_model,
        "tiny",
        ((0, 2), (2, 4)),
        2,
        64,
        cpu_share=0.1,
        kv_disk=tmp_path_factory.mktemp("nodes"),
        rest_s=3.0,
        probe_s=0.2,
        probe_timeout_s=PROBE_TIMEOUT_S,
        fence_s=8.0,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def watched(config: RingConfig, ray_cluster: RayCluster) -> AsyncIterator[Watched]:
    from stage.ray_ring import RayRing, crew

    watched = Watched(RayRing(config, ray_cluster))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crew, "StageActor", StageActorWithFaults)
        yield watched
        await watched.ring.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def started(watched: Watched) -> Watched:
    if not watched.ring.health().ready:
        await watched.start()
    return watched


async def test_an_epoch_that_ends_without_a_loss_costs_no_row_and_no_process(
    started: Watched,
) -> None:
    pids, answer = started.ring.pids, await started.answer()
    begin = time.monotonic()
    held = await started.heal()
    assert time.monotonic() - begin < 1.0
    assert started.ring.pids == pids
    rows = (*started.prompt, *answer[:-1])
    assert [tuple(lane.tokens) for lane in held.lanes] == [rows, ()]
    warm = await started.hand.turn(0, started.prompt, 4, cached_prefix=ROWS)
    assert (warm.tokens, warm.prefilled) == (answer, 4)


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_killed_stage_is_replaced_and_only_that_one(started: Watched, stage: int) -> None:
    pids, answer = started.ring.pids, await started.answer()
    os.kill(pids[stage], signal.SIGKILL)
    assert str(await started.lose()).startswith(f"stage {stage}: its process died")
    held = await started.heal()
    assert all(not lane.tokens for lane in held.lanes)
    replaced = [old != new for old, new in zip(pids, started.ring.pids, strict=True)]
    assert replaced == [index == stage for index in range(2)]
    assert {news.stage for news in started.told} >= {stage}
    assert await started.answer() == answer


@pytest.mark.long
async def test_what_a_replaced_stage_has_on_disk_stays_held(
    started: Watched, config: RingConfig
) -> None:
    await started.answer()
    hand = started.hand
    span = NodeSpan(node_id(hand.root, started.prompt[:ROWS]), hand.root, 0, ROWS)
    stored = replace(hand.frame(), after=(StoreNodes(LaneId(0), (span,)),))
    assert (await hand.reply_to(hand.submit(stored))).lost == ()
    folder = config.kv_disk
    assert folder is not None
    await until(lambda: len(list(folder.glob("*.kv"))) == 2)
    os.kill(started.ring.pids[0], signal.SIGKILL)
    await started.lose()
    held = await started.heal()
    assert [node.id for node in held.nodes] == [span.node]


async def test_a_stage_that_hangs_is_found_by_its_probes_and_replaced(started: Watched) -> None:
    pids, answer = started.ring.pids, await started.answer()
    (hung,) = processes(pids[1:])
    os.kill(pids[1], signal.SIGSTOP)
    lost = await started.lose(PROBE_TIMEOUT_S + 2.0)
    assert lost.stage == 1
    assert "did not answer a probe" in lost.reason
    await started.heal()
    assert started.ring.pids[0] == pids[0]
    assert started.ring.pids[1] != pids[1]
    assert await all_end([hung], 0.0)
    assert await started.answer() == answer


@pytest.mark.long
async def test_a_stage_that_was_only_slow_to_answer_a_probe_keeps_its_place_and_rows(
    started: Watched,
) -> None:
    pids, answer = started.ring.pids, await started.answer()
    os.kill(pids[1], signal.SIGSTOP)
    try:
        await started.lose(PROBE_TIMEOUT_S + 2.0)
    finally:
        os.kill(pids[1], signal.SIGCONT)
    held = await started.heal()
    assert started.ring.pids == pids
    assert tuple(held.lanes[0].tokens) == (*started.prompt, *answer[:-1])
    assert await started.answer() == answer


@pytest.mark.long
async def test_a_stage_that_fails_in_computing_is_replaced_though_its_process_lives(
    started: Watched,
) -> None:
    pids, answer = started.ring.pids, await started.answer()
    started.hand.send_prefill(1, started.hand.new_job(), (3, BREAKS))
    lost = await started.lose()
    assert (lost.stage, "ValueError: no such row" in lost.reason) == (1, True)
    await started.heal()
    assert [old != new for old, new in zip(pids, started.ring.pids, strict=True)] == [False, True]
    assert await started.answer() == answer


@pytest.mark.long
async def test_a_stage_that_never_ends_a_frame_is_replaced_though_it_answers_probes(
    started: Watched,
) -> None:
    """Nothing but the missing reply tells; that, a coordinator finds out by itself."""
    pids, answer = started.ring.pids, await started.answer()
    started.hand.send_prefill(1, started.hand.new_job(), (3, NEVER_ENDS))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2 * PROBE_TIMEOUT_S):
            await started.ring.next_reply()
    await started.heal()
    assert [old != new for old, new in zip(pids, started.ring.pids, strict=True)] == [False, True]
    assert await started.answer() == answer


@pytest.mark.long
async def test_a_stage_that_cannot_be_replaced_fails_the_opening_until_it_can(
    started: Watched, config: RingConfig
) -> None:
    answer, pids = await started.answer(), started.ring.pids
    away = config.model_dir.with_name("away")
    config.model_dir.rename(away)
    try:
        os.kill(pids[0], signal.SIGKILL)
        await started.lose()
        with pytest.raises(RingLost, match="stage 0: could not be replaced: "):
            await started.heal()
        with pytest.raises(RingLost):
            await started.ring.next_reply()
    finally:
        away.rename(config.model_dir)
    await started.heal()
    assert started.ring.pids[1] == pids[1]
    assert await started.answer() == answer


@pytest.mark.long
async def test_an_opening_that_is_cancelled_goes_on_in_the_next_one(started: Watched) -> None:
    pids, answer = started.ring.pids, await started.answer()
    os.kill(pids[1], signal.SIGKILL)
    await started.lose()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await started.heal()
    with pytest.raises(RingLost):
        await started.ring.next_reply()
    await started.heal()
    assert started.ring.pids[0] == pids[0]
    assert await started.answer() == answer


@pytest.mark.long
async def test_a_stop_during_healing_ends_everything(started: Watched) -> None:
    alive, lost = started.ring.pids
    made = siblings(alive)
    os.kill(lost, signal.SIGKILL)
    await started.lose()
    healing = asyncio.create_task(started.heal())
    await until(lambda: bool(siblings(alive) - made))
    new = siblings(alive) - made
    known, begun = processes((alive,)), processes(tuple(new))
    await started.ring.stop()
    with pytest.raises(RingLost, match="stopped"):
        await healing
    assert await all_end(known, 0.0)
    assert await all_end(begun, 10.0)  # it had not said who it is
