"""The demo: an agent's conversation through a real ring, then the same turns on a cold one.

Both runs go the whole way: gRPC client, gateway, coordinator, stages. It decides nothing about reuse; it
measures, compares token by token and says what it found. Exact or not is told by `DemoReport.token_exact`.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from coordinator.requests import GREEDY, SessionId
from gateway.chat.messages import Message
from gateway.cli.dialogue import SYSTEM, TOOLS, TURNS
from gateway.client import Client
from gateway.launch import launch
from gateway.models import find_model
from gateway.progress import ProgressBoard, open_board
from gateway.settings import RingKind, ServeSettings
from gateway.turns import ChatPrompt, TurnDelta, TurnFinished, TurnRequest, TurnStarted

_SESSION = SessionId("demo")
# Enough to see a decoding rate, little enough that the demo is over within two minutes on two CPU cores.
_TOKENS_PER_TURN = 40


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """One answered turn. Times are the client's: they hold the wire, the queue and the gateway."""

    prompt_tokens: int
    cached_prefix: int
    ttft_ms: float
    decode_tps: float
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class DemoTurn:
    """A turn and its cold twin, as `ringserve demo --json` prints it."""

    prompt_tokens: int
    cached_prefix: int
    prefilled_tokens: int
    ttft_ms: float
    cold_ttft_ms: float
    decode_tps: float
    token_ids: tuple[int, ...]
    cold_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DemoReport:
    model: str
    stages: int
    turns: tuple[DemoTurn, ...]
    token_exact: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def demo_command(settings: ServeSettings, as_json: bool) -> bool:
    """Plays and shows it; whether all tokens were equal. Raises SetupError."""
    console = Console(stderr=as_json, soft_wrap=True)
    with open_board(console) as board:
        if settings.ring is not RingKind.FAKE:
            find_model(settings.model, board.note)  # a wrong name is told before any heading
        report = asyncio.run(run_demo(settings, board))
    show(report, console)
    if as_json:
        Console(soft_wrap=True).print(report.to_json(), markup=False, highlight=False)
    return report.token_exact


async def run_demo(settings: ServeSettings, board: ProgressBoard) -> DemoReport:
    """Plays the conversation twice, each time on a ring that has just started. Raises SetupError."""
    board.note("warm: one session, each turn starts at the rows that the last one left")
    model, warm = await _converse(settings, board, reuse=True)
    board.note("cold: the same turns on a fresh ring, every row of every prompt computed")
    _, cold = await _converse(settings, board, reuse=False)
    turns = tuple(_paired(played, again) for played, again in zip(warm, cold, strict=True))
    same_prompts = all(a.prompt_tokens == b.prompt_tokens for a, b in zip(warm, cold, strict=True))
    same_tokens = all(turn.token_ids == turn.cold_token_ids for turn in turns)
    return DemoReport(model, settings.stages, turns, same_prompts and same_tokens)


def _paired(warm: PlayedTurn, cold: PlayedTurn) -> DemoTurn:
    return DemoTurn(
        prompt_tokens=warm.prompt_tokens,
        cached_prefix=warm.cached_prefix,
        prefilled_tokens=warm.prompt_tokens - warm.cached_prefix,
        ttft_ms=round(warm.ttft_ms, 1),
        cold_ttft_ms=round(cold.ttft_ms, 1),
        decode_tps=round(warm.decode_tps, 1),
        token_ids=warm.token_ids,
        cold_token_ids=cold.token_ids,
    )


async def _converse(
    settings: ServeSettings, board: ProgressBoard, *, reuse: bool
) -> tuple[str, list[PlayedTurn]]:
    async with launch(settings, board) as running, Client(running.grpc_address) as client:
        board.note(f"  ring of {settings.stages} stages is ready: {running.info.numerics}")
        messages: list[Message] = [SYSTEM]
        played: list[PlayedTurn] = []
        for turn in TURNS:
            messages.append(turn)
            answer = await _play(client, tuple(messages), reuse)
            played.append(answer)
            messages.append(Message("assistant", answer.text))
            board.note(f"  turn {len(played)}: first token after {answer.ttft_ms:.0f} ms")
        return running.info.model, played


async def _play(client: Client, messages: tuple[Message, ...], reuse: bool) -> PlayedTurn:
    request = TurnRequest(
        ChatPrompt(messages, TOOLS),
        session=_SESSION,
        sampling=GREEDY,
        max_tokens=_TOKENS_PER_TURN,
        reuse=reuse,
    )
    started: TurnStarted | None = None
    finished: TurnFinished | None = None
    tokens: list[int] = []
    text = ""
    begin = first = last = time.monotonic()
    async with client.generate(request) as stream:
        async for event in stream:
            match event:
                case TurnStarted():
                    started = event
                case TurnDelta():
                    last = time.monotonic()
                    first = first if tokens else last
                    tokens.extend(event.token_ids)
                    text += event.text
                case TurnFinished():
                    finished = event
    assert started is not None
    assert finished is not None
    return PlayedTurn(
        prompt_tokens=started.prompt_tokens,
        cached_prefix=finished.usage.cached_prefix,
        ttft_ms=(first - begin) * 1e3,
        decode_tps=(len(tokens) - 1) / (last - first) if last > first else 0.0,
        token_ids=tuple(tokens),
        text=text,
    )


def show(report: DemoReport, console: Console) -> None:
    """A table, the verdict and the speed-up."""
    table = Table("turn", "prompt", "cached_prefix", "prefilled", "TTFT", "cold TTFT", "tokens/s")
    for number, turn in enumerate(report.turns, 1):
        table.add_row(
            str(number),
            str(turn.prompt_tokens),
            str(turn.cached_prefix),
            str(turn.prefilled_tokens),
            f"{turn.ttft_ms:.0f} ms",
            f"{turn.cold_ttft_ms:.0f} ms",
            f"{turn.decode_tps:.1f}",
        )
    console.print(table)
    verdict = "token for token equal" if report.token_exact else "NOT EQUAL to the cold ring"
    console.print(f"warm against cold: {verdict}")
    later = report.turns[1:]
    gain = sum(turn.cold_ttft_ms for turn in later) / sum(turn.ttft_ms for turn in later)
    console.print(f"first token of a follow-up turn: {gain:.1f} times as fast as on a cold ring")
