"""Two stages on two GPUs of one host, which are made visible in another order than theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.device, pytest.mark.asyncio(loop_scope="session")]


async def test_stages_compute_on_devices_that_are_visible_in_another_order(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-project/vllm#14093, with real devices."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    from coordinator.frames import LaneId
    from fakering.hand import Hand
    from stage.config import RingConfig
    from stage.ray_ring import RayRing

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    splits = ((0, 2), (2, 4))
    ring = RayRing(RingConfig(tiny_model, "tiny", splits, 1, 64, device="cuda"))
    try:
        hand = Hand(ring, await ring.start(lambda _: None))
        assert hand.info.devices == ("cuda:0", "cuda:0")
        assert len((await hand.turn(LaneId(0), (3, 5, 7, 11), 4)).tokens) == 4
    finally:
        await ring.stop()
