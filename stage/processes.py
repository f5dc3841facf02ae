"""Handles of processes that somebody else has started, to wait for their ends and, when it comes to it, to end them.

Decides when a process's number means anything here. A handle stands for the very process it was made for, whose number
may be another one's by the time it is used.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def process_space() -> str:
    """Where this process's number means this process: one running kernel, and one container's numbers on it."""
    return f"{_BOOT_ID.read_text(encoding='ascii').strip()}/{os.stat('/proc/self/ns/pid').st_ino}"


class ProcessHandle:
    """`close` gives it back; the process need not be our child."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError."""
        self._handle = os.pidfd_open(pid)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def await_exit(self, timeout_s: float) -> bool:
        """Blocks until the process has ended, or the time is up."""
        waiting = select.poll()
        waiting.register(self._handle, select.POLLIN)
        return bool(waiting.poll(timeout_s * 1000))

    def close(self) -> None:
        os.close(self._handle)


def has_ended(pid: int, space: str) -> bool:
    """Whether that process is gone. False where nobody can tell from here."""
    if space != process_space():
        return False
    try:
        handle = ProcessHandle(pid)
    except ProcessLookupError:
        return True
    try:
        return handle.await_exit(0)
    finally:
        handle.close()
