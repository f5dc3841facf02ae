"""Folders of sockets: who may remove them, and that a killed owner's do not stay."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage.private_folder import PrivateFolder, remove_private_folder

ROOT = Path(__file__).parents[2]
_OWNER = (
    "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
    "from stage.private_folder import PrivateFolder\n"
    "folder = PrivateFolder(); print(folder.path, flush=True); sys.stdin.read()\n"
)


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # a short path, as sockets need
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def owner(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(parent)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_of_a_process_that_was_killed_is_removed_by_the_next_one(parent: Path) -> None:
    process, left = owner(parent)
    (left / "0").touch()
    with process:
        alive = PrivateFolder()
        assert left.is_dir()
        process.kill()
    mine = PrivateFolder()
    assert not left.exists()
    assert sorted(parent.iterdir()) == sorted([alive.path, mine.path])
    for each in (alive, mine):
        each.close()
    assert list(parent.iterdir()) == []


def test_what_nobody_here_has_made_stays(parent: Path) -> None:
    """Nor what is just being made, which has no lock yet."""
    others = [parent / "ringserve-bench", parent / ".ringserve-new", parent / "else"]
    for each in others:
        each.mkdir()
    (parent / "else" / "owner").touch()
    PrivateFolder().close()
    assert sorted(parent.iterdir()) == sorted(others)


def test_a_folder_is_for_its_user_only_and_can_be_removed_by_whoever_outlives_its_owner(
    parent: Path,
) -> None:
    folder = PrivateFolder()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    remove_private_folder(folder.path)
    remove_private_folder(parent)
    folder.close()
    assert parent.is_dir()
    assert list(parent.iterdir()) == []
