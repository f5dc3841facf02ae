"""The one thread of a stage's process in which it computes, from its loading to its end.

Allocators and math libraries keep what they use by thread: a stage that loads in one thread and computes each turn in
another has its working memory once for each. Decides nothing about what is computed, and nothing about its order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class ComputeThread:
    """Python's own executors will not do: the interpreter's exit waits for them, and a frame may never end."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._serve, name="compute", daemon=True).start()

    def call(self, work: Callable[[], T]) -> T:
        """Waits for it, behind all that was called before. Raises what it raises."""
        answer: Future[T] = Future()
        self._calls.put(lambda: _carry_out(work, answer))
        return answer.result()

    def _serve(self) -> None:
        while True:
            self._calls.get()()


def _carry_out(work: Callable[[], Any], answer: Future[Any]) -> None:
    try:
        answer.set_result(work())
    except BaseException as error:
        answer.set_exception(error)
