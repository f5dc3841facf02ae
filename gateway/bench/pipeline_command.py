"""The command `bench pipeline`: puts two rings up, runs gateway/bench/pipeline.py on them and tells what it found."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import grpc
from rich.console import Console

from coordinator.errors import InvalidSetting, SetupError
from gateway.bench.endpoints import GrpcEndpoint
from gateway.bench.pipeline import Decoding, Pipeline, PipelinePrompts, PipelineSizes
from gateway.bench.plots import Phase, check_plotting, plot_occupancy
from gateway.bench.prompts import TWENTY, prose, quoting_prompt
from gateway.bench.watch import Sample, Watch, busy_shares, watching
from gateway.chat.tokenizer import ChatTokenizer
from gateway.client import Client
from gateway.launch import launch
from gateway.progress import ProgressBoard, open_board
from gateway.settings import ServeSettings

_LANES = 4
_LONG_TOKENS = 4000
# A sentence of the prose has about 20 tokens; more are made than are needed, and cut.
_SENTENCES = 400
_LANE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """Ratios are of medians within this run; absolute figures belong to the machine and stand below them."""

    decode_speedup: float
    prefill_speedup: float
    quoting_speedup: float
    worst_prompt_ratio: float
    wrong_tokens: int
    stage_busy: tuple[float, ...]
    stretch_p95: float
    frames_discarded: int
    bubble_share: float | None
    prompt_ratios: tuple[float, ...]
    decode_tps: tuple[float, float]  # one lane of one stage, all lanes of the ring
    prefill_s: tuple[float, float]  # one stage, the ring
    quoting_tps: tuple[float, float]  # without drafts, with
    inter_token_ms: tuple[float, float]  # alone p50, beside a prefill p95
    wall_s: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class _Phases:
    """The run's parts by name, for the picture."""

    def __init__(self) -> None:
        self.seen: list[Phase] = []

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        self.seen.append(Phase(name, begin_s, time.perf_counter()))


@dataclass(frozen=True, slots=True)
class _Found:
    report: PipelineReport
    samples: list[Sample]
    phases: list[Phase]


def pipeline_command(
    settings: ServeSettings, sizes: PipelineSizes, plot: Path | None, as_json: bool
) -> bool:
    """Measures and shows it; False when a token was wrong. Raises SetupError."""
    if plot is not None:
        check_plotting()
    console = Console(stderr=as_json, soft_wrap=True)
    with open_board(console) as board:
        found = asyncio.run(run_pipeline(settings, sizes, board))
    for line in _lines(found.report):
        console.print(line, markup=False, highlight=False)
    if plot is not None:
        plot_occupancy(plot, found.samples, found.phases)
    if as_json:
        Console(soft_wrap=True).print(found.report.to_json(), markup=False, highlight=False)
    return found.report.wrong_tokens == 0


async def run_pipeline(
    settings: ServeSettings, sizes: PipelineSizes, board: ProgressBoard
) -> _Found:
    """Raises SetupError."""
    if sizes.repeats < 1 or min(sizes.decode_tokens, sizes.quote_tokens, sizes.fixed_tokens) < 2:
        raise InvalidSetting("repeats", "must be at least 1, and an answer at least 2 tokens")
    one = replace(settings, stages=1, lanes=1)
    ring = replace(settings, stages=2, lanes=_LANES)
    try:
        async with (
            launch(one, board) as left,
            launch(ring, board) as right,
            Client(left.grpc_address) as left_client,
            Client(right.grpc_address) as right_client,
        ):
            prompts = _prompts(right.tokenizer)
            pipeline = Pipeline(
                GrpcEndpoint(left_client, left.tokenizer),
                GrpcEndpoint(right_client, right.tokenizer),
                prompts,
                sizes,
            )
            return await _measure(pipeline, right_client, board)
    except grpc.aio.AioRpcError as error:
        raise SetupError(f"the ring answered {error.code().name}: {error.details()}") from error


def _prompts(tokenizer: ChatTokenizer) -> PipelinePrompts:
    long = tokenizer.encode(prose(0, _SENTENCES))
    if len(long) < _LONG_TOKENS:
        raise SetupError(f"the long prompt has only {len(long)} tokens")
    return PipelinePrompts(
        lanes=tuple(tokenizer.encode(prose(1 + n, 8))[:_LANE_TOKENS] for n in range(_LANES)),
        long=long[:_LONG_TOKENS],
        quoting=tokenizer.encode(quoting_prompt()),
        fixed=tuple(tokenizer.encode(text) for text in TWENTY),
    )


async def _measure(pipeline: Pipeline, client: Client, board: ProgressBoard) -> _Found:
    """One thing after the other; only the ring of two stages is watched."""
    watch, phases = Watch(), _Phases()
    begin_s = time.perf_counter()
    await pipeline.warm_up()
    async with watching(client, watch):
        board.note("decoding: one lane of one stage, then all lanes of two")
        # In turns with the ring of one stage: the watched one pauses meanwhile.
        with phases.named("decode"):
            decoding = await pipeline.decoding()
        board.note("prefill of a long prompt: one stage, then two")
        with phases.named("prefill, in turns with one stage"):
            prefill = await pipeline.prefilling()
        board.note("a quoting stream, with and without drafts")
        with phases.named("quote"):
            quoting = await pipeline.quoting()
        board.note("the fixed prompts, with drafts over without")
        with phases.named("fixed prompts"):
            fixed = await pipeline.fixed(board.note)
        board.note("a stream beside the prefill of a long prompt")
        with phases.named("beside a prefill"):
            stretch = await pipeline.stretch()
    busy = _busy(decoding, watch.samples)
    ratios = tuple(round(pair.ratio, 3) for pair in fixed)
    report = PipelineReport(
        decode_speedup=round(decoding.ring_tps / decoding.one_tps, 3),
        prefill_speedup=round(1 / prefill.ratio, 3),
        quoting_speedup=round(quoting.ratio, 3),
        worst_prompt_ratio=min(ratios),
        wrong_tokens=pipeline.book.wrong_tokens,
        stage_busy=busy,
        stretch_p95=round(stretch.ratio, 3),
        frames_discarded=watch.samples[-1].discarded_frames - watch.samples[0].discarded_frames,
        bubble_share=round(1 - sum(busy) / len(busy), 3) if busy else None,
        prompt_ratios=ratios,
        decode_tps=(round(decoding.one_tps, 2), round(decoding.ring_tps, 2)),
        prefill_s=(round(prefill.plain, 2), round(prefill.other, 2)),
        quoting_tps=(round(quoting.plain, 2), round(quoting.other, 2)),
        inter_token_ms=(round(stretch.alone_p50_ms, 1), round(stretch.beside_p95_ms, 1)),
        wall_s=round(time.perf_counter() - begin_s, 1),
    )
    return _Found(report, watch.samples, phases.seen)


def _busy(decoding: Decoding, samples: list[Sample]) -> tuple[float, ...]:
    """Each stage's share of the time in which all lanes decoded, over all repeats."""
    spans = decoding.spans
    shares = [busy_shares(samples, span.begin_s, span.end_s) for span in spans]
    return tuple(round(sum(stage) / len(stage), 3) for stage in zip(*shares, strict=True))


def _lines(told: PipelineReport) -> list[str]:
    (one, four), (cold_one, cold_two) = told.decode_tps, told.prefill_s
    (plain, drafted), (alone, beside) = told.quoting_tps, told.inter_token_ms
    busy = ", ".join(f"{share:.0%}" for share in told.stage_busy)
    return [
        f"decoding: {told.decode_speedup} times ({one} tokens/s on one stage, {four} on four lanes of two)",
        f"prefill of {_LONG_TOKENS} tokens: {told.prefill_speedup} times ({cold_one} s, {cold_two} s)",
        f"a quoting stream with drafts: {told.quoting_speedup} times ({plain} tokens/s, {drafted})",
        f"the worst of {len(told.prompt_ratios)} prompts with drafts: {told.worst_prompt_ratio} times",
        f"a stream beside a prefill: p95 {beside} ms, {told.stretch_p95} times its median alone ({alone} ms)",
        f"busy while decoding: {busy}; frames discarded: {told.frames_discarded}; "
        f"wrong tokens: {told.wrong_tokens}",
    ]
