"""Runs `ringserve serve`: progress, the ready line, and what Ctrl-C does.

The first SIGINT or SIGTERM while serving drains; a second one, or one while loading, stops at once (exit code 130):
what was begun is taken back in order, but for a few seconds only, and one more signal does not wait for that. Handlers
are Python's own, which run wherever the main thread is: an import that keeps the event loop does not keep them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from types import FrameType, TracebackType
from typing import Any, NoReturn

from rich.console import Console

from gateway.cli.entry import INTERRUPTED
from gateway.cli.output import lasting_output
from gateway.deadlines import deadlines_line
from gateway.launch import Running, launch
from gateway.observing.settings import LogFormat
from gateway.progress import LineBoard, open_board
from gateway.settings import ServeSettings

log = logging.getLogger(__name__)

# What ending the rings may take when someone wants the process gone.
_LONGEST_STOP_S = 5.0
# While they load, and end with the process by themselves: a Ray that comes up takes seconds to be told.
_LOADING_STOP_S = 1.0
_NO_TLS = "warning: no --tls-cert: keys, prompts and answers can be read on their way"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_INSTALL_EVERY_S = 0.05


def serve_until_interrupted(settings: ServeSettings) -> int:
    """The exit code. Raises SetupError."""
    with lasting_output():
        with asyncio.Runner() as runner:
            try:
                runner.run(_serve(settings))
            except asyncio.CancelledError:
                # All that was begun is taken back. Closing the loop would wait for threads that import or download.
                _leave()
            except KeyboardInterrupt:
                Console(stderr=True).print("interrupted")
                return INTERRUPTED
    return 0


async def _serve(settings: ServeSettings) -> None:
    shown, told = Console(stderr=True, soft_wrap=True), Console(soft_wrap=True)
    # Where every line is to be an object, what happens is logged.
    is_logged = settings.observe.log_format is LogFormat.JSON
    say = log.info if is_logged else partial(shown.print, markup=False, highlight=False)
    with _Interrupts(say, outlives=settings.detached) as interrupts:
        async with AsyncExitStack() as stack:
            with nullcontext(LineBoard(say)) if is_logged else open_board(shown) as board:
                running = await stack.enter_async_context(launch(settings, board))
            interrupts.drain_from_now()
            if settings.is_readable_by_others:
                say(_NO_TLS)
            told.print(ready_line(running, settings), markup=False, highlight=False)
            if is_logged:
                log.info("deadlines", extra={"fields": running.deadlines})
            else:
                say(deadlines_line(running.deadlines))
            await interrupts.asked()
            say(draining_line(running.service.open_turns))
        say("stopped")


def draining_line(turns: int) -> str:
    said = {0: "no turn is", 1: "1 turn is"}.get(turns, f"{turns} turns are")
    return f"draining: {said} running; Ctrl-C again stops at once"


def ready_line(running: Running, settings: ServeSettings) -> str:
    """One line with all that a client or an operator needs to know."""
    info, tls = running.info, settings.safety.tls is not None
    rings = "ring" if settings.rings == 1 else "rings"
    parts = [
        f"ready: grpc {'grpcs://' if tls else ''}{running.grpc_address}",
        f"http {'https' if tls else 'http'}://{running.http_address}/v1",
        f"model {running.service.name}",
        f"{settings.rings} {settings.ring} {rings} of {info.stages} stages on {info.devices[0]}",
        f"{info.lanes} lanes x {info.max_rows} rows",
        f"numerics {info.numerics}",
    ]
    if settings.detached:
        rows = sum(len(lane.tokens) for lane in info.held.lanes)
        parts.append(f"detached with {rows} rows from before")
    if running.model_dir is not None:
        parts.append(f"model folder {running.model_dir}")
    return ", ".join(parts)


class _Interrupts:
    """Takes the signals over for as long as it is entered."""

    def __init__(self, say: Callable[[str], None], *, outlives: bool = False) -> None:
        """`outlives`: what is begun does not end with the process."""
        self._say = say
        self._outlives = outlives
        self._loop = asyncio.get_running_loop()
        self._asked = asyncio.Event()
        self._may_drain = self._drains = False
        self._stopping = self._told = False
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._keeping: asyncio.Task[None] | None = None

    def __enter__(self) -> _Interrupts:
        self._install()
        self._keeping = asyncio.create_task(self._keep())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def drain_from_now(self) -> None:
        """The next signal is a request to drain, not to stop."""
        self._install()
        self._may_drain = True

    async def asked(self) -> None:
        await self._asked.wait()

    async def _keep(self) -> None:
        """Whenever it starts, Ray's core sets a handler of its own for SIGTERM, at some moment: one that prints a
        stack, hands the signal on and has the process aborted soon. It starts again with a ring that is added after the
        last one was drained.
        """
        while True:
            self._install()
            await asyncio.sleep(_INSTALL_EVERY_S)

    def _install(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._signalled)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        # Ray's handler, if this one was called by it, has set a timer that aborts.
        signal.alarm(0)
        if self._may_drain and not self._drains:
            self._drains = True
            self._loop.call_soon_threadsafe(self._asked.set)
        elif self._stopping:
            self._leave_now()
        elif self._task is not None:
            self._stopping = True
            may_last = self._may_drain or self._outlives
            late = threading.Timer(
                _LONGEST_STOP_S if may_last else _LOADING_STOP_S, self._leave_now
            )
            late.daemon = True
            late.start()
            self._loop.call_soon_threadsafe(self._stop, self._task)

    def _stop(self, task: asyncio.Task[Any]) -> None:
        self._tell()
        task.cancel()

    def _leave_now(self) -> NoReturn:
        self._tell()
        _leave()

    def _tell(self) -> None:
        """Once, and also where the event loop is kept."""
        if not self._told:
            self._told = True
            self._say("interrupted")


def _leave() -> NoReturn:
    # sys.exit() would wait for threads that load a model or download one, and no thread can be stopped from outside.
    # Ray ends its own processes when this one is gone.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)
