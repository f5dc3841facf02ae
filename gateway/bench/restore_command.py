"""Runs `ringserve bench restore` and says what it found: two processes' worth of serving, with a disk between them."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import grpc
from rich.console import Console

from coordinator.errors import InvalidSetting, SetupError
from gateway.bench.endpoints import GrpcEndpoint
from gateway.bench.figures import median, ratio
from gateway.bench.restore import Histories, Load, Restoring, Turn
from gateway.client import Client
from gateway.launch import launch
from gateway.progress import ProgressBoard, open_board
from gateway.settings import ServeSettings


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """Times are of turns whose rows the store gave; `disk_` ones are the first behind a restart."""

    cold_ttft_ms_p50: float | None
    restored_ttft_ms_p50: float | None
    restored_ratio: float | None
    disk_ttft_ms_p50: float | None
    disk_ratio: float | None
    restored_turns: int
    disk_turns: int
    wrong_turns: int
    reused_tokens: int
    reusable_tokens: int
    most_stored_rows: int
    host_rows: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def restore_command(settings: ServeSettings, load: Load, as_json: bool) -> bool:
    """Measures and shows it; False when a turn's tokens were wrong. Raises SetupError."""
    if load.sessions <= settings.lanes:
        raise InvalidSetting("sessions", f"must be more than the {settings.lanes} lanes")
    console = Console(stderr=as_json, soft_wrap=True)
    with open_board(console) as board, tempfile.TemporaryDirectory(prefix="ringserve-") as folder:
        told = asyncio.run(run_restore(replace(settings, kv_disk=Path(folder)), load, board))
    for line in _lines(told):
        console.print(line, markup=False, highlight=False)
    if as_json:
        Console(soft_wrap=True).print(told.to_json(), markup=False, highlight=False)
    return not told.wrong_turns


async def run_restore(settings: ServeSettings, load: Load, board: ProgressBoard) -> RestoreReport:
    """Raises SetupError."""
    try:
        async with launch(settings, board) as running, Client(running.grpc_address) as client:
            histories = Histories.begin(running.tokenizer, load)
            endpoint = GrpcEndpoint(client, running.tokenizer)
            first = Restoring(endpoint, running, load, histories)
            board.note(f"{load.sessions} sessions begin, on {settings.lanes} lanes")
            await first.first_turns()
            board.note("each goes on, in an order of its own")
            memory = await first.next_turns(running.tokenizer, 1)
            host_rows = running.info.host_rows
        async with launch(settings, board) as running, Client(running.grpc_address) as client:
            endpoint = GrpcEndpoint(client, running.tokenizer)
            second = Restoring(endpoint, running, load, histories)
            board.note("each goes on behind a restart")
            disk = await second.next_turns(running.tokenizer, 2)
    except grpc.aio.AioRpcError as error:
        raise SetupError(f"the ring answered {error.code().name}: {error.details()}") from error
    stored = max(first.most_stored_rows, second.most_stored_rows)
    return _report(memory, disk, stored, host_rows)


def _report(
    memory: Sequence[Turn], disk: Sequence[Turn], most_stored_rows: int, host_rows: int
) -> RestoreReport:
    turns = (*memory, *disk)
    cold = median(turn.cold.ttft_ms for turn in turns)
    restored = [turn for turn in memory if turn.restored]
    behind = [turn for turn in disk if turn.restored]
    from_memory = median(turn.answered.ttft_ms for turn in restored)
    from_disk = median(turn.answered.ttft_ms for turn in behind)
    return RestoreReport(
        cold_ttft_ms_p50=cold,
        restored_ttft_ms_p50=from_memory,
        restored_ratio=ratio(from_memory, cold),
        disk_ttft_ms_p50=from_disk,
        disk_ratio=ratio(from_disk, cold),
        restored_turns=len(restored),
        disk_turns=len(behind),
        wrong_turns=sum(turn.answered.tokens != turn.cold.tokens for turn in turns),
        reused_tokens=sum(turn.answered.cached_tokens for turn in turns),
        reusable_tokens=sum(turn.reusable for turn in turns),
        most_stored_rows=most_stored_rows,
        host_rows=host_rows,
    )


def _lines(told: RestoreReport) -> list[str]:
    return [
        f"cold TTFT: {told.cold_ttft_ms_p50} ms",
        f"from host memory: {told.restored_ttft_ms_p50} ms, {told.restored_ratio} of cold "
        f"({told.restored_turns} turns)",
        f"from disk behind a restart: {told.disk_ttft_ms_p50} ms, {told.disk_ratio} of cold "
        f"({told.disk_turns} turns)",
        f"reused: {told.reused_tokens} of {told.reusable_tokens} tokens; "
        f"rows in the store: {told.most_stored_rows} of {told.host_rows}; "
        f"wrong turns: {told.wrong_turns}",
    ]
