"""Fixtures that more than one folder of tests uses: how each kind of ring is made.

A ring factory makes a ring that is not started yet. The contract suite runs on every factory named in RINGS;
a ring that needs Ray or a model brings its own session-scoped fixture and its own line there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
import pytest_asyncio

from coordinator.ring import Ring
from fakering.ring import FakeRing

if TYPE_CHECKING:
    from stage.ray_ring import RayCluster

FAKE_VOCABULARY = 97


class RingFactory(Protocol):
    def __call__(self, *, lanes: int, max_rows: int) -> Ring: ...


# The id "x" stands for the fixture "x_ring_factory".
RINGS = [
    pytest.param("fake", id="fake"),
    pytest.param("local", id="local"),
    pytest.param("ray", id="ray", marks=pytest.mark.cluster),
]


@pytest.fixture(scope="session", params=RINGS)
def ring_factory(request: pytest.FixtureRequest) -> RingFactory:
    factory: RingFactory = request.getfixturevalue(f"{request.param}_ring_factory")
    return factory


@pytest.fixture(scope="session")
def fake_ring_factory() -> RingFactory:
    def make(*, lanes: int, max_rows: int) -> Ring:
        return FakeRing(3, lanes, max_rows, vocab_size=FAKE_VOCABULARY, host_rows=1000)

    return make


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of four layers whose tokens depend on what it reads."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(7)
    config = LlamaConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of four layers, three of which are recurrent."""
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, set_seed

    set_seed(3)
    config = Qwen3_5TextConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        eos_token_id=None,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=[*["linear_attention"] * 3, "full_attention"],
    )
    folder = tmp_path_factory.mktemp("hybrid")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def local_ring_factory(tiny_model: Path) -> RingFactory:
    from stage.config import RingConfig
    from stage.local_ring import LocalRing

    def make(*, lanes: int, max_rows: int) -> Ring:
        splits = ((0, 1), (1, 3), (3, 4))
        return LocalRing(RingConfig(tiny_model, "tiny", splits, lanes, max_rows))

    return make


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def ray_cluster() -> AsyncIterator[RayCluster]:
    """The one Ray of a test session."""
    from stage.ray_ring import RayCluster

    cluster = RayCluster()
    await cluster.acquire()
    yield cluster
    await cluster.release()


@pytest.fixture(scope="session")
def ray_ring_factory(tiny_model: Path, ray_cluster: RayCluster) -> RingFactory:
    from stage.config import RingConfig
    from stage.ray_ring import RayRing

    def make(*, lanes: int, max_rows: int) -> Ring:
        config = RingConfig(tiny_model, "tiny", ((0, 2), (2, 4)), lanes, max_rows)
        return RayRing(config, ray_cluster)

    return make


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The built-in model's folder: fetched and converted once into the user's cache."""
    from stage.model.embedded import ensure_embedded_model

    return ensure_embedded_model()
