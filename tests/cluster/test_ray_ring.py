"""What only a ring of processes can do: die, idle, ask for too much. Frames themselves are the contract suite's."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from coordinator.errors import ClusterTooSmall, ModelUnusable, RingLost
from coordinator.frames import (
    Epoch,
    Frame,
    JobId,
    LaneId,
    OpenLane,
    RefusalCode,
    Segment,
    SegmentKind,
    Seq,
)
from coordinator.prefixes import digest_of
from coordinator.requests import GREEDY
from coordinator.ring import StageProgress
from stage.config import RingConfig

if TYPE_CHECKING:
    from stage.ray_ring import RayCluster, RayRing

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session")]

TICKS = os.sysconf("SC_CLK_TCK")


def first_frame(epoch: int = 0, tokens: tuple[int, ...] = (5, 17, 101)) -> Frame:
    lane, job = LaneId(0), JobId(1)
    opening = OpenLane(lane, job, 0, digest_of(()))
    segment = Segment(lane, job, 0, tokens, SegmentKind.PREFILL, GREEDY, len(tokens))
    return Frame(Epoch(epoch), Seq(0), (opening,), (segment,))


def keep_busy(ring: RayRing, epoch: int) -> None:
    """Sends more frames than the stages compute at once, to follow the first one."""
    for seq in range(1, 40):
        segment = Segment(LaneId(0), JobId(1), 0, tuple(range(60)), SegmentKind.VERIFY, GREEDY)
        ring.submit(Frame(Epoch(epoch), Seq(seq), (), (segment,)))


async def until_lost(ring: RayRing) -> None:
    while True:
        await ring.next_reply()


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@pytest.fixture(scope="module", autouse=True)
def sockets() -> Iterator[Path]:
    """Where this module's rings keep their sockets: the temp folder, but nobody else's."""
    with (
        tempfile.TemporaryDirectory(prefix="rings-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> RingConfig:
    return RingConfig(tiny_model, "tiny", ((0, 2), (2, 4)), 2, 64, cpu_share=0.1)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def one_ring(config: RingConfig, ray_cluster: RayCluster) -> AsyncIterator[RayRing]:
    from stage.ray_ring import RayRing

    ring = RayRing(config, ray_cluster)
    yield ring
    await ring.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def started(one_ring: RayRing) -> RayRing:
    """The one ring, running and in epoch 0 or in a later one that the test opens."""
    if not one_ring.health().ready:
        await one_ring.start(lambda _: None)
    return one_ring


async def test_more_than_the_cluster_has_is_refused_at_once(
    config: RingConfig, ray_cluster: RayCluster
) -> None:
    from stage.ray_ring import RayRing

    begin = time.monotonic()
    for wish, wanted, available in (
        (replace(config, cpu_share=1000.0), r"2000 CPU \(2 stages with 1000 each\)", r"\d+ CPU"),
        (replace(config, device="cuda"), r"2 GPU \(2 stages with 1 each\)", "0 GPU"),
    ):
        ring = RayRing(wish, ray_cluster)
        with pytest.raises(ClusterTooSmall, match=f"wanted {wanted}, available {available}"):
            await ring.start(lambda _: None)
        assert not ring.health().ready
    assert time.monotonic() - begin < 1.0


async def test_a_start_that_fails_leaves_nothing_behind(
    config: RingConfig, ray_cluster: RayCluster, tmp_path: Path
) -> None:
    from stage.ray_ring import RayRing

    ring = RayRing(replace(config, model_dir=tmp_path), ray_cluster)
    with pytest.raises(ModelUnusable):
        await ring.start(lambda _: None)
    assert ring.pids == ()
    with pytest.raises(RingLost):
        ring.submit(first_frame())
    await ring.stop()


async def test_garbage_in_a_stages_socket_does_not_end_it(started: RayRing) -> None:
    await started.open_epoch(Epoch(1))
    socket = started._running().sender._socket
    socket.send_multipart([b"garbage"])
    started.submit(first_frame(epoch=1, tokens=(5, 1 << 30)))
    reply = await started.next_reply()
    assert [refusal.code for refusal in reply.refusals] == [RefusalCode.BAD_FRAME]
    started.submit(replace(first_frame(epoch=1), seq=Seq(1)))
    reply = await started.next_reply()
    assert (reply.seq, reply.refusals, len(reply.segments[0].tokens)) == (1, (), 1)


async def test_frames_left_in_the_sockets_are_dropped_when_an_epoch_opens(started: RayRing) -> None:
    await started.open_epoch(Epoch(4))
    started.submit(first_frame(epoch=4))
    answer = await started.next_reply()
    keep_busy(started, epoch=4)
    await started.open_epoch(Epoch(5))
    started.submit(first_frame(epoch=5))
    reply = await started.next_reply()
    assert (reply.epoch, reply.seq, reply.segments) == (5, 0, answer.segments)


async def test_a_ring_without_frames_uses_no_cpu(started: RayRing) -> None:
    before = [cpu_seconds(pid) for pid in started.pids]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.0):
            await started.next_reply()
    used = [cpu_seconds(pid) - spent for pid, spent in zip(started.pids, before, strict=True)]
    # Ray's own threads take about 1 %; a polling loop would take all of it.
    assert max(used) < 0.2


async def test_a_lost_ring_is_ended_without_a_trace_and_starts_anew(
    started: RayRing, sockets: Path
) -> None:
    await started.open_epoch(Epoch(6))
    assert len(os.listdir(sockets)) == 1
    pids = started.pids
    started.submit(first_frame(epoch=6))
    await started.next_reply()
    keep_busy(started, epoch=6)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RingLost, match="stage 1: its process died"):
        await asyncio.wait_for(until_lost(started), timeout=2.0)
    assert not started.health().ready
    with pytest.raises(RingLost):
        started.submit(first_frame(epoch=6))
    await started.stop()
    assert not any(is_alive(pid) for pid in pids)
    assert os.listdir(sockets) == []
    await assert_starts_anew(started)


async def assert_starts_anew(ring: RayRing) -> None:
    told: list[StageProgress] = []
    await ring.start(told.append)
    assert {(news.stage, news.note.split()[0]) for news in told} >= {(0, "ready"), (1, "ready")}
    assert all(news.bytes_done == news.bytes_total > 0 for news in told[-2:])
    ring.submit(first_frame())
    assert (await ring.next_reply()).refusals == ()
