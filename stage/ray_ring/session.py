"""What a Ray of our own needs of this host: a folder for its session, and one for its object store.

Decides where both lie, and says in one line what is wrong with the first before Ray waits half a minute for it to be
written. No frame passes through the object store, so a small /dev/shm is worth a line and no more.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from coordinator.errors import SetupError
from stage.disk_room import no_room

log = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
# Logs of a ring's start and some hours, and the shared part of the object store as far as it is used.
_SESSION_BYTES = 32 * 2**20
# Ray's sockets lie 68 characters below it, and a Unix socket's path may have 107 bytes.
_LONGEST_PARENT = 38
_USUAL = Path("/tmp")
_ELSEWHERE = "set RAY_TMPDIR to another folder"


def session_parent() -> Path:
    """Raises SetupError. Ray makes its folder `ray` in it, for sockets and logs."""
    folder = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or _USUAL).absolute()
    if len(os.fsencode(folder)) > _LONGEST_PARENT:
        folder = _USUAL
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"no folder for Ray's session: {error}; {_ELSEWHERE}") from error
    if (why := no_room(folder, _SESSION_BYTES)) is not None:
        way = f"free some, or {_ELSEWHERE}" if why.is_full else _ELSEWHERE
        raise SetupError(f"no room for Ray's session in {why}; {way}")
    return folder


def object_store_folder(parent: Path, size: int) -> str | None:
    """Where the object store's memory lies; None: where Ray puts it by itself."""
    try:
        free = shutil.disk_usage(_SHARED_MEMORY).free
        usable = os.access(_SHARED_MEMORY, os.W_OK)
    except OSError:
        free, usable = 0, False
    if usable and free >= size:
        return None
    log.warning(
        "small folder=%s free_mib=%d: Ray's object store lies in %s; frames do not pass through it",
        _SHARED_MEMORY,
        free // 2**20,
        parent,
    )
    return str(parent)
