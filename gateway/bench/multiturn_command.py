"""The command `bench multiturn`: a ring of our own, a running ringserve, or an OpenAI-compatible server.

Decides only which endpoint is measured and where the findings go. The baseline needs the model's folder and the
prompts' ids, so it is refused beside an OpenAI-compatible server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from rich.console import Console

from coordinator.errors import InvalidSetting, RingserveError, SetupError
from gateway.bench.endpoints import GrpcEndpoint
from gateway.bench.multiturn import Measured, measure
from gateway.bench.multiturn_report import MultiturnReport, plain_work, report, show
from gateway.bench.openai_endpoint import OpenAIEndpoint
from gateway.bench.plots import Phase, TtftCurves, check_plotting, plot_multiturn
from gateway.bench.watch import Sample, Watch, watching
from gateway.bench.workload import Load
from gateway.chat.tokenizer import load_tokenizer
from gateway.client import Client, client_of
from gateway.launch import launch
from gateway.models import find_model
from gateway.progress import ProgressBoard, open_board
from gateway.server_address import ServerAddress
from gateway.settings import ServeSettings


@dataclass(frozen=True, slots=True)
class Target:
    """Neither server nor url: a ring of our own, by the settings."""

    server: ServerAddress | None = None
    openai_url: str | None = None
    api_key: str | None = field(default=None, repr=False)  # of the url


@dataclass(frozen=True, slots=True)
class MultiturnOptions:
    load: Load
    target: Target
    baseline: bool
    plot: Path | None

    def check(self) -> None:
        """Raises InvalidSetting."""
        load = self.load
        for name in ("sessions", "turns", "answer_tokens"):
            if getattr(load, name) < 1:
                raise InvalidSetting(name, f"must be at least 1, got {getattr(load, name)}")
        if self.target.server and self.target.openai_url:
            raise InvalidSetting("address", "and --openai exclude each other")
        if self.baseline and self.target.openai_url:
            raise InvalidSetting(
                "baseline", "needs the prompts' token ids, which --openai does not tell"
            )


@dataclass(frozen=True, slots=True)
class _Opened:
    """A ringserve to measure. `model_dir` is None for a ring without a model."""

    endpoint: GrpcEndpoint
    client: Client
    model_dir: Path | None
    stages: int
    lanes: int


@dataclass(frozen=True, slots=True)
class _Found:
    report: MultiturnReport
    measured: Measured
    samples: list[Sample]


def multiturn_command(settings: ServeSettings, options: MultiturnOptions, as_json: bool) -> bool:
    """Measures and shows it; False when a turn's tokens were wrong. Raises SetupError."""
    options.check()
    if options.plot is not None:
        check_plotting()
    console = Console(stderr=as_json, soft_wrap=True)
    with open_board(console) as board:
        found = asyncio.run(run_multiturn(settings, options, board))
    show(found.report, console)
    if options.plot is not None:
        plot_multiturn(options.plot, _curves(found), found.samples, _phases(found.measured))
    if as_json:
        Console(soft_wrap=True).print(found.report.to_json(), markup=False, highlight=False)
    return not found.report.wrong_turns


async def run_multiturn(
    settings: ServeSettings, options: MultiturnOptions, board: ProgressBoard
) -> _Found:
    """Raises SetupError, also for an endpoint that fails."""
    try:
        if options.target.openai_url is not None:
            return await _run_openai(settings.model, options, board.note)
        async with _opened(settings, options.target, board) as opened:
            return await _run_ours(opened, options, board.note)
    except grpc.aio.AioRpcError as error:
        raise SetupError(f"the server answered {error.code().name}: {error.details()}") from error
    except SetupError:
        raise
    except RingserveError as error:
        raise SetupError(str(error)) from error


async def _run_openai(model: str, options: MultiturnOptions, tell: Callable[[str], None]) -> _Found:
    target, load = options.target, options.load
    assert target.openai_url is not None
    endpoint = OpenAIEndpoint(target.openai_url, model, load.sessions, target.api_key)
    try:
        measured = await measure(endpoint, load, lanes=load.sessions, tell=tell)
    finally:
        endpoint.close()
    return _Found(report(measured, None), measured, [])


async def _run_ours(
    opened: _Opened, options: MultiturnOptions, tell: Callable[[str], None]
) -> _Found:
    watch = Watch()
    async with watching(opened.client, watch):
        measured = await measure(opened.endpoint, options.load, lanes=opened.lanes, tell=tell)
    baseline = None
    if options.baseline:
        # Beside the ring, which blocks while it has nothing to do.
        from gateway.bench.baseline import measure_baseline

        if opened.model_dir is None:
            raise SetupError("a ring without a model has no baseline")
        tell(f"the same turns by plain transformers, {opened.stages} threads")
        work = plain_work(measured, str(opened.model_dir), opened.stages)
        baseline = await measure_baseline(work)
    return _Found(report(measured, baseline), measured, watch.samples)


@asynccontextmanager
async def _opened(
    settings: ServeSettings, target: Target, board: ProgressBoard
) -> AsyncIterator[_Opened]:
    if target.server is None:
        async with launch(settings, board) as running, Client(running.grpc_address) as client:
            endpoint = GrpcEndpoint(client, running.tokenizer)
            lanes = settings.lanes * settings.rings
            yield _Opened(endpoint, client, running.model_dir, settings.stages, lanes)
        return
    folder = await asyncio.to_thread(find_model, settings.model, board.note)
    tokenizer = await asyncio.to_thread(load_tokenizer, folder.path)
    async with client_of(target.server) as client:
        served, rings = await client.model(), await client.rings()
        if served.vocab_size < tokenizer.vocab_size:
            raise SetupError(
                f"{target.server.address} serves {served.name}, which is not {folder.name}"
            )
        lanes = served.lanes * len(rings)
        yield _Opened(GrpcEndpoint(client, tokenizer), client, folder.path, served.stages, lanes)


def _curves(found: _Found) -> TtftCurves:
    return TtftCurves(
        loaded_p50=[turn.ttft_ms_p50 or 0.0 for turn in found.report.turns],
        loaded_p95=[turn.ttft_ms_p95 or 0.0 for turn in found.report.turns],
        warm=[turn.ttft_ms for turn in found.measured.solo],
        cold=[turn.ttft_ms for turn in found.measured.solo_cold],
        control=found.report.control_ttft_ms_p50,
    )


def _phases(measured: Measured) -> list[Phase]:
    """What the stages were busy with, for the picture."""
    end_s = measured.begin_s + measured.wall_s
    solo, controls = measured.solo, measured.controls
    spans = [
        Phase("all sessions", measured.begin_s, end_s),
        Phase("one alone", solo[0].sent_s, solo[-1].last_s),
        Phase("unseen", controls[0].sent_s, controls[-1].last_s),
    ]
    cold = [*measured.solo_cold, *(turn for session in measured.cold for turn in session)]
    if cold:
        begin_s = min(turn.sent_s for turn in cold)
        spans.append(Phase("cold runs", begin_s, max(turn.last_s for turn in cold)))
    return spans
