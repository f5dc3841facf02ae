"""A ring on GPUs answers as the protocol says: the two turns of the contract, in float32 and bfloat16.

Written against torch's documented CUDA behaviour and not yet run on a GPU: it is skipped where torch sees none. What
holds on a GPU is for the probe to say: where it finds rows bit-identical, warm must equal cold token for token; where
it does not, the two differ by rounding only, so their log-probabilities must be near each other.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from coordinator.frames import Epoch, LaneId, SegmentReply
from coordinator.requests import SamplingSpec
from coordinator.ring import Ring, RingInfo
from fakering import texts
from fakering.hand import Hand
from stage.build import build_stage
from stage.config import RingConfig
from stage.local_ring import LocalRing
from stage.numerics import probe_numerics

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

TURN_1, TURN_2, COUNT = 20, 10, 8
# The tiny model's log-probabilities span about 10; rounding moves them by far less, a wrong row by far more.
TOLERANCES = {"float32": 0.01, "bfloat16": 0.5}
SCORED = SamplingSpec(temperature=0.0, logprobs=0)


def ring_config(model: Path, dtype: str, *, stages: int | None = None) -> RingConfig:
    """As many stages as there are GPUs, two at most."""
    stages = stages or min(2, torch.cuda.device_count())
    splits = ((0, 4),) if stages == 1 else ((0, 2), (2, 4))
    return RingConfig(model, "tiny", splits, lanes=3, max_rows=64, device="cuda", dtype=dtype)


@asynccontextmanager
async def started(ring: Ring) -> AsyncIterator[RingInfo]:
    try:
        yield await ring.start(lambda _: None)
    finally:
        await ring.stop()


async def scored(hand: Hand, lane: int, prompt: tuple[int, ...], cached: int) -> SegmentReply:
    """The token after `prompt` with its log-probability; its rows from `cached` on are computed."""
    job = hand.new_job()
    last = hand.prefill(lane, job, cached, prompt[cached:], SCORED)
    reply = await hand.exchange((hand.open(lane, job, prompt, cached),), (last,))
    assert reply.refusals == ()
    return reply.segments[0]


async def two_turns(ring: Ring, info: RingInfo, tolerance: float) -> None:
    """A second turn from every kind of row on, against the same prompt in a cold lane."""
    hand = Hand(ring, info)
    await hand.open_epoch(Epoch(1))
    prompt = texts.novel(TURN_1, 1, info.vocab_size)
    history = prompt + (await hand.turn(0, prompt, COUNT)).tokens
    longer = history + texts.novel(TURN_2, 2, info.vocab_size)
    committed = hand.ledger.valid_rows(LaneId(0))
    for cached in (committed, TURN_1, TURN_1 - 1, 1):
        warm = await scored(hand, 0, longer, cached)
        cold = await scored(hand, 1, longer, 0)
        if info.exact:
            assert warm.tokens == cold.tokens
            assert warm.logprobs == cold.logprobs
        else:
            assert math.isclose(warm.logprobs[0].chosen, cold.logprobs[0].chosen, abs_tol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
async def test_a_second_turn_on_gpus_answers_as_a_cold_lane(tiny_model: Path, dtype: str) -> None:
    ring = LocalRing(ring_config(tiny_model, dtype))
    async with started(ring) as info:
        assert all(device.startswith("cuda") for device in info.devices)
        await two_turns(ring, info, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_probe_says_what_the_gpu_gives(
    tiny_model: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ring_config(tiny_model, dtype, stages=1)
    stage, report = build_stage(config, 0, "cuda:0", lambda _: None)
    probed = probe_numerics(stage.model)
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name(0)}, {dtype}: {probed}")  # noqa: T201
    assert report.exact == probed.exact
    assert report.numerics.startswith("exact" if probed.exact else "shape-dependent")
    assert probed.max_difference < 1.0


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_gpu_computes_what_a_cpu_computes(tiny_model: Path, dtype: str) -> None:
    from stage.attention import RowSegment
    from stage.model.slice import RowBatch

    tokens = texts.novel(40, 3, 199)
    batch = RowBatch(tokens, (RowSegment(0, 0, 40),), asked=tuple(range(40)))
    on_gpu, _ = build_stage(ring_config(tiny_model, dtype, stages=1), 0, "cuda:0", lambda _: None)
    on_cpu, _ = build_stage(
        RingConfig(tiny_model, "tiny", ((0, 4),), 3, 64, dtype="float32"), 0, "cpu", lambda _: None
    )
    found, wanted = (stage.model.forward(batch).logits for stage in (on_gpu, on_cpu))
    assert found is not None
    assert wanted is not None
    difference = (found.cpu().log_softmax(-1) - wanted.log_softmax(-1)).abs().mean()
    assert difference < TOLERANCES[dtype]


@pytest.mark.cluster
async def test_an_actor_with_a_gpu_of_its_own_answers_as_a_cold_lane(
    tiny_model: Path,
) -> None:
    from stage.ray_ring import RayCluster, RayRing

    cluster = RayCluster()
    await cluster.acquire()
    try:
        ring = RayRing(ring_config(tiny_model, "float32", stages=1), cluster)
        async with started(ring) as info:
            await two_turns(ring, info, TOLERANCES["float32"])
    finally:
        await cluster.release()
