"""The gateway's own death: `ringserve serve --detached` on a Ray cluster of our own is killed and started again.

Decides that whoever was in the midst of a turn asks it again, as clients do, and what must then be so: the stages are
the same processes, nothing was loaded anew, and what they hold is found.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from itertools import islice
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

from coordinator.errors import SetupError
from gateway.chaos.book import Book
from gateway.chaos.faults import Struck
from gateway.chaos.options import StormOptions
from gateway.chaos.player import Player
from gateway.chaos.processes import stage_pids
from gateway.chaos.ring_storm import told
from gateway.chaos.storm import Fault, Moment, Planned, storm
from gateway.chaos.waiting import until
from gateway.chat.tokenizer import load_tokenizer
from gateway.client import Client
from gateway.models import find_model
from gateway.progress import ProgressBoard
from gateway.settings import ServeSettings

_NAME = "chaos"
_COMMAND = (sys.executable, "-c", "from gateway.cli.app import main; main()")
_HEAD = (sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", "0")
_HEAD_FLAGS = (
    *("--disable-usage-stats", "--include-dashboard", "false", "--include-log-monitor", "false"),
    *("--object-store-memory", "80000000"),
)
_START_S = 180.0
_END_S = 30.0
_LOOK_S = 0.1
# Of the numbers of a storm over rings.
_FIRST_NUMBER = 1_000_000
_MOMENTS = (Moment.PREFILL, Moment.DECODE)


class GatewayStorm:
    """`struck`, `problems` and the stages' processes of its end are there when it has blown."""

    def __init__(
        self, settings: ServeSettings, options: StormOptions, book: Book, board: ProgressBoard
    ) -> None:
        self.struck: list[Struck] = []
        self.problems: list[str] = []
        self.stages: tuple[int, ...] = ()
        self._settings = settings
        self._options = options
        self._book = book
        self._board = board
        self._client: Client | None = None
        self._clients = AsyncExitStack()
        self._serves = asyncio.Event()
        self._gateway: asyncio.subprocess.Process | None = None
        self._address = ""
        # A cluster that strangers could join would run what they like.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._environment = {**os.environ, **token}

    async def blow(self) -> None:
        """Raises SetupError."""
        folder = await asyncio.to_thread(find_model, self._settings.model, self._board.note)
        tokenizer = await asyncio.to_thread(load_tokenizer, folder.path)
        assert self._settings.max_rows is not None
        async with self._cluster():
            await self._serve()
            assert self._client is not None
            player = Player(self._client, self._book, self._options.patience.heal_s, self._return)
            async with player.talking(self._options, tokenizer.encode, self._settings.max_rows):
                for planned in self._plan():
                    await self._strike(planned, player)
            await self._end()

    def _plan(self) -> list[Planned]:
        """As often as the storm over rings had rounds, and at least once."""
        rounds = (self._options.kills or 1) // len(self._options.faults)
        dice = random.Random(f"gateway/{self._options.seed}")
        planned = islice(storm(self._options.seed, [Fault.GATEWAY], 1), max(1, rounds))
        return [
            replace(each, number=_FIRST_NUMBER + each.number, moment=dice.choice(_MOMENTS))
            for each in planned
        ]

    async def _strike(self, planned: Planned, player: Player) -> None:
        """Returns when a stream goes on that was cut off."""
        gateway, patience = self._gateway, self._options.patience
        assert gateway is not None
        hit = await until(lambda: _is_in(planned.moment, player), patience.heal_s)
        before, at_s = stage_pids(), time.perf_counter()
        self._board.note(f"gateway: {planned.fault} in {planned.moment}")
        self._book.struck(planned, at_s, ring=f"{_NAME}-0")
        gateway.kill()
        self._serves.clear()
        await gateway.wait()
        await self._serve()
        opened_s = time.perf_counter() - at_s
        went_on = await until(lambda: _last_arrival_s(player) > at_s + opened_s, patience.heal_s)
        answered_s = _last_arrival_s(player) - at_s if went_on else None
        problem = "" if went_on else f"no stream went on within {patience.heal_s:g} s"
        if stage_pids() != before:
            problem = f"the stages were processes {before}, and are {stage_pids()} now"
        struck = Struck(
            planned,
            at_s,
            hit,
            kills=1,
            attempts=1,
            opened_s=opened_s,
            answered_s=answered_s,
            problem=problem,
        )
        self.struck.append(struck)
        self._board.note(f"gateway: serves again after {opened_s:.2f} s, {told(struck)}")

    async def _return(self) -> Client:
        """For a stream that was cut off. The client is the new gateway's."""
        await self._serves.wait()
        assert self._client is not None
        return self._client

    async def _serve(self) -> None:
        """Raises SetupError."""
        settings = self._settings
        flags: dict[str, object] = {
            "--stages": settings.stages,
            "--lanes": settings.lanes,
            "--max-rows": settings.max_rows,
            "--served-name": _NAME,
            "--ray-address": self._address,
            "--spare": settings.spares,
            "--http-port": 0,
            "--grpc-port": 0,
        }
        if settings.kv_host_bytes is not None:
            flags["--kv-host-bytes"] = settings.kv_host_bytes
        given = [str(part) for flag in flags.items() for part in flag]
        given += ["--detached", *(["--mirror"] if settings.mirror else [])]
        with TemporaryFile() as log:
            command = (*_COMMAND, "serve", settings.model, *given)
            self._gateway = await self._begin(*command, stderr=log.fileno())
            assert self._gateway.stdout is not None
            try:
                async with asyncio.timeout(_START_S):
                    ready = (await self._gateway.stdout.readline()).decode()
            except TimeoutError:
                ready = f"it was not ready after {_START_S:g} s"
            if not ready.startswith("ready: grpc "):
                told = ready.strip() or _last_line(log)
                raise SetupError(f"the detached gateway did not start: {told}")
        client = Client(ready.split()[2].rstrip(","))
        self._client = await self._clients.enter_async_context(client)
        self._serves.set()

    async def _end(self) -> None:
        """The gateway drains and the ring is ended by its name, as an operator would."""
        assert self._gateway is not None
        self.stages = stage_pids()
        self.problems += await self._unrest()
        await self._clients.aclose()
        if not await _ended(self._gateway):
            self.problems.append(f"the gateway did not end within {_END_S:g} s of its SIGTERM")
        stop = await self._begin(*_COMMAND, "stop", f"{_NAME}-0", "--ray-address", self._address)
        told = b"no word of it"
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_S):
                told, _ = await stop.communicate()
        if stop.returncode != 0:
            await _ended(stop)
            self.problems.append(f"the detached ring could not be stopped: {told.decode().strip()}")

    async def _unrest(self) -> list[str]:
        """What is not as it should be of rings at rest; a stream's end is told a little before its lane is free."""
        assert self._client is not None
        ends_s = time.perf_counter() + self._options.patience.rest_s
        while True:
            found = [
                f"{ring.name}: {count} {name.replace('_', ' ')} at rest"
                for ring in await self._client.rings()
                for name in ("busy_lanes", "waiting_jobs", "running_jobs")
                if (count := getattr(ring, name))
            ]
            if not found or time.perf_counter() > ends_s:
                return found
            await asyncio.sleep(_LOOK_S)

    @asynccontextmanager
    async def _cluster(self) -> AsyncIterator[None]:
        # Where Ray and a killed gateway leave their files; in Ray's usual folder it would pass for the host's cluster.
        with TemporaryDirectory(prefix="ringserve-", ignore_cleanup_errors=True) as folder:
            self._environment["TMPDIR"] = folder
            head = await self._begin(*_HEAD, *_HEAD_FLAGS, "--temp-dir", folder)
            try:
                self._address = await _address_of(head)
                yield
            finally:
                await self._clients.aclose()
                for process in (self._gateway, head):
                    if process is not None:
                        await _ended(process)

    async def _begin(
        self, *command: str, stderr: int = subprocess.DEVNULL
    ) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *command, env=self._environment, stdout=subprocess.PIPE, stderr=stderr
        )


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no word of it")


async def _ended(process: asyncio.subprocess.Process) -> bool:
    """Asks it to end, and sees to it. False: it did not do so by itself in time."""
    if process.returncode is not None:
        return True
    process.terminate()
    try:
        async with asyncio.timeout(_END_S):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return False
    return True


async def _address_of(head: asyncio.subprocess.Process) -> str:
    """From what Ray tells whoever wants to join. Raises SetupError."""
    assert head.stdout is not None
    with suppress(TimeoutError):
        async with asyncio.timeout(_START_S):
            async for line in head.stdout:
                if found := re.search(r"--address='([^']+)'", line.decode()):
                    return found[1]
    raise SetupError("a Ray cluster of our own did not start")


def _is_in(moment: Moment, player: Player) -> bool:
    """Whether some stream waits for its first token, or is in the midst of its answer."""
    turns = [turn for turn in player.running.values() if turn.ring]
    return any(bool(turn.tokens) == (moment is Moment.DECODE) for turn in turns)


def _last_arrival_s(player: Player) -> float:
    return max(
        (turn.arrivals_s[-1] for turn in player.running.values() if turn.arrivals_s), default=0.0
    )
