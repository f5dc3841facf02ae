"""The command line: `ringserve` and its commands, each in a file of its own beside this one.

It parses flags and RINGSERVE_* names into settings, shows what happens and maps ends to exit codes: 0, 1 for a
failure, 2 for bad usage, 130 when interrupted. Heavy modules are imported by the command that needs them.
"""

from __future__ import annotations

import os
import signal
from importlib.metadata import version
from types import FrameType
from typing import Annotated

import typer

from coordinator.config import SchedulerSettings
from coordinator.errors import SetupError
from gateway.cli.asking import Address, ApiKey, ClientCert, TlsCa
from gateway.cli.bench import bench
from gateway.cli.cache import app as cache_app
from gateway.cli.chaos import chaos
from gateway.cli.chat_options import ChatOptions
from gateway.cli.detached import drain, ps, stop
from gateway.cli.entry import INTERRUPTED
from gateway.cli.exits import fail
from gateway.cli.flags import (
    ApiKeyFile,
    ApiKeys,
    Detached,
    DeviceFlag,
    DraftModelFlag,
    Drafts,
    DrainS,
    DtypeFlag,
    GrpcPort,
    HealAttempts,
    HealTimeoutS,
    Host,
    HttpPort,
    Insecure,
    IsolateKeys,
    Json,
    KeyMaxJobs,
    KeyTokensPerMinute,
    KvDisk,
    KvDiskBytes,
    KvHostBytes,
    Lanes,
    LoadTimeoutS,
    LogFormatFlag,
    LogLevelFlag,
    MaxRows,
    MetricsPrefix,
    Mirror,
    Model,
    NumericsFlag,
    Operators,
    OtlpEndpoint,
    ProbeS,
    ProbeTimeoutS,
    QueueLimit,
    QueueTokens,
    RayAddress,
    ReplyTimeoutS,
    RequestBytes,
    Ring,
    Rings,
    ServedName,
    Spares,
    Spread,
    Stages,
    TlsCert,
    TlsClientCa,
    TlsKey,
    UnreadS,
    Verbose,
)
from gateway.cli.output import open_missing
from gateway.cli.rings import app as rings_app
from gateway.observing.logs import log_to_stderr
from gateway.observing.settings import LogLevel, ObserveSettings
from gateway.safety.settings import SafetySettings
from gateway.safety.tls import tls_settings
from gateway.server_address import ServerAddress
from gateway.settings import GrpcSettings, HttpSettings, ServeSettings

app = typer.Typer(
    name="ringserve",
    help="Serves one model to agents over a ring of pipeline stages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(bench, name="bench")
app.add_typer(rings_app, name="rings")
app.add_typer(cache_app, name="cache")
app.command()(chaos)

_DEFAULTS = ServeSettings(model="default")
_GRPC = GrpcSettings()
_HTTP = HttpSettings()
_SAFETY = SafetySettings()
_OBSERVE = ObserveSettings()
_SCHEDULER = SchedulerSettings()
_CHAT = ChatOptions(ServerAddress(""))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("ringserve"))
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show it and exit."),
    ] = False,
) -> None:
    """Serves one model to agents over a ring of pipeline stages."""


@app.command()
def serve(
    model: Model,
    stages: Stages = _DEFAULTS.stages,
    rings: Rings = _DEFAULTS.rings,
    lanes: Lanes = _DEFAULTS.lanes,
    max_rows: MaxRows = _DEFAULTS.max_rows,
    device: DeviceFlag = _DEFAULTS.device,
    dtype: DtypeFlag = _DEFAULTS.dtype,
    numerics: NumericsFlag = _DEFAULTS.numerics,
    ring: Ring = _DEFAULTS.ring,
    drafts: Drafts = _SCHEDULER.max_drafts,
    draft_model: DraftModelFlag = _DEFAULTS.draft_model,
    queue_limit: QueueLimit = _SCHEDULER.queue_limit,
    queue_tokens: QueueTokens = _SCHEDULER.queue_tokens,
    unread_s: UnreadS = _SCHEDULER.unread_s,
    request_bytes: RequestBytes = _DEFAULTS.request_bytes,
    served_name: ServedName = _DEFAULTS.served_name,
    ray_address: RayAddress = _DEFAULTS.ray_address,
    spread: Spread = _DEFAULTS.spread,
    detached: Detached = _DEFAULTS.detached,
    kv_host_bytes: KvHostBytes = _DEFAULTS.kv_host_bytes,
    kv_disk: KvDisk = _DEFAULTS.kv_disk,
    kv_disk_bytes: KvDiskBytes = _DEFAULTS.kv_disk_bytes,
    mirror: Mirror = _DEFAULTS.mirror,
    spare: Spares = _DEFAULTS.spares,
    reply_timeout_s: ReplyTimeoutS = _SCHEDULER.reply_timeout_s,
    heal_timeout_s: HealTimeoutS = _SCHEDULER.heal_timeout_s,
    heal_attempts: HealAttempts = _SCHEDULER.heal_attempts,
    probe_s: ProbeS = _DEFAULTS.probe_s,
    probe_timeout_s: ProbeTimeoutS = _DEFAULTS.probe_timeout_s,
    load_timeout_s: LoadTimeoutS = _DEFAULTS.load_timeout_s,
    host: Host = _GRPC.host,
    grpc_port: GrpcPort = _GRPC.port,
    http_port: HttpPort = _HTTP.port,
    insecure: Insecure = _GRPC.insecure,
    api_key: ApiKeys = None,
    api_key_file: ApiKeyFile = _SAFETY.api_key_file,
    operators: Operators = _SAFETY.operators,
    isolate_keys: IsolateKeys = _SAFETY.isolate_keys,
    key_max_jobs: KeyMaxJobs = _SAFETY.key_max_jobs,
    key_tokens_per_minute: KeyTokensPerMinute = _SAFETY.key_tokens_per_minute,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    drain_s: DrainS = _GRPC.drain_s,
    metrics_prefix: MetricsPrefix = _OBSERVE.metrics_prefix,
    log_format: LogFormatFlag = _OBSERVE.log_format,
    log_level: LogLevelFlag = _OBSERVE.log_level,
    otlp_endpoint: OtlpEndpoint = _OBSERVE.otlp_endpoint,
    verbose: Verbose = False,
) -> None:
    """Serves MODEL until Ctrl-C, which lets running turns end; a second one stops at once."""
    try:
        observe = ObserveSettings(
            metrics_prefix=metrics_prefix,
            log_format=log_format,
            log_level=log_level or (LogLevel.INFO if verbose else None),
            otlp_endpoint=otlp_endpoint,
        )
        log_to_stderr(observe)
        safety = SafetySettings(
            api_keys=api_key,
            api_key_file=api_key_file,
            operators=operators,
            isolate_keys=isolate_keys,
            key_max_jobs=key_max_jobs,
            key_tokens_per_minute=key_tokens_per_minute,
            tls=tls_settings(tls_cert, tls_key, tls_client_ca),
        )
        guarded = safety.keeps_strangers_out
        settings = ServeSettings(
            model=model,
            ring=ring,
            stages=stages,
            rings=rings,
            lanes=lanes,
            max_rows=max_rows,
            device=device,
            dtype=dtype,
            numerics=numerics,
            served_name=served_name,
            ray_address=ray_address,
            spread=spread,
            detached=detached,
            draft_model=draft_model,
            kv_host_bytes=kv_host_bytes,
            kv_disk=kv_disk,
            kv_disk_bytes=kv_disk_bytes,
            mirror=mirror,
            spares=spare,
            probe_s=probe_s,
            probe_timeout_s=probe_timeout_s,
            load_timeout_s=load_timeout_s,
            scheduler=SchedulerSettings(
                max_drafts=drafts,
                queue_limit=queue_limit,
                queue_tokens=queue_tokens,
                unread_s=unread_s,
                reply_timeout_s=reply_timeout_s,
                heal_timeout_s=heal_timeout_s,
                heal_attempts=heal_attempts,
            ),
            request_bytes=request_bytes,
            grpc=GrpcSettings(
                host=host,
                port=grpc_port,
                guarded=guarded,
                insecure=insecure,
                drain_s=drain_s,
                unread_s=unread_s,
            ),
            http=HttpSettings(
                host=host,
                port=http_port,
                guarded=guarded,
                insecure=insecure,
                drain_s=drain_s,
                unread_s=unread_s,
            ),
            safety=safety,
            observe=observe,
        )
        from gateway.cli.serve import serve_until_interrupted

        code = serve_until_interrupted(settings)
    except SetupError as error:
        code = fail(error)
    raise typer.Exit(code)


@app.command()
def plan(
    model: Model,
    stages: Stages = _DEFAULTS.stages,
    rings: Rings = _DEFAULTS.rings,
    lanes: Lanes = _DEFAULTS.lanes,
    max_rows: MaxRows = _DEFAULTS.max_rows,
    device: DeviceFlag = _DEFAULTS.device,
    dtype: DtypeFlag = _DEFAULTS.dtype,
) -> None:
    """Shows each stage's layers and memory, and what fits, before anything is loaded."""
    try:
        settings = ServeSettings(
            model=model,
            stages=stages,
            rings=rings,
            lanes=lanes,
            max_rows=max_rows,
            device=device,
            dtype=dtype,
        )
        from gateway.cli.plan_view import show_plan

        show_plan(settings)
    except SetupError as error:
        raise typer.Exit(fail(error)) from None


@app.command()
def chat(
    address: Address,
    system: Annotated[
        str | None, typer.Option(envvar="RINGSERVE_SYSTEM", help="The system prompt.")
    ] = None,
    temperature: Annotated[float, typer.Option(envvar="RINGSERVE_TEMPERATURE")] = (
        _CHAT.temperature
    ),
    max_tokens: Annotated[
        int, typer.Option(envvar="RINGSERVE_MAX_TOKENS", help="Of each answer.")
    ] = _CHAT.max_tokens,
    seed: Annotated[int | None, typer.Option(envvar="RINGSERVE_SEED")] = None,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    client_cert: ClientCert = None,
) -> None:
    """Talks to a running ringserve in the terminal. Ctrl-C ends an answer, Ctrl-D the conversation."""
    from gateway.cli.chat_terminal import talk

    try:
        options = ChatOptions(
            server=ServerAddress(address, api_key, tls_ca, client_cert),
            system=system,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
        )
        code = talk(options)
    except SetupError as error:
        code = fail(error)
    raise typer.Exit(code)


@app.command()
def demo(
    model: Annotated[str, typer.Option(envvar="RINGSERVE_MODEL", help="As for serve.")] = "smollm2",
    stages: Stages = _DEFAULTS.stages,
    ring: Ring = _DEFAULTS.ring,
    as_json: Json = False,
) -> None:
    """Holds an agent's conversation through a ring, then on a cold one, and compares the tokens."""
    from gateway.cli.demo import demo_command

    try:
        exact = demo_command(ServeSettings(model=model, stages=stages, ring=ring), as_json)
    except SetupError as error:
        raise typer.Exit(fail(error)) from None
    raise typer.Exit(0 if exact else 1)


app.command()(ps)
app.command()(stop)
app.command()(drain)


def _ended(number: int, frame: FrameType | None) -> None:
    """Until a server has handlers of its own, and for all other commands: they take back what they have begun."""
    typer.echo("interrupted", err=True)
    raise SystemExit(INTERRUPTED)


def main() -> None:
    signal.signal(signal.SIGTERM, _ended)
    # Ray starts processes while the gRPC server answers; gRPC's fork handlers would do nothing but complain.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    open_missing()
    app()
