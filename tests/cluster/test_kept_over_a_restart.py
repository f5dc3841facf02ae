"""A ring that was stopped and started again serves from the rows that it left on disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.frames import LaneId, LoadNodes, NodeSpan, StoreNodes
from coordinator.nodes import node_id, root_of
from coordinator.ring import Ring
from fakering import texts
from fakering.hand import Hand
from stage.config import RingConfig
from stage.local_ring import LocalRing
from stage.ray_ring import RayCluster, RayRing

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session")]

A, B = 0, 1  # lanes
ROWS = 32


@pytest.fixture(params=["local", "ray"])
def make_ring(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path, ray_cluster: RayCluster
) -> Callable[[], Ring]:
    splits = ((0, 2), (2, 4))
    config = RingConfig(tiny_model, "tiny", splits, 2, 64, cpu_share=0.1, kv_disk=tmp_path)
    if request.param == "local":
        return lambda: LocalRing(config)
    return lambda: RayRing(config, ray_cluster)


@asynccontextmanager
async def started(ring: Ring) -> AsyncIterator[Hand]:
    try:
        yield Hand(ring, await ring.start(lambda _: None))
    finally:
        await ring.stop()


async def test_nodes_stored_just_before_a_stop_are_there_at_the_next_start(
    make_ring: Callable[[], Ring],
) -> None:
    async with started(make_ring()) as hand:
        assert hand.info.held.nodes == ()
        prompt = texts.novel(ROWS + 4, 1, hand.info.vocab_size)
        cold = (await hand.turn(A, prompt, 4)).tokens
        root = root_of(hand.info.model_fingerprint)
        span = NodeSpan(node_id(root, prompt[:ROWS]), root, 0, ROWS)
        frame = replace(hand.frame(), after=(StoreNodes(LaneId(A), (span,)),))
        assert (await hand.reply_to(hand.submit(frame))).lost == ()
    async with started(make_ring()) as hand:
        (node,) = hand.info.held.nodes
        assert (node.id, tuple(node.tokens)) == (span.node, prompt[:ROWS])
        hand.ledger.nodes.add(node)
        op = LoadNodes(LaneId(B), 0, ROWS, (node.id,))
        warm = await hand.turn(B, prompt, 4, cached_prefix=ROWS, ops=(op,))
        assert (warm.prefilled, warm.tokens) == (4, cold)
