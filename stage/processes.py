"""Waits for processes that somebody else has ended. It ends none itself."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Sequence


def await_exits(pids: Sequence[int], timeout_s: float) -> None:
    """Blocks until the processes are gone, or the time is up. They need not be our children."""
    until = time.monotonic() + timeout_s
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            try:
                select.select([process], [], [], max(0.0, until - time.monotonic()))
            finally:
                os.close(process)
