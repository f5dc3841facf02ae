"""The processes that hold this process's stages: which there are, which of them is new, and what each takes.

Decides by how Ray names them, among this process's descendants only. It ends nobody.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import psutil

# Ray writes the class of the actor, and later its method, in place of the command line.
_STAGE = "ray::StageActor"


@dataclass(frozen=True, slots=True)
class Weight:
    """What one process takes. `uss_bytes`: memory that would be free without it."""

    rss_bytes: int
    uss_bytes: int
    descriptors: int
    threads: int


def stage_pids(root: int | None = None) -> tuple[int, ...]:
    """Processes of stages and spares, loading ones too, below `root`, this process if none is given; oldest first."""
    return tuple(pid for _, pid in sorted(_stages(root or os.getpid())))


def weight(pid: int) -> Weight | None:
    """None: it has ended."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            memory = process.memory_full_info()
            if not memory.uss:
                return None  # a zombie, whose memory has gone already
            return Weight(memory.rss, memory.uss, process.num_fds(), process.num_threads())
    except psutil.Error:
        return None


def has_ended(pid: int) -> bool:
    """A zombie has; its parent has not looked yet."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _stages(root: int) -> Iterator[tuple[float, int]]:
    for process in psutil.Process(root).children(recursive=True):
        with suppress(psutil.Error):
            if "".join(process.cmdline()[:1]).startswith(_STAGE):
                yield process.create_time(), process.pid
