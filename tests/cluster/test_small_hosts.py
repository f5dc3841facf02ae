"""Hosts with less than Ray wants by itself: a small or absent /dev/shm, a temporary folder that is full or too deep.

A container has 64 MB of /dev/shm where nobody asked for more, and Ray's object store wants 80.
"""

from __future__ import annotations

import errno
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.errors import RingLost, SetupError
from coordinator.frames import Epoch
from stage.replies import ReplyQueue

pytestmark = [pytest.mark.cluster, pytest.mark.long]

_ROOT = Path(__file__).resolve().parents[2]
_ALONE = ("unshare", "--map-root-user", "--mount", "sh", "-c")
_MAIN = "from gateway.cli.app import main; main()"
_SMALL = ("--grpc-port", "0", "--http-port", "0", "--lanes", "1", "--max-rows", "256")
_END_S = 60.0
_STORE = 80_000_000


@contextmanager
def _serving(model: Path, setup: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A server on a host that `setup` changes for it alone."""
    serve = (sys.executable, "-c", _MAIN, "serve", str(model), *_SMALL, *more)
    process = subprocess.Popen(
        [*_ALONE, f'{setup} && exec "$@"', "-", *serve],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _skip_unless_mounted(errors: str) -> None:
    if "unshare" in errors or "mount:" in errors:
        pytest.skip(f"nothing can be mounted here: {errors.strip()[-200:]}")


def test_64_megabytes_of_shared_memory_are_enough(small_model: Path) -> None:
    with _serving(small_model, "mount -t tmpfs -o size=64m tmpfs /dev/shm") as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        if ready:
            process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=_END_S)
    _skip_unless_mounted(errors)
    assert ready.startswith("ready: "), errors
    assert (process.returncode, rest) == (0, "")
    told = [line for line in errors.splitlines() if "/dev/shm" in line]
    assert len(told) == 1
    assert "small folder=/dev/shm free_mib=64: Ray's object store lies in /tmp" in told[0]


def test_no_room_for_rays_session_is_told_before_ray_waits_for_it(small_model: Path) -> None:
    setup = "mount -t tmpfs -o size=1m tmpfs /mnt && export RAY_TMPDIR=/mnt"
    with _serving(small_model, setup) as process:
        out, errors = process.communicate(timeout=_END_S)
    _skip_unless_mounted(errors)
    assert (process.returncode, out) == (1, "")
    assert errors == (
        "error: no room for Ray's session in /mnt: 1 MiB are free, and 32 are needed; "
        "free some, or set RAY_TMPDIR to another folder\n"
    )


def test_a_folder_for_the_session_is_where_ray_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._common.utils import get_default_system_temp_dir

    from stage.ray_ring import session

    monkeypatch.setattr(session, "_LONGEST_PARENT", 200)
    for name, folder in (("TMPDIR", tmp_path / "a"), ("RAY_TMPDIR", tmp_path / "b")):
        monkeypatch.setenv(name, str(folder))
        assert str(session.session_parent()) == get_default_system_temp_dir()
        assert folder.is_dir()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file" / "x"))
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="no folder for Ray's session: .*; set RAY_TMPDIR to"):
        session.session_parent()
    # A folder whose sockets would have too long a name is of no use.
    monkeypatch.setattr(session, "_LONGEST_PARENT", 38)
    assert session.session_parent() == Path("/tmp")


@pytest.mark.parametrize("is_there", [True, False])
def test_an_object_store_without_shared_memory_lies_elsewhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_there: bool,
) -> None:
    from stage.ray_ring import session

    monkeypatch.setattr(session, "_SHARED_MEMORY", tmp_path if is_there else tmp_path / "shm")
    if is_there:
        assert session.object_store_folder(tmp_path, _STORE) is None
        assert session.object_store_folder(tmp_path, 2**60) == str(tmp_path)
    else:
        assert session.object_store_folder(tmp_path, _STORE) == str(tmp_path)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


async def test_a_ring_without_a_folder_for_its_sockets_says_so_and_may_try_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    from stage.ray_ring import wiring

    def full() -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    here = SimpleNamespace(get_node_id=lambda: "n")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(wiring, "PrivateFolder", full)
    made = wiring.Wiring(1, Epoch(0), ReplyQueue(on_lost=lambda: None))
    member: Any = SimpleNamespace(place=SimpleNamespace(node="n"))
    with pytest.raises(RingLost, match="no folder for its sockets: .* No space left on device"):
        await made.connect([member], 0, 1.0)
    await made.close()
