"""Nodes that cannot hold a stage: no model there, another one, another version, no room, or gone meanwhile.

Each is one line that says which node and what is wrong, and nothing of the ring stays in the cluster.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.errors import ClusterTooSmall, SetupError
from coordinator.frames import PROTOCOL_VERSION
from stage.config import RingConfig
from tests.cluster.watched_ring import until

if TYPE_CHECKING:
    from stage.ray_ring import RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]

AddNode = Callable[..., AbstractContextManager[Popen[bytes]]]
_ROOT = Path(__file__).resolve().parents[2]
_ALONE = ("unshare", "--map-root-user", "--mount", "sh", "-c")
# Ray tells of what became free a moment later.
_NEWS_S = 10.0


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> RingConfig:
    """The model is in a folder of this test: a node may see something else there."""
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_model, folder)
    return RingConfig(folder, "tiny", ((0, 2), (2, 4)), 2, 64, cpu_share=0.1, spread=True)


@contextmanager
def _nothing_stays() -> Iterator[None]:
    import ray
    from ray.util import placement_group_table

    yield
    deadline = time.monotonic() + _NEWS_S
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < deadline, ray.available_resources()
    groups = placement_group_table().values()
    assert [group for group in groups if group["state"] != "REMOVED"] == []


async def _refused(config: RingConfig, cluster: RayCluster) -> SetupError:
    """What a start says, which must not come up; the seconds that it took are the test's own limit."""
    from stage.ray_ring import RayRing

    ring = RayRing(config, cluster)
    with pytest.raises(SetupError) as refused:
        await ring.start(lambda _: None)
    assert "\n" not in str(refused.value)
    return refused.value


async def test_a_folder_that_a_node_does_not_have_is_named_with_stage_and_host(
    config: RingConfig, ray_cluster: RayCluster, add_node: AddNode
) -> None:
    hidden = 'mount -t tmpfs tmpfs "$1" && shift && exec "$@"'
    with add_node(*_ALONE, hidden, "-", str(config.model_dir)), _nothing_stays():
        said = str(await _refused(config, ray_cluster))
    assert str(config.model_dir) in said
    assert "(stage 1 on " in said


def _instead(there: Path, file: Path) -> tuple[str, ...]:
    """Runs a node on which `there` lies where `file` lies."""
    return (*_ALONE, 'mount --bind "$1" "$2" && shift 2 && exec "$@"', "-", str(there), str(file))


async def test_another_model_in_the_same_folder_is_told_by_its_bytes(
    config: RingConfig, ray_cluster: RayCluster, add_node: AddNode, tmp_path: Path
) -> None:
    weights = config.model_dir / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    other = tmp_path / "other"
    other.write_bytes(data)
    with add_node(*_instead(other, weights)), _nothing_stays():
        said = str(await _refused(config, ray_cluster))
    assert said.startswith("stage 1 on ")
    assert f"reads another model in {config.model_dir} than stage 0 on " in said
    assert said.endswith("copy the same folder to every machine")


@pytest.mark.parametrize("how", ["another protocol", "half installed"])
async def test_a_node_of_another_version_is_named_before_it_gets_a_stage(
    config: RingConfig, ray_cluster: RayCluster, add_node: AddNode, tmp_path: Path, how: str
) -> None:
    """A patched copy of one file over there."""
    frames = _ROOT / "coordinator" / "frames.py"
    source = frames.read_text()
    ours = f"PROTOCOL_VERSION = {PROTOCOL_VERSION}\n"
    assert ours in source
    theirs = {
        "another protocol": source.replace(ours, "PROTOCOL_VERSION = 999\n"),
        "half installed": "raise RuntimeError('half installed')",
    }
    patched = tmp_path / "frames.py"
    patched.write_text(theirs[how])
    with add_node(*_instead(patched, frames)), _nothing_stays():
        said = str(await _refused(config, ray_cluster))
    told = {
        "another protocol": f"runs protocol 999, and this is protocol {PROTOCOL_VERSION}",
        "half installed": "cannot run ringserve: RuntimeError: half installed",
    }
    assert said.startswith("the node ")
    assert said.endswith(f" {told[how]}: install the same on every machine")


async def test_versions_are_compared_where_there_are_any() -> None:
    from stage.ray_ring.versions import check_same

    ours = {"ringserve": "1.2", "protocol": "7"}
    check_same("h", {"ringserve": "", "protocol": "7", "error": ""}, ours)
    check_same("h", {"ringserve": "1.2", "protocol": "7"}, {"ringserve": "", "protocol": "7"})
    with pytest.raises(SetupError, match="^the node h runs ringserve 1.1, and this is ringserve 1"):
        check_same("h", {"ringserve": "1.1", "protocol": "7"}, ours)
    with pytest.raises(SetupError, match="^the node h runs protocol of no version, and this is"):
        check_same("h", {"ringserve": "1.2"}, ours)


async def test_another_ray_or_python_is_one_line_with_both_versions() -> None:
    """In Ray's own words, over seven lines, as a process hears them that joins."""
    import ray
    from ray._private.utils import check_version_info

    from stage.ray_ring.versions import not_joined

    with pytest.raises(RuntimeError) as heard:
        check_version_info({"ray_version": "2.1.0", "python_version": "3.10.4"}, "1.2.3.4")
    said = str(not_joined("head:6379", heard.value))
    assert said.startswith("the Ray at head:6379 is Ray 2.1.0 on Python 3.10.4, and this is Ray ")
    assert f"Ray {ray.__version__} on Python 3." in said
    assert "\n" not in said
    several = RuntimeError("\n  it is gone\nand more\n")
    assert str(not_joined(None, several)) == "no Ray at this host: it is gone"
    assert str(not_joined("h:1", RuntimeError(""))) == "no Ray at h:1: RuntimeError"


async def test_what_a_stage_warns_of_is_in_its_gateways_log(
    config: RingConfig, ray_cluster: RayCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a file of rows that is none, say: its own log lies among Ray's, on whatever machine it runs."""
    from stage.ray_ring import RayRing

    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / f"{'0' * 32}.2-4.kv").write_bytes(b"x")
    near = replace(config, spread=False, kv_disk=tmp_path / "rows", probe_s=0.1)
    ring = RayRing(near, ray_cluster)
    try:
        await ring.start(lambda _: None)
        await until(lambda: "removed a node file=" in caplog.text)
    finally:
        await ring.stop()
    told = [m for m in caplog.messages if m.startswith("removed a node")]
    assert len(told) == 1
    assert told[0].endswith(" reason=it ends too early stage=1")


async def test_a_stage_that_no_node_has_room_for_is_refused_in_time(
    config: RingConfig, ray_cluster: RayCluster, add_node: AddNode
) -> None:
    """All nodes together have what is wanted, and no two of them."""
    import ray

    with add_node(), _nothing_stays():
        half = ray.cluster_resources()["CPU"] / 2
        greedy = replace(config, cpu_share=half, place_s=1.0, spread=False)
        async with asyncio.timeout(20):
            error = await _refused(greedy, ray_cluster)
    assert isinstance(error, ClusterTooSmall)
    assert str(error).startswith("the cluster is too small: wanted ")
    assert str(error).endswith("available no room on its nodes")


@pytest.mark.parametrize("moment", ["before it is placed", "once it is placed"])
async def test_a_cluster_that_shrinks_meanwhile_ends_the_start(
    config: RingConfig,
    ray_cluster: RayCluster,
    add_node: AddNode,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    from stage.ray_ring.crew import Crew

    config = replace(config, place_s=2.0, start_s=20.0)
    with add_node() as node, _nothing_stays():

        def leaves() -> None:
            node.send_signal(signal.SIGTERM)
            node.wait(45)

        place, make_group = Crew.place, Crew._make_group

        async def placed(crew: Crew) -> Any:
            bundles = await place(crew)
            await asyncio.to_thread(leaves)
            return bundles

        def grouped(crew: Crew, strategy: Any) -> Any:
            leaves()
            return make_group(crew, strategy)

        if moment == "once it is placed":
            monkeypatch.setattr(Crew, "place", placed)
        else:
            monkeypatch.setattr(Crew, "_make_group", grouped)
        async with asyncio.timeout(100):
            error = await _refused(config, ray_cluster)
    assert isinstance(error, ClusterTooSmall) == (moment == "before it is placed"), error
    if moment == "once it is placed":
        # Where Ray moves the whole group, the other one does not come up either.
        assert re.match("a stage could not be started: stage [01]: ", str(error))
