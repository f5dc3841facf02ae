"""A whole run: rings of our own under traffic, the storm, and then the checks.

Decides the order of things and how long each may take. What strikes is ring_storm.py's and gateway_storm.py's, what is
right checker.py's.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path

import grpc
from rich.console import Console

from coordinator.errors import SetupError
from coordinator.ring import Ring
from gateway.bench.plots import check_plotting
from gateway.chaos.book import Book
from gateway.chaos.checker import EndCheck, cold_answers, left_over, wrong_answers
from gateway.chaos.faults import Struck
from gateway.chaos.gateway_storm import GatewayStorm
from gateway.chaos.moments import SeenRing
from gateway.chaos.options import StormOptions
from gateway.chaos.picture import plot_soak
from gateway.chaos.player import Player
from gateway.chaos.processes import stage_pids
from gateway.chaos.report import ChaosReport, report, show
from gateway.chaos.ring_storm import RingStorm
from gateway.chaos.soak import Soak, check_place
from gateway.chaos.storm import Act, Fault
from gateway.chaos.traffic import Ask
from gateway.client import Client
from gateway.launch import launch
from gateway.progress import ProgressBoard, open_board
from gateway.settings import RingKind, ServeSettings

_EXIT_S = 15.0


def chaos_command(settings: ServeSettings, options: StormOptions, as_json: bool) -> bool:
    """Runs and shows it; False when a stream was wrong or lost, or something was left over. Raises SetupError."""
    if options.plot is not None:
        check_plotting()
    for file in (options.soak, options.plot):
        if file is not None:
            check_place(file)
    console, output = Console(stderr=as_json, soft_wrap=True), sys.stdout
    # Ray tells of each process that died, on whatever is standard output then.
    with redirect_stdout(sys.stderr if as_json else output), open_board(console) as board:
        told = asyncio.run(run_chaos(settings, options, board))
    show(told, console)
    if as_json:
        Console(soft_wrap=True).print(told.to_json(), markup=False, highlight=False)
    return told.is_clean


async def run_chaos(
    settings: ServeSettings, options: StormOptions, board: ProgressBoard
) -> ChaosReport:
    """Raises SetupError."""
    book, struck, problems = Book(), list[Struck](), list[str]()
    of_gateway = Fault.GATEWAY in options.faults and settings.ring is RingKind.RAY
    if not of_gateway or len(options.faults) > 1:
        struck, problems = await _ring_storm(settings, options, book, board)
    if of_gateway:
        gateway = GatewayStorm(settings, options, book, board)
        await gateway.blow()
        struck, problems = struck + gateway.struck, problems + gateway.problems
        problems += await left_over(gateway.stages, _EXIT_S)
    cold = await _cold(settings, list(book.answers), board)
    return report(book, struck, wrong_answers(book, cold), problems)


async def _ring_storm(
    settings: ServeSettings, options: StormOptions, book: Book, board: ProgressBoard
) -> tuple[list[Struck], list[str]]:
    """What was struck, and what is not as it should be. Raises SetupError."""
    rings = dict[str, SeenRing]()

    def see(name: str, ring: Ring) -> Ring:
        return rings.setdefault(name, SeenRing(name, ring))

    with _disk(settings, options) as settings:
        async with (
            launch(settings, board, see) as running,
            Client(running.grpc_address) as client,
        ):
            storm = RingStorm(settings, options, tuple(rings.values()), book, board)
            soak = Soak(running.router, storm.rings)
            looking = soak.looking() if options.soak is not None else nullcontext()
            player = Player(client, book, options.patience.heal_s)
            encode, max_rows = running.tokenizer.encode, running.info.max_rows
            async with player.talking(options, encode, max_rows), looking:
                await storm.blow()
            check = EndCheck(running.router, storm.rings, settings.spares)
            problems = await check.problems(storm.target.name, options.patience.rest_s)
            stages = stage_pids()
    problems += await left_over(stages, _EXIT_S)
    if options.soak is not None:
        problems += _soaked(options, soak, book, board)
    return storm.struck, problems


def _soaked(options: StormOptions, soak: Soak, book: Book, board: ProgressBoard) -> list[str]:
    """What grows. Raises SetupError when a file cannot be written."""
    assert options.soak is not None
    soak.write(options.soak)
    if options.plot is not None:
        plot_soak(options.plot, soak, [mark.at_s for mark in book.marks])
    growths = soak.growths()
    for role in sorted({each.role for each in soak.processes} - {each.role for each in growths}):
        board.note(f"{role}: looked at too rarely to tell whether it grows")
    return [str(each) for each in growths if not each.is_flat]


@contextmanager
def _disk(settings: ServeSettings, options: StormOptions) -> Iterator[ServeSettings]:
    """A folder for the nodes, where a full disk is part of the storm and none was named."""
    wanted = any(fault.act is Act.DISK for fault in options.faults)
    if settings.kv_disk is not None or not wanted or settings.ring is RingKind.FAKE:
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="ringserve-") as folder:
        yield replace(settings, kv_disk=Path(folder))


async def _cold(
    settings: ServeSettings, asks: list[Ask], board: ProgressBoard
) -> dict[Ask, tuple[int, ...]]:
    """By a ring of threads, that nothing disturbs. Raises SetupError."""
    kind = RingKind.LOCAL if settings.ring is RingKind.RAY else settings.ring
    calm = replace(
        settings,
        ring=kind,
        rings=1,
        kv_host_bytes=0,
        kv_disk=None,
        ray_address=None,
        spares=0,
        mirror=False,
    )
    board.note(f"{len(asks)} different turns again, cold, on a ring that nothing disturbs")
    try:
        async with launch(calm, board) as running, Client(running.grpc_address) as client:
            return await cold_answers(client, asks, settings.lanes, board.note)
    except grpc.aio.AioRpcError as error:
        raise SetupError(f"the ring answered {error.code().name}: {error.details()}") from error
