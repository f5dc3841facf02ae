"""Standard output and error of a server that outlives whoever reads them.

Decides that a line which nobody can take, on a full disk or into a pipe whose reader has gone, is lost, and that
nothing else comes of it: neither the start nor the exit code. What is said there is other modules' business.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO


class Lasting(io.TextIOBase):
    """Hands on to a stream of text; its errors end here."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Within it, sys.stdout and sys.stderr raise no OSError; behind it, Python finds nothing left to write."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (each and Lasting(each) for each in streams)  # None: it was closed
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for stream in streams:
            if stream is not None:
                _let_go(stream)


def _let_go(stream: TextIO) -> None:
    """What is left in its buffer would be written once more at the very end, and give the process another exit code."""
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()


def open_missing() -> None:
    """A process that was started with 0, 1 or 2 closed would get them as sockets, and libraries write into those."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one
