"""What takes long runs beside the event loop, bounded, and never keeps anyone waiting who has left."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from coordinator.errors import InvalidValue, QueueFull
from gateway.workers import Workers


async def test_results_and_errors_come_back() -> None:
    workers = Workers()

    def refuse() -> None:
        raise InvalidValue("x", "no")

    assert await asyncio.gather(*(workers.run(lambda n=n: n) for n in range(20))) == [*range(20)]
    with pytest.raises(InvalidValue):
        await workers.run(refuse)


async def test_what_waits_is_bounded_and_can_be_taken_back() -> None:
    workers, gate, ran = Workers(threads=1, may_wait=2), threading.Event(), list[str]()
    began = threading.Event()
    first = workers.run(lambda: (began.set(), gate.wait()))
    await asyncio.to_thread(began.wait)
    second, third = (workers.run(lambda name=name: ran.append(name)) for name in ("2", "3"))
    with pytest.raises(QueueFull):
        workers.run(lambda: None)
    second.cancel()
    gate.set()
    await asyncio.gather(first, third)
    assert ran == ["3"]


def test_work_that_never_ends_does_not_keep_the_process() -> None:
    script = (
        "import asyncio, threading; from gateway.workers import Workers\n"
        "async def main():\n"
        "    began = threading.Event()\n"
        "    Workers().run(lambda: (began.set(), threading.Event().wait()))\n"
        "    await asyncio.to_thread(began.wait)\n"
        "asyncio.run(main())"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", script], cwd=root, timeout=20).returncode == 0
