"""What Ray itself would print of its cluster, coloured and a thousand characters long, as lines of our own log.

Decides how loud they are: of a dead worker its ring says more, in fewer words. It may hide nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ray._private.worker

log = logging.getLogger(__name__)

_LONGEST = 300
# Our own line names the stage, and says what follows.
_TOLD = "A worker died or was killed"


def log_what_ray_says() -> None:
    """From now on, in this process. Where a Ray has no such function, it prints as it likes."""
    if hasattr(ray._private.worker, "print_to_stdstream"):
        ray._private.worker.print_to_stdstream = _say


def _say(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
    """In place of Ray's print_to_stdstream, in a thread of Ray's."""
    for text in data.get("lines", ()):
        line = " ".join(str(text).split())
        level = logging.INFO if line.startswith(_TOLD) else logging.WARNING
        log.log(level, "ray says: %s", line if len(line) <= _LONGEST else f"{line[:_LONGEST]}...")
