"""Whether a folder takes what is to be written there, found out by writing, and said in one line.

Decides nothing of what follows. Permission bits and quotas tell less than a small file does.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

_MIB = 2**20
_A_BLOCK = bytes(4096)


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Why a folder cannot be written to."""

    reason: str
    is_full: bool  # it may be another time

    def __str__(self) -> str:
        return self.reason


def no_room(folder: Path, wanted: int = 0) -> NoRoom | None:
    """None: a file can be made there, and `wanted` bytes are free. The folder must be there."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".room-") as file:
            file.write(_A_BLOCK)
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return NoRoom(f"{folder}: {_words(error)}", is_full(error))
    if free < wanted:
        told = f"{free // _MIB} MiB are free, and {-(-wanted // _MIB)} are needed"
        return NoRoom(f"{folder}: {told}", is_full=True)
    return None


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _words(error: OSError) -> str:
    return error.strerror or type(error).__name__
