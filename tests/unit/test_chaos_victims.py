"""What is done to a stage's process is done to it, and undone; threads get what can be done to them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gateway.chaos.checker import left_over
from gateway.chaos.processes import has_ended, stage_pids, weight
from gateway.chaos.storm import Fault
from gateway.chaos.victims import Processes, Threads, victims_of
from gateway.chaos.waiting import until

# Appends a line to a file for each line that it reads, and says how that went.
_WRITER = """
import sys
sys.stdout.write("here\\n"); sys.stdout.flush()
for line in sys.stdin:
    try:
        with open(sys.argv[1], "ab") as file:
            file.write(b"x" * 4096)
        sys.stdout.write("written\\n")
    except OSError as error:
        sys.stdout.write(f"{type(error).__name__}\\n")
    sys.stdout.flush()
"""


class Ring:
    """As far as a storm knows it."""

    def __init__(self, *pids: int) -> None:
        self.pids = pids
        self.spares: tuple[int, ...] = ()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _WRITER, str(tmp_path / "file")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process
        process.kill()


@pytest.fixture
def victims(writer: subprocess.Popen[str]) -> Processes:
    return Processes(Ring(0, writer.pid), has_disk=True, seated=set)


def ask(writer: subprocess.Popen[str]) -> str:
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdin.write("\n")
    return writer.stdout.readline().strip()


def test_a_full_disk_is_full_for_as_long_as_it_is_told(
    victims: Processes, writer: subprocess.Popen[str]
) -> None:
    assert ask(writer) == "written"
    with victims.full_disk(1):
        assert ask(writer) == "OSError"
    assert ask(writer) == "written"


async def test_a_stage_that_is_held_up_stands_still_and_goes_on(
    victims: Processes, writer: subprocess.Popen[str]
) -> None:
    pid = victims.stop(1)
    assert pid == writer.pid
    stopped: Callable[[], bool] = lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED  # noqa: E731
    assert await until(stopped, 5.0)
    await victims.hold_up(1, 0.01)
    assert ask(writer) == "written"


def test_a_killed_process_has_ended_and_weighs_nothing(
    victims: Processes, writer: subprocess.Popen[str]
) -> None:
    before = weight(writer.pid)
    assert before is not None
    assert before.rss_bytes > before.uss_bytes > 0
    assert before.descriptors >= 3
    assert before.threads >= 1
    assert not has_ended(writer.pid)
    assert victims.kill(1) == writer.pid
    os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
    assert weight(writer.pid) is None, "a zombie has no memory left, and is no small process"
    writer.wait(timeout=5.0)
    assert has_ended(writer.pid)
    assert weight(writer.pid) is None
    assert victims.kill(1) == writer.pid, "whoever is gone already is no error"


def test_whoever_loads_is_the_youngest_stage_that_has_no_seat(
    monkeypatch: pytest.MonkeyPatch, writer: subprocess.Popen[str]
) -> None:
    monkeypatch.setattr("gateway.chaos.victims.stage_pids", lambda: (1, writer.pid))
    assert Processes(Ring(), False, lambda: {1, writer.pid}).kill_loading() is None
    assert Processes(Ring(), False, lambda: {1}).kill_loading() == writer.pid
    assert writer.wait(timeout=5.0) < 0


async def test_a_stage_that_outlives_its_raylet_is_left_over_whosever_child_it_is(
    writer: subprocess.Popen[str],
) -> None:
    assert await left_over((writer.pid,), 0.0) == [f"process {writer.pid} is left over"]
    writer.kill()
    assert await left_over((writer.pid,), 5.0) == []


def test_only_processes_that_ray_made_of_stages_count() -> None:
    assert stage_pids() == ()


class Tellable:
    """A ring of threads."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def fail(self, stage: int) -> None:
        self.told.append(("fail", stage))

    def hold_up(self, stage: int, seconds: float) -> None:
        self.told.append(("hold up", stage))


async def test_threads_are_told_to_fail_and_to_wait() -> None:
    ring = Tellable()
    victims = Threads(ring, None)
    assert victims.kill(1) == 0
    await victims.hold_up(0, 0.0)
    assert ring.told == [("fail", 1), ("hold up", 0)]


def test_the_disk_of_threads_goes_away_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "ring-0"
    folder.mkdir()
    (folder / "node").touch()
    with Threads(Tellable(), folder).full_disk(0):
        assert not folder.is_dir()
        with pytest.raises(OSError, match="Not a directory"):
            (folder / "other").touch()
    assert [file.name for file in folder.iterdir()] == ["node"]
    assert [each.name for each in tmp_path.iterdir()] == ["ring-0"]


def test_what_cannot_be_done_to_a_kind_of_ring_is_not_offered(tmp_path: Path) -> None:
    of_processes = victims_of(Ring(1), tmp_path, set).faults  # type: ignore[arg-type]
    assert of_processes == set(Fault) - {Fault.GATEWAY}
    assert Fault.DISK not in victims_of(Ring(1), None, set).faults  # type: ignore[arg-type]
    of_threads = victims_of(Tellable(), None, set).faults  # type: ignore[arg-type]
    assert of_threads.isdisjoint({Fault.KILL_LOAD, Fault.STOP, Fault.DISK, Fault.GATEWAY})
