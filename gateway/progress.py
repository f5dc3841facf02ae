"""Shows how far the stages have loaded: bars on a terminal, plain lines elsewhere.

It decides only what is shown. Sinks may be called from other threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from coordinator.ring import ProgressSink, StageProgress

# Without a terminal: a line when a stage begins or does something else, and at each of these shares of its bytes.
_LINE_SHARES = 4


class ProgressBoard(Protocol):
    """One sink for each ring, and lines about what concerns no stage."""

    def sink(self, ring: str) -> ProgressSink: ...

    def note(self, text: str) -> None: ...


class SilentBoard:
    """Shows nothing; for tests and tools that have their own display."""

    def sink(self, ring: str) -> ProgressSink:
        return _ignore

    def note(self, text: str) -> None:
        return None


def _ignore(_: StageProgress) -> None:
    return None


class LineBoard:
    """Plain lines through `write`, few enough for a log."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._seen: dict[tuple[str, int], tuple[str, int]] = {}
        self._lock = threading.Lock()

    def sink(self, ring: str) -> ProgressSink:
        return lambda progress: self._show(ring, progress)

    def note(self, text: str) -> None:
        self._write(text)

    def _show(self, ring: str, progress: StageProgress) -> None:
        step = progress.bytes_done * _LINE_SHARES // max(progress.bytes_total, 1)
        key, now = (ring, progress.stage), (progress.note, step)
        with self._lock:
            before = self._seen.get(key)
            if before == now:
                return
            self._seen[key] = now
        # Behind the last byte it does something else, of which bytes say nothing.
        loaded = before is not None and before[1] == step == _LINE_SHARES
        self._write(_label(ring, progress) + ("" if loaded else _mib(progress)))


class BarBoard:
    """A bar for each stage, drawn by rich; make it with `open_board`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[tuple[str, int], TaskID] = {}
        self._lock = threading.Lock()

    def sink(self, ring: str) -> ProgressSink:
        return lambda progress: self._show(ring, progress)

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def _show(self, ring: str, progress: StageProgress) -> None:
        key = (ring, progress.stage)
        with self._lock:
            if key not in self._bars:
                self._bars[key] = self._progress.add_task("", total=None)
            self._progress.update(
                self._bars[key],
                description=_label(ring, progress),
                completed=progress.bytes_done,
                total=progress.bytes_total or None,
            )


@contextmanager
def open_board(console: Console) -> Iterator[ProgressBoard]:
    """Bars when the console is a terminal, lines when it is not. The bars are gone afterwards."""
    if not console.is_terminal:
        yield LineBoard(lambda text: console.print(text, markup=False, highlight=False))
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(True))
    with Progress(*columns, console=console, transient=True) as progress:
        yield BarBoard(progress)


def _label(ring: str, progress: StageProgress) -> str:
    return f"{ring} stage {progress.stage} {progress.note}".rstrip()


def _mib(progress: StageProgress) -> str:
    if not progress.bytes_total:
        return ""
    return f" {progress.bytes_done / 2**20:.0f} of {progress.bytes_total / 2**20:.0f} MiB"
