"""What `bench multiturn` says of what it measured: per turn, in all, and beside the plain baseline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from gateway.bench.baseline import Baseline, PlainTurn, PlainWork
from gateway.bench.endpoints import Answered
from gateway.bench.figures import median, p95, ratio
from gateway.bench.multiturn import Measured
from gateway.bench.request_log import reusable_tokens


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """The n-th turn of all sessions, beside one another. `reusable_tokens`: None where no ids are told."""

    turn: int
    ttft_ms_p50: float | None
    ttft_ms_p95: float | None
    token_ms_p50: float | None
    token_ms_p95: float | None
    prompt_tokens: int
    reused_tokens: int
    reusable_tokens: int | None
    cached_share: float | None


@dataclass(frozen=True, slots=True)
class MultiturnReport:
    """`turns`, `tokens_per_s` and `wall_s` are of the sessions beside one another; `warm_`, `cold_` and
    `control_ttft_ms_p50` and `decode_tps` of one session alone, as the baseline's are.
    """

    turns: tuple[TurnFigures, ...]
    wrong_turns: int | None
    reused_tokens: int
    reusable_tokens: int | None
    cached_share: float | None
    prompt_tokens: int
    prefilled_tokens: int
    warm_ttft_ms_p50: float | None
    cold_ttft_ms_p50: float | None
    control_ttft_ms_p50: float | None
    control_cached_tokens: int
    token_ms_p50: float | None
    token_ms_p95: float | None
    tokens_per_s: float
    decode_tps: float | None
    wall_s: float
    rings: int
    baseline: Baseline | None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def report(measured: Measured, baseline: Baseline | None) -> MultiturnReport:
    turns = measured.turns
    reusable = reusable_tokens(turns) if turns[0].prompt else None
    prompt_tokens = sum(turn.prompt_tokens for turn in turns)
    reused = sum(turn.cached_tokens for turn in turns)
    return MultiturnReport(
        turns=tuple(_figures(measured, reusable)),
        wrong_turns=measured.wrong_turns,
        reused_tokens=reused,
        reusable_tokens=None if reusable is None else sum(reusable),
        cached_share=ratio(reused, prompt_tokens),
        prompt_tokens=prompt_tokens,
        prefilled_tokens=prompt_tokens - reused,
        warm_ttft_ms_p50=median(turn.ttft_ms for turn in measured.solo[1:]),
        cold_ttft_ms_p50=median(turn.ttft_ms for turn in measured.solo_cold),
        control_ttft_ms_p50=median(turn.ttft_ms for turn in measured.controls),
        control_cached_tokens=sum(turn.cached_tokens for turn in measured.controls),
        token_ms_p50=median(turn.token_ms for turn in turns),
        token_ms_p95=p95(turn.token_ms for turn in turns),
        tokens_per_s=round(sum(turn.n_tokens for turn in turns) / measured.wall_s, 2),
        decode_tps=median(turn.decode_tps for turn in measured.solo),
        wall_s=round(measured.wall_s, 2),
        rings=len({turn.ring for turn in turns}),
        baseline=baseline,
    )


def _figures(measured: Measured, reusable: Sequence[int] | None) -> list[TurnFigures]:
    n_turns = len(measured.sessions[0])
    told = []
    for number in range(n_turns):
        turns = [session[number] for session in measured.sessions]
        could = None if reusable is None else sum(reusable[number::n_turns])
        told.append(_turn_figures(number + 1, turns, could))
    return told


def _turn_figures(number: int, turns: Sequence[Answered], could: int | None) -> TurnFigures:
    prompt_tokens = sum(turn.prompt_tokens for turn in turns)
    reused = sum(turn.cached_tokens for turn in turns)
    return TurnFigures(
        turn=number,
        ttft_ms_p50=median(turn.ttft_ms for turn in turns),
        ttft_ms_p95=p95(turn.ttft_ms for turn in turns),
        token_ms_p50=median(turn.token_ms for turn in turns),
        token_ms_p95=p95(turn.token_ms for turn in turns),
        prompt_tokens=prompt_tokens,
        reused_tokens=reused,
        reusable_tokens=could,
        cached_share=ratio(reused, prompt_tokens),
    )


def plain_work(measured: Measured, model_dir: str, threads: int) -> PlainWork:
    """The same prompts and answers' lengths, for the baseline."""
    sessions = tuple(_plain(session) for session in measured.sessions)
    return PlainWork(model_dir, threads, sessions, _plain(measured.solo))


def _plain(turns: Sequence[Answered]) -> tuple[PlainTurn, ...]:
    return tuple(PlainTurn(turn.prompt, turn.n_tokens) for turn in turns)


def show(told: MultiturnReport, console: Console) -> None:
    table = Table("turn", "prompt", "reused", "share", "TTFT p50", "TTFT p95", "ms/token")
    for turn in told.turns:
        table.add_row(
            *(str(turn.turn), str(turn.prompt_tokens), str(turn.reused_tokens)),
            *(str(turn.cached_share), str(turn.ttft_ms_p50), str(turn.ttft_ms_p95)),
            str(turn.token_ms_p50),
        )
    console.print(table)
    for line in _lines(told):
        console.print(line, markup=False, highlight=False)


def _lines(told: MultiturnReport) -> list[str]:
    lines = [
        f"reused {told.reused_tokens} of {told.reusable_tokens} reusable prompt tokens; "
        f"{told.tokens_per_s} tokens/s in all, {told.wall_s} s",
        f"alone: warm TTFT {told.warm_ttft_ms_p50} ms, cold {told.cold_ttft_ms_p50} ms, unseen prompts "
        f"{told.control_ttft_ms_p50} ms ({told.control_cached_tokens} tokens cached), {told.decode_tps} tokens/s",
    ]
    if told.wrong_turns is not None:
        lines.append(f"turns that differ from their cold run: {told.wrong_turns}")
    if told.baseline is not None:
        plain = told.baseline
        lines.append(
            f"plain transformers: warm TTFT {plain.warm_ttft_ms} ms, cold {plain.cold_ttft_ms} ms, "
            f"{plain.decode_tps} tokens/s, {plain.wall_s} s"
        )
    return lines
