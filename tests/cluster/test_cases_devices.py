"""Which GPU a stage computes on. There is none here: Ray is told of two, and the stages tell what they were shown."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stage.config import RingConfig
from tests.cluster.gpu_actor import StageActorWithGpu

if TYPE_CHECKING:
    from stage.ray_ring import RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("visible", ["1,0", "7,3"])
async def test_two_stages_of_one_host_see_a_device_of_their_own_each(
    tiny_model: Path,
    ray_cluster: RayCluster,
    add_node: Callable[..., AbstractContextManager[Any]],
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
) -> None:
    """vllm-project/vllm#14093: two stages on one host with Ray fail to start. Whatever order the host's devices are
    made visible in, each process is shown one of them, which is its first.
    """
    from stage.ray_ring import RayRing, crew

    monkeypatch.setattr(crew, "StageActor", StageActorWithGpu)
    config = RingConfig(tiny_model, "tiny", ((0, 2), (2, 4)), 1, 64, device="cuda")
    with add_node("env", f"CUDA_VISIBLE_DEVICES={visible}", flags=("--num-gpus", "2")):
        ring = RayRing(config, ray_cluster)
        try:
            info = await ring.start(lambda _: None)
        finally:
            await ring.stop()
    assert sorted(info.devices) == sorted(f"cuda:0 of {one}" for one in visible.split(","))
