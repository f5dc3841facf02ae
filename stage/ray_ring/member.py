"""One actor as its ring sees it: asked with a deadline, probed, known to be lost at once, ended for certain.

Decides when an actor counts as lost: its process died, or it left a call unanswered; there is no way back from that.
One that leaves a probe unanswered is silent, and may be heard of again. It does not decide what follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from coordinator.errors import RingLost
from stage.actor import Place, Probe
from stage.lease import Owner
from stage.processes import ProcessHandle, process_space

log = logging.getLogger(__name__)

# Of an actor that has not come up, or was never seen.
NOWHERE = "pid=None host=None"
# A killed process ends within milliseconds, unless the kernel has much memory to take back.
_EXIT_S = 5.0
# For Ray's own way of ending one: it takes 8 ms, but a stopped process does not hear of it.
_RAYS_WAY_S = 0.2
# Waits are made of such steps: where this process itself was kept from running, it costs one of them.
_STEP_S = 1.0


class Member:
    """Belongs to the running loop. `on_news` is called there when it is lost, or silent, unless it is ended first."""

    def __init__(self, actor: Any, bundle: int, on_news: Callable[[Member], None]) -> None:
        self.bundle = bundle  # its place in the placement group
        self.index = 0  # of the stage that it is for
        self.loaded: int | None = None  # the stage whose slice it has
        self.loss: str | None = None
        self.taker: Owner | None = None  # who drives it, once that is somebody else
        self.silence: str | None = None  # while a probe is not answered in time
        self.last: Probe | None = None
        self._heard = asyncio.Event()  # while it is not silent
        self._heard.set()
        self._actor = actor
        self._place: Place | None = None
        self._process: ProcessHandle | None = None
        self._on_news = on_news
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._living = asyncio.create_task(self._live())
        self._probing: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def place(self) -> Place:
        assert self._place is not None
        return self._place

    @property
    def taken(self) -> bool:
        """Somebody else drives it."""
        return self.taker is not None

    @property
    def where(self) -> str:
        """As log lines say it."""
        place = self._place
        return NOWHERE if place is None else f"pid={place.pid} host={place.host}"

    async def settle(self, within_s: float, late: str = "") -> None:
        """Waits until it runs and says where. Raises RingLost, for this reason where it does not in time."""
        self._place = await self.ask("place", within_s=within_s, late=late)
        if self.place.space == process_space():
            with contextlib.suppress(ProcessLookupError):
                self._process = ProcessHandle(self.place.pid)

    def call(self, method: str, *arguments: object) -> asyncio.Task[Any]:
        """Without a deadline: the caller has one. Raises RayError."""
        return asyncio.create_task(_answer(getattr(self._actor, method).remote(*arguments)))

    async def ask(self, method: str, *arguments: object, within_s: float, late: str = "") -> Any:
        """Raises RingLost: whoever does not answer, or answers with an error of his, is lost. `late`: why."""
        call = self.call(method, *arguments)
        try:
            if not await self._answers(call, within_s):
                self.lose(late or f"did not answer {method!r} for {within_s:g} s")
            elif not self._gone.done():
                return call.result()
        except RayError as error:
            self.lose(in_a_line(error))
        finally:
            call.cancel()
        raise RingLost(self.index, self.loss or "ended")

    async def hear(self, within_s: float) -> None:
        """A silent one is lost when it is not heard of now."""
        if self.silence is None:
            return
        hearing = asyncio.create_task(self._heard.wait())
        try:
            if not await self._answers(hearing, within_s):
                self.lose(self.silence)
        finally:
            hearing.cancel()

    async def wait(self, calls: set[asyncio.Task[Any]], within_s: float) -> None:
        """Until one of them is done, the time is up, or it is lost: then raises RingLost."""
        await asyncio.wait(
            {*calls, self._gone}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED
        )
        if self._gone.done():
            raise RingLost(self.index, self.loss or "ended")

    def watch(self, probe_s: float, timeout_s: float) -> None:
        """Probes it from now on."""
        if self._probing is None:
            self._probing = asyncio.create_task(self._probe(probe_s, timeout_s))

    def unwatch(self) -> None:
        """It loads: for seconds, nothing of it may answer."""
        probing, self._probing = self._probing, None
        if probing is not None:
            probing.cancel()

    def lose(self, reason: str) -> None:
        if self._gone.done():
            return
        self.loss = reason
        self._gone.set_result(None)
        log.warning("lost stage=%d %s reason=%s", self.index, self.where, reason)
        self._on_news(self)

    async def end(self) -> None:
        """Returns when its process has ended, as far as can be seen from this host. May be called again, and
        cancelled: it is ended nevertheless.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def leave(self) -> None:
        """It goes on without us; we are not told of it any more."""
        if not self._gone.done():
            self._gone.set_result(None)
        self._living.cancel()
        self.unwatch()
        if self._ending is not None:
            await self.end()
        process, self._process = self._process, None
        if process is not None:
            process.close()

    async def _end(self) -> None:
        if not self._gone.done():
            self._gone.set_result(None)
        self._living.cancel()
        self.unwatch()
        try:
            await asyncio.wait_for(asyncio.to_thread(ray.kill, self._actor), _EXIT_S)
        except (RayError, TimeoutError) as error:
            log.warning("kill stage=%d reason=%s", self.index, type(error).__name__)
        process, self._process = self._process, None
        if process is not None:
            if not await asyncio.to_thread(_ended, process):
                log.error("not ended stage=%d pid=%d", self.index, self.place.pid)
            process.close()

    async def _answers(self, call: asyncio.Future[Any], within_s: float) -> bool:
        """Whether it answers, or is lost, in time."""
        left = within_s
        while left > 0 and not (call.done() or self._gone.done()):
            step = min(left, _STEP_S)
            left -= step
            await asyncio.wait(
                {call, self._gone}, timeout=step, return_when=asyncio.FIRST_COMPLETED
            )
        return call.done() or self._gone.done()

    async def _live(self) -> None:
        """The call fails when the process dies. It returns only where somebody else drives the stage from now on."""
        try:
            self.taker = await self.call("live")
        except RayError as error:
            self.lose(in_a_line(error))
        else:
            self._on_news(self)

    async def _probe(self, probe_s: float, timeout_s: float) -> None:
        while not self._gone.done():
            await asyncio.sleep(probe_s)
            call = self.call("probe")
            try:
                if not await self._answers(call, timeout_s):
                    self.silence = f"did not answer a probe for {timeout_s:g} s"
                    self._heard.clear()
                    self._on_news(self)
                    await asyncio.wait({call, self._gone}, return_when=asyncio.FIRST_COMPLETED)
                if call.done():
                    self.last = call.result()
                    for line in self.last.news:
                        line.tell(self.index)
                    self.silence = None
                    self._heard.set()
            except RayError as error:
                self.lose(in_a_line(error))
            except Exception as error:
                # Without probes it would end itself, healthy as it is, half a minute later.
                log.exception("probing stage=%d", self.index)
                self.lose(f"could not be probed: {type(error).__name__}: {error}")
            finally:
                call.cancel()


async def together(asked: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All answers; at the first error, that error, and nobody is waited for any more."""
    tasks = [asyncio.create_task(each) for each in asked]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        done = [task for task in tasks if task.done()]
        for failed in (task for task in done if task.exception() is not None):
            failed.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(reference: Awaitable[Any]) -> Any:
    return await reference


def _ended(process: ProcessHandle) -> bool:
    if process.await_exit(_RAYS_WAY_S):
        return True
    process.kill()
    return process.await_exit(_EXIT_S)


def in_a_line(error: RayError) -> str:
    """Ray's errors carry whole tracebacks as their text."""
    if isinstance(error, RayActorError):
        name = type(error).__name__
        # An actor that could not be made says why in its last line.
        why = (
            f"{name}: {str(error).strip().splitlines()[-1]}"
            if "creation task" in str(error)
            else name
        )
        return f"its process died ({why})"
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
