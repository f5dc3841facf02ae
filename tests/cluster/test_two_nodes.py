"""A ring over two nodes of a cluster: the same answers over encrypted links, and strangers are not heard.

The second node runs on this machine too, but a node of its own is all that a ring goes by.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import zmq
from zmq.utils.monitor import recv_monitor_message

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.errors import RingLost
from coordinator.frames import Epoch, Frame, Seq
from coordinator.requests import Request, SamplingSpec, SessionId, TokenDelta
from coordinator.ring import Ring
from stage import wire
from stage.config import RingConfig
from stage.local_ring import LocalRing
from stage.messages import FrameMessage
from tests.cluster.watched_ring import until

if TYPE_CHECKING:
    from stage.ray_ring import RayCluster, RayRing
    from stage.transport import Endpoint

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session")]

_PROMPT = tuple(range(3, 90))


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> RingConfig:
    return RingConfig(tiny_model, "tiny", ((0, 2), (2, 4)), 2, 512, cpu_share=0.1, spread=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ring(
    config: RingConfig, ray_cluster: RayCluster, second_node: None
) -> AsyncIterator[RayRing]:
    from stage.ray_ring import RayRing

    ring = RayRing(config, ray_cluster)
    yield ring
    await ring.stop()


async def _answers(ring: Ring) -> list[tuple[int, ...]]:
    """A cold turn, a warm one of the same session, and a sampled one."""
    driver = RingDriver("ring-0", ring, SchedulerSettings(), SystemClock())
    await driver.start(lambda _: None)
    session = SessionId("s")
    answers = []
    for request in (
        Request(_PROMPT, max_new_tokens=20, session=session),
        Request((*_PROMPT, 7, 8, 9), max_new_tokens=20, session=session),
        Request(_PROMPT[::-1], SamplingSpec(temperature=0.9, seed=4), max_new_tokens=20),
    ):
        tokens: list[int] = []
        async with driver.submit(request) as stream:
            async for event in stream:
                tokens += event.tokens if isinstance(event, TokenDelta) else ()
        answers.append(tuple(tokens))
    await driver.stop()
    return answers


async def test_a_ring_over_two_nodes_answers_as_one_process_does(
    ring: RayRing, config: RingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await _answers(LocalRing(config))
    assert [len(answer) for answer in expected] == [20, 20, 20]

    async def runs_on() -> None:
        """A start takes seconds: the next tests go on with this one."""

    monkeypatch.setattr(ring, "stop", runs_on)
    assert await _answers(ring) == expected


@pytest_asyncio.fixture(loop_scope="session")
async def started(ring: RayRing) -> RayRing:
    if not ring.health().ready:
        await ring.start(lambda _: None)
    return ring


async def test_each_stage_has_a_node_of_its_own_and_is_reached_behind_a_door(
    started: RayRing,
) -> None:
    nodes = [place.node for place in started._running().places]
    assert len(set(nodes)) == 2
    for endpoint in started._running().endpoints:
        assert endpoint.address.startswith("tcp://")
        assert endpoint.public is not None


def _shout(to: Endpoint, message: Sequence[wire.Buffer], server: bytes | None) -> int:
    """Sends what a stage would take from its own, as a stranger; returns how the handshake ended."""
    failures = (
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_DISCONNECTED
    )
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if server is not None:
            public, secret = zmq.curve_keypair()
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, server)
        with socket.get_monitor_socket(failures | zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
            socket.connect(to.address)
            socket.send_multipart(message)
            event: int = recv_monitor_message(monitor)["event"]
            socket.disable_monitor()
    return event


async def test_a_stranger_on_a_stages_port_gets_no_frame_in_and_disturbs_nobody(
    started: RayRing,
) -> None:
    await started.open_epoch(Epoch(1))
    forged = wire.encode(FrameMessage(Epoch(1), Frame(Epoch(1), Seq(0))))
    for endpoint in started._running().endpoints:
        for server in (None, endpoint.public, zmq.curve_keypair()[0]):
            assert _shout(endpoint, forged, server) != zmq.EVENT_HANDSHAKE_SUCCEEDED
    # Had a stage taken the forged frame, it would ignore ours of the same seq without a reply.
    started.submit(Frame(Epoch(1), Seq(0)))
    reply = await started.next_reply()
    assert (reply.epoch, reply.seq, reply.refusals) == (1, 0, ())


async def test_a_dead_stage_of_another_node_loses_the_ring(started: RayRing) -> None:
    await started.open_epoch(Epoch(2))
    started.submit(Frame(Epoch(2), Seq(0)))
    await started.next_reply()
    os.kill(started.pids[1], signal.SIGKILL)
    with pytest.raises(RingLost, match="stage 1: its process died"):
        await started.next_reply()
    with pytest.raises(RingLost):
        started.submit(Frame(Epoch(2), Seq(1)))


async def test_a_spare_of_another_node_takes_over_behind_doors(
    ring: RayRing, config: RingConfig, ray_cluster: RayCluster
) -> None:
    from stage.ray_ring import RayRing

    # Two of such a share fit on the first node, and the third on the second.
    wide = RayRing(replace(config, cpu_share=0.8, spread=False, spares=1), ray_cluster)
    await wide.start(lambda _: None)
    try:
        assert all(each.address.startswith("ipc://") for each in wide._running().endpoints)
        await until(lambda: len(wide.spares) == 1)
        (spare,) = wide.spares
        os.kill(wide.pids[1], signal.SIGKILL)
        with pytest.raises(RingLost):
            await wide.next_reply()
        await wide.open_epoch(Epoch(1))
        assert wide.pids[1] == spare
        assert all(each.address.startswith("tcp://") for each in wide._running().endpoints)
        wide.submit(Frame(Epoch(1), Seq(0)))
        assert (await wide.next_reply()).refusals == ()
    finally:
        await wide.stop()
