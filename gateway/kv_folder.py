"""The folder that keeps rows over a restart, looked at where its operator sees what is wrong with it.

Decides that a folder which can never be written to ends the start, and a full one does not: what lies there is used.
Stages live elsewhere, and go on without a folder.
"""

from __future__ import annotations

import logging
from pathlib import Path

from coordinator.errors import SetupError

log = logging.getLogger(__name__)


def usable_folder(kv_disk: Path | None) -> Path | None:
    """Makes it where it is not there. Raises SetupError."""
    if kv_disk is None:
        return None
    from stage.disk_room import no_room

    try:
        folder = kv_disk.expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
    except RuntimeError as error:  # ~somebody who is not known here
        raise _unusable(f"{kv_disk}: {error}") from error
    except OSError as error:
        raise _unusable(f"{kv_disk}: {error.strerror}") from error
    if (why := no_room(folder)) is not None:
        if not why.is_full:
            raise _unusable(str(why))
        log.warning(
            "full folder=%s: the rows that lie there are used, and none are kept until there is space",
            folder,
        )
    return folder.resolve()


def _unusable(reason: str) -> SetupError:
    return SetupError(
        f"--kv-disk {reason}; give a folder that can be written to, or leave it out: "
        "then nothing is kept over a restart"
    )
