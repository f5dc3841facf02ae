"""What several tests of a cluster use: its second node, and a model that loads and answers in no time."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from stage.ray_ring import RayCluster


@pytest.fixture(scope="session")
def add_node(ray_cluster: RayCluster) -> Callable[..., AbstractContextManager[Popen[bytes]]]:
    """Adds a node to the session's cluster for the length of a block. What is given runs it: `env X=1`, say."""

    @contextmanager
    def added(*before: str, flags: Sequence[str] = ()) -> Iterator[Popen[bytes]]:
        import ray

        address = ray.get_runtime_context().gcs_address
        command = [*before, sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        command += ["--address", address, "--num-cpus", "1", "--object-store-memory", "80000000"]
        node = Popen(
            [*command, "--disable-usage-stats", "--include-log-monitor", "false", *flags],
            stdout=DEVNULL,
            stderr=DEVNULL,
        )
        try:
            _await_nodes(2, node)
            yield node
        finally:
            node.send_signal(signal.SIGTERM)
            node.wait(timeout=20)
            _await_nodes(1, None)

    return added


@pytest.fixture(scope="module")
def second_node(add_node: Callable[[], AbstractContextManager[Popen[bytes]]]) -> Iterator[None]:
    """One more node in the session's cluster, for one module only."""
    with add_node():
        yield


def _await_nodes(count: int, node: Popen[bytes] | None) -> None:
    import ray

    while sum(each["Alive"] for each in ray.nodes()) != count:
        assert node is None or node.poll() is None, "the second node did not start"


@pytest.fixture(scope="session")
def small_model(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers behind SmolLM2's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(11)
    folder = tmp_path_factory.mktemp("small")
    for file in smollm2_dir.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config = LlamaConfig(
        vocab_size=json.loads((smollm2_dir / "config.json").read_text())["vocab_size"],
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
