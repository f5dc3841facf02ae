"""Runs what takes long (templates, tokenizers, big messages) beside the event loop, on a few threads of our own.

It bounds how much may wait. Python's own executors will not do: the interpreter's exit waits for their threads, and
one conversation may take a second. It decides nothing about what it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from coordinator.errors import QueueFull, Shed
from coordinator.overload import clamped

T = TypeVar("T")

# Templates are Python and share one core; tokenizers are not, and gain from more.
_THREADS = 4
_MAY_WAIT = 256
# How much of a task's time is believed.
_BLEND = 0.1


class Workers:
    """Threads exist while there is work, and never keep the process alive."""

    def __init__(self, threads: int = _THREADS, may_wait: int = _MAY_WAIT) -> None:
        self._most = threads
        self._may_wait = may_wait
        self._running = 0
        self._task_s = 0.0  # what a task takes
        self._waiting: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Cancelling the future takes work back that has not begun; what has begun ends unseen. Raises QueueFull."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._lock:
            if len(self._waiting) >= self._may_wait:
                waiting = len(self._waiting)
                after_s = clamped(waiting * self._task_s / self._most)
                raise QueueFull(waiting=waiting, retry_after_s=after_s, reason=Shed.READING)
            self._waiting.append(partial(_carry_out, work, future))
            if self._running == self._most:
                return future
            self._running += 1
        threading.Thread(target=self._serve, name="gateway-worker", daemon=True).start()
        return future

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                task = self._waiting.popleft()
            begun = time.monotonic()
            task()
            self._task_s += (time.monotonic() - begun - self._task_s) * _BLEND


def _carry_out(work: Callable[[], T], future: asyncio.Future[T]) -> None:
    if future.done():
        return
    try:
        settle = partial(_settle, future, work())
    except Exception as error:  # whoever waits for the future is told, whatever it is
        settle = partial(_fail, future, error)
    with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile, and nobody waits
        future.get_loop().call_soon_threadsafe(settle)


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
