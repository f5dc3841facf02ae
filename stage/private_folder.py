"""Folders for the sockets of one host, which nobody else can enter, and the end of those whose owner was killed.

Decides whose a folder is: whoever holds the lock on the file in it, which the kernel gives back when its process ends,
however it does. It may remove no folder without such a file, and none whose lock is held.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

# A Unix socket's path may have 107 bytes.
_LONGEST_TEMP = 60
_PREFIX = "ringserve-"
_NEW = ".ringserve-"  # until it is locked
_LOCK = "owner"


class PrivateFolder:
    """Raises OSError. `close` removes it, if its process lives to do so."""

    def __init__(self) -> None:
        usual = tempfile.gettempdir()
        parent = Path(usual if len(usual) < _LONGEST_TEMP else "/tmp")
        remove_left_over(parent)
        made = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))  # nobody else is let in
        try:
            self._lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path = made.rename(parent / (_PREFIX + made.name.removeprefix(_NEW)))
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            raise

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_private_folder(folder: Path) -> None:
    """One that this module made, whoever is gone that had it."""
    if folder.name.startswith(_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def remove_left_over(parent: Path) -> None:
    """Those of processes that have ended without a word."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # it is another user's, or somebody's who lives
            held = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(held)
