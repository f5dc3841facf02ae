"""The commands of `ringserve bench`, mounted by gateway/cli/app.py.

Heavy modules are imported by the command that needs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordinator.errors import SetupError
from gateway.cli.asking import ClientCert, TlsCa
from gateway.cli.exits import fail
from gateway.cli.flags import Json, Lanes, MaxRows, Ring, Rings, Stages
from gateway.server_address import ServerAddress
from gateway.settings import ServeSettings

bench = typer.Typer(help="Measures a ring; each command has --json.", no_args_is_help=True)

_DEFAULTS = ServeSettings(model="default")
# A 4,000-token prompt and what is generated behind it.
_PIPELINE_ROWS = 4608

BenchModel = Annotated[str, typer.Option("--model", envvar="RINGSERVE_MODEL", help="As for serve.")]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw a PNG; needs the extra `bench`.", dir_okay=False),
]


@bench.command()
def overhead(
    model: BenchModel = "smollm2",
    stages: Stages = _DEFAULTS.stages,
    as_json: Json = False,
) -> None:
    """Times verify frames through Ray actors against the same slices in one process."""
    from gateway.bench.overhead import overhead_command

    try:
        overhead_command(ServeSettings(model=model, stages=stages), as_json)
    except SetupError as error:
        raise typer.Exit(fail(error)) from None


@bench.command()
def multiturn(
    sessions: Annotated[int, typer.Option(help="Conversations at once.")] = 4,
    turns: Annotated[int, typer.Option(help="Turns of each.")] = 4,
    answer_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 32,
    model: BenchModel = "smollm2",
    stages: Stages = _DEFAULTS.stages,
    rings: Rings = _DEFAULTS.rings,
    lanes: Lanes = _DEFAULTS.lanes,
    max_rows: MaxRows = _PIPELINE_ROWS,
    ring: Ring = _DEFAULTS.ring,
    address: Annotated[
        str | None,
        typer.Option(
            envvar="RINGSERVE_ADDRESS", help="HOST:PORT of a running ringserve that serves --model."
        ),
    ] = None,
    openai: Annotated[
        str | None,
        typer.Option(help="Base URL of an OpenAI-compatible server, such as http://HOST:PORT/v1."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="For --openai.")
    ] = None,
    server_key: Annotated[
        str | None, typer.Option(envvar="RINGSERVE_API_KEY", metavar="KEY", help="For --address.")
    ] = None,
    tls_ca: TlsCa = None,
    client_cert: ClientCert = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Also play the turns by plain transformers.")
    ] = False,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Plays growing conversations over one shared head; every turn is checked against a cold run."""
    try:
        settings = ServeSettings(
            model=model, stages=stages, rings=rings, lanes=lanes, max_rows=max_rows, ring=ring
        )
        from gateway.bench.multiturn_command import MultiturnOptions, Target, multiturn_command
        from gateway.bench.workload import Load

        server = None
        if address is not None:
            server = ServerAddress(address, server_key, tls_ca, client_cert)
        options = MultiturnOptions(
            load=Load(sessions, turns, answer_tokens),
            target=Target(server, openai, api_key),
            baseline=baseline,
            plot=plot,
        )
        right = multiturn_command(settings, options, as_json)
    except SetupError as error:
        raise typer.Exit(fail(error)) from None
    raise typer.Exit(0 if right else 1)


@bench.command()
def restore(
    sessions: Annotated[int, typer.Option(help="Conversations, more than lanes.")] = 12,
    history_tokens: Annotated[int, typer.Option(help="Tokens that each begins with.")] = 1500,
    model: BenchModel = "smollm2",
    stages: Stages = _DEFAULTS.stages,
    lanes: Lanes = _DEFAULTS.lanes,
    max_rows: MaxRows = 2048,
    ring: Ring = _DEFAULTS.ring,
    as_json: Json = False,
) -> None:
    """Says what a turn costs whose rows come back from host memory, or from disk behind a restart."""
    try:
        settings = ServeSettings(
            model=model, stages=stages, lanes=lanes, max_rows=max_rows, ring=ring
        )
        from gateway.bench.restore import Load
        from gateway.bench.restore_command import restore_command

        right = restore_command(settings, Load(sessions, history_tokens), as_json)
    except SetupError as error:
        raise typer.Exit(fail(error)) from None
    raise typer.Exit(0 if right else 1)


@bench.command()
def pipeline(
    model: BenchModel = "smollm2",
    ring: Ring = _DEFAULTS.ring,
    max_rows: MaxRows = _PIPELINE_ROWS,
    repeats: Annotated[int, typer.Option(help="How often each thing is measured.")] = 3,
    decode_tokens: Annotated[int, typer.Option(help="Tokens of an answer, decoding.")] = 96,
    quote_tokens: Annotated[int, typer.Option(help="Tokens of an answer, quoting.")] = 160,
    fixed_tokens: Annotated[int, typer.Option(help="Tokens of a fixed prompt's answer.")] = 48,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Says what a second stage, four lanes and drafts are worth, and what a prefill costs its neighbours."""
    try:
        settings = ServeSettings(model=model, ring=ring, max_rows=max_rows)
        from gateway.bench.pipeline import PipelineSizes
        from gateway.bench.pipeline_command import pipeline_command

        sizes = PipelineSizes(decode_tokens, quote_tokens, fixed_tokens, repeats)
        right = pipeline_command(settings, sizes, plot, as_json)
    except SetupError as error:
        raise typer.Exit(fail(error)) from None
    raise typer.Exit(0 if right else 1)
