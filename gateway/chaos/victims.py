"""How a stage is struck: by signals where it is a process, by planted trouble where it is a thread of this one.

Decides nothing of when. What cannot be done to a kind of ring is not among its `faults`, and never pretended.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from coordinator.ring import Ring
from gateway.chaos.processes import stage_pids
from gateway.chaos.storm import KILLS, Fault

# A file may grow to this size and no further: less than any node's file has.
_FULL_BYTES = 1024


@runtime_checkable
class OfProcesses(Protocol):
    """A ring whose stages are processes of this host, in their order; and its spares that are ready."""

    @property
    def pids(self) -> tuple[int, ...]: ...

    @property
    def spares(self) -> tuple[int, ...]: ...


@runtime_checkable
class OfThreads(Protocol):
    """A ring of this process that can be told to fail."""

    def fail(self, stage: int) -> None: ...

    def hold_up(self, stage: int, seconds: float) -> None: ...


class Victims(Protocol):
    """The stages of one ring. Faults that are not among `faults` must not be asked for."""

    @property
    def faults(self) -> frozenset[Fault]: ...

    def kill(self, stage: int) -> int:
        """Returns its process; 0 where it is none."""
        ...

    def kill_loading(self) -> int | None:
        """Ends whoever loads in a lost stage's place; None: there is nobody."""
        ...

    def stop(self, stage: int) -> int: ...

    async def hold_up(self, stage: int, seconds: float) -> None:
        """The stage does nothing for so long, and goes on."""
        ...

    def full_disk(self, stage: int) -> AbstractContextManager[None]:
        """While it is entered, the stage's files cannot grow."""
        ...


def victims_of(ring: Ring, folder: Path | None, seated: Callable[[], set[int]]) -> Victims:
    """`folder`: where the ring's stages keep their nodes; `seated`: all rings' processes that do not load."""
    if isinstance(ring, OfProcesses):
        return Processes(ring, folder is not None, seated)
    assert isinstance(ring, OfThreads)
    return Threads(ring, folder)


class Processes:
    def __init__(self, ring: OfProcesses, has_disk: bool, seated: Callable[[], set[int]]) -> None:
        self._ring = ring
        self._seated = seated
        disk = {Fault.DISK} if has_disk else set()
        self.faults = frozenset({*KILLS, Fault.STOP, Fault.SLOW, *disk})

    def kill(self, stage: int) -> int:
        return self._signal(self._ring.pids[stage], signal.SIGKILL)

    def kill_loading(self) -> int | None:
        seated = self._seated()
        loading = [pid for pid in stage_pids() if pid not in seated]
        # The youngest: whoever had the place before may not be gone yet.
        return self._signal(loading[-1], signal.SIGKILL) if loading else None

    def stop(self, stage: int) -> int:
        return self._signal(self._ring.pids[stage], signal.SIGSTOP)

    async def hold_up(self, stage: int, seconds: float) -> None:
        pid = self.stop(stage)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._signal(pid, signal.SIGCONT)

    @contextmanager
    def full_disk(self, stage: int) -> Iterator[None]:
        """A disk that is full refuses what would grow; so does this limit, and it is one process's own."""
        pid = self._ring.pids[stage]
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (_FULL_BYTES, hard))
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    def _signal(self, pid: int, number: signal.Signals) -> int:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid


class Threads:
    def __init__(self, ring: OfThreads, folder: Path | None) -> None:
        self._ring = ring
        self._folder = folder
        disk = {Fault.DISK} if folder is not None else set()
        # A stage that loads is nobody yet who could be told to fail.
        self.faults = frozenset({*KILLS, Fault.SLOW, *disk} - {Fault.KILL_LOAD})

    def kill(self, stage: int) -> int:
        self._ring.fail(stage)
        return 0

    def kill_loading(self) -> int | None:
        return None

    def stop(self, stage: int) -> int:
        raise NotImplementedError

    async def hold_up(self, stage: int, seconds: float) -> None:
        self._ring.hold_up(stage, seconds)
        await asyncio.sleep(seconds)

    @contextmanager
    def full_disk(self, stage: int) -> Iterator[None]:
        """The folder of all stages is away: a limit would hold for this whole process."""
        assert self._folder is not None
        away = self._folder.with_name(f"{self._folder.name}.away")
        self._folder.rename(away)
        self._folder.touch()
        try:
            yield
        finally:
            self._folder.unlink()
            away.rename(self._folder)
