"""The flags that several commands share, each with its RINGSERVE_* name and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordinator.config import MOST_DRAFTS
from gateway.cli.sizes import parse_size
from gateway.intake import MOST_BYTES
from gateway.observing.settings import LogFormat, LogLevel
from gateway.settings import (
    KV_DISK_BYTES,
    LONGEST_REQUEST,
    MOST_SPARES,
    Device,
    Dtype,
    Numerics,
    RingKind,
)

Model = Annotated[
    str, typer.Argument(envvar="RINGSERVE_MODEL", help="A folder, a hub id, or the word smollm2.")
]
Stages = Annotated[int, typer.Option(envvar="RINGSERVE_STAGES", help="Stages of a ring.")]
Rings = Annotated[int, typer.Option(envvar="RINGSERVE_RINGS", help="Rings of the same model.")]
Lanes = Annotated[
    int, typer.Option(envvar="RINGSERVE_LANES", help="Conversations that a ring holds at once.")
]
MaxRows = Annotated[
    int | None,
    typer.Option(
        envvar="RINGSERVE_MAX_ROWS",
        help="Tokens that a lane holds, at least 2.",
        show_default="what the model and the memory allow",
    ),
]
DeviceFlag = Annotated[Device, typer.Option("--device", envvar="RINGSERVE_DEVICE")]
DtypeFlag = Annotated[
    Dtype,
    typer.Option(
        "--dtype", envvar="RINGSERVE_DTYPE", help="auto: float32 on CPUs, bfloat16 on GPUs."
    ),
]
NumericsFlag = Annotated[
    Numerics,
    typer.Option(
        "--numerics",
        envvar="RINGSERVE_NUMERICS",
        help="exact: refuse to start unless tokens cannot depend on what is cached.",
    ),
]
Ring = Annotated[
    RingKind,
    typer.Option(
        envvar="RINGSERVE_RING",
        help="ray: an actor a stage; local: threads; fake: no model, for client authors.",
    ),
]
Drafts = Annotated[
    int,
    typer.Option(
        envvar="RINGSERVE_DRAFTS",
        help=f"Tokens drafted a step, at most {MOST_DRAFTS}; 0 drafts none.",
    ),
]
DraftModelFlag = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        envvar="RINGSERVE_DRAFT_MODEL",
        help="A small model of the same vocabulary: a folder or a hub id.",
        show_default="drafts are looked up in the context",
    ),
]
QueueLimit = Annotated[
    int,
    typer.Option(
        envvar="RINGSERVE_QUEUE_LIMIT", help="Turns that may wait for a lane, on each ring."
    ),
]
QueueTokens = Annotated[
    int | None,
    typer.Option(
        envvar="RINGSERVE_QUEUE_TOKENS",
        help="Prompt tokens to be computed that may wait with them; one turn may always wait.",
        show_default="what a ring prefills in two minutes, a lane's rows at least",
    ),
]
UnreadS = Annotated[
    float,
    typer.Option(
        envvar="RINGSERVE_UNREAD_S",
        help="Seconds that nothing of an answer may be read before its turn ends.",
    ),
]
RequestBytes = Annotated[
    int,
    typer.Option(
        envvar="RINGSERVE_REQUEST_BYTES",
        parser=parse_size,
        metavar="SIZE",
        help="Bytes of requests that are held at once, until they are answered. At least what one request may have: "
        f"{LONGEST_REQUEST // 2**20}M.",
        show_default=f"{MOST_BYTES // 2**20}M",
    ),
]
ServedName = Annotated[
    str | None,
    typer.Option(
        envvar="RINGSERVE_SERVED_NAME",
        help="The model's name to clients.",
        show_default="the folder's name",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        envvar="RINGSERVE_RAY_ADDRESS",
        help="A running Ray cluster: HOST:PORT, as for ray start --address.",
        show_default="a Ray of our own on this machine",
    ),
]
Spread = Annotated[
    bool,
    typer.Option(
        "--spread",
        envvar="RINGSERVE_SPREAD",
        help="A machine of the Ray cluster for each stage, where it has that many.",
    ),
]
Detached = Annotated[
    bool,
    typer.Option(
        "--detached",
        envvar="RINGSERVE_DETACHED",
        help="The rings outlive this process: the next one finds them in the Ray cluster, and goes on with what they "
        "hold.",
    ),
]
KvHostBytes = Annotated[
    int | None,
    typer.Option(
        envvar="RINGSERVE_KV_HOST_BYTES",
        parser=parse_size,
        metavar="SIZE",
        help="Host memory of each stage for rows that have left their lanes, such as 4G; 0 keeps none.",
        show_default="a quarter of what is free, shared by the stages of a host",
    ),
]
KvDisk = Annotated[
    Path | None,
    typer.Option(
        envvar="RINGSERVE_KV_DISK",
        file_okay=False,
        help="A folder on each stage's machine that keeps these rows over a restart.",
        show_default="they end with the process",
    ),
]
KvDiskBytes = Annotated[
    int,
    typer.Option(
        envvar="RINGSERVE_KV_DISK_BYTES",
        parser=parse_size,
        metavar="SIZE",
        help="Disk space of each stage for --kv-disk.",
        show_default=f"{KV_DISK_BYTES // 2**30}G",
    ),
]
Mirror = Annotated[
    bool,
    typer.Option(
        "--mirror",
        envvar="RINGSERVE_MIRROR",
        help="Another stage keeps a copy of each stage's --kv-host-bytes, for what takes the place of a lost one. "
        "Costs that memory twice.",
    ),
]
Spares = Annotated[
    int,
    typer.Option(
        "--spare",
        envvar="RINGSERVE_SPARE",
        metavar="N",
        help="Loaded processes of each ring that wait to take a lost stage's place; each needs what a stage needs. "
        f"From 0 to {MOST_SPARES}.",
    ),
]
ReplyTimeoutS = Annotated[
    float,
    typer.Option(
        envvar="RINGSERVE_REPLY_TIMEOUT_S",
        help="Seconds without a reply, beyond what frames of its size take, until the ring is healed.",
    ),
]
HealTimeoutS = Annotated[
    float,
    typer.Option(
        envvar="RINGSERVE_HEAL_TIMEOUT_S",
        help="Seconds that one attempt to heal a ring may take, its lost stages' loads with it.",
    ),
]
HealAttempts = Annotated[
    int,
    typer.Option(
        envvar="RINGSERVE_HEAL_ATTEMPTS", help="Attempts in a row until a ring is given up."
    ),
]
ProbeS = Annotated[
    float,
    typer.Option(envvar="RINGSERVE_PROBE_S", help="Seconds between probes of a stage's process."),
]
ProbeTimeoutS = Annotated[
    float,
    typer.Option(
        envvar="RINGSERVE_PROBE_TIMEOUT_S",
        help="Seconds without an answer to a probe until the stage is replaced.",
    ),
]
LoadTimeoutS = Annotated[
    float,
    typer.Option(
        envvar="RINGSERVE_LOAD_TIMEOUT_S",
        help="Seconds that a stage may load without any progress.",
    ),
]
Host = Annotated[str, typer.Option(envvar="RINGSERVE_HOST", help="The address to listen on.")]
HttpPort = Annotated[
    int,
    typer.Option(
        envvar="RINGSERVE_HTTP_PORT",
        help="The port of OpenAI's API, on the same host; 0: a free one.",
    ),
]
GrpcPort = Annotated[
    int, typer.Option(envvar="RINGSERVE_GRPC_PORT", help="The port to listen on; 0: a free one.")
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        envvar="RINGSERVE_INSECURE",
        help="Allow a host that others can reach, without keys or client certificates.",
    ),
]
ApiKeys = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="RINGSERVE_API_KEY",
        metavar="KEY[,KEY]",
        help="Keys, one of which clients must show: each is KEY or NAME KEY. Others on this machine can read a "
        "command line: rather use the variable or --api-key-file.",
        show_default="no key is asked for",
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        envvar="RINGSERVE_API_KEY_FILE",
        dir_okay=False,
        help="A file of such keys, one a line.",
    ),
]
Operators = Annotated[
    str | None,
    typer.Option(
        envvar="RINGSERVE_OPERATORS",
        metavar="NAME[,NAME]",
        help="The keys that may add and drain rings, and list, pin and drop what they keep.",
        show_default="every key",
    ),
]
IsolateKeys = Annotated[
    bool,
    typer.Option(
        "--isolate-keys",
        envvar="RINGSERVE_ISOLATE_KEYS",
        help="Never reuse what was computed for one key for another.",
    ),
]
KeyMaxJobs = Annotated[
    int | None,
    typer.Option(
        envvar="RINGSERVE_KEY_MAX_JOBS",
        help="Turns that each key may have at once.",
        show_default="no limit",
    ),
]
KeyTokensPerMinute = Annotated[
    int | None,
    typer.Option(
        envvar="RINGSERVE_KEY_TOKENS_PER_MINUTE",
        help="Tokens that each key may use in a minute.",
        show_default="no limit",
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        envvar="RINGSERVE_TLS_CERT",
        dir_okay=False,
        help="The certificate of both ports, with its chain, as PEM.",
        show_default="no TLS",
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(envvar="RINGSERVE_TLS_KEY", dir_okay=False, help="The certificate's key, as PEM."),
]
TlsClientCa = Annotated[
    Path | None,
    typer.Option(
        envvar="RINGSERVE_TLS_CLIENT_CA",
        dir_okay=False,
        help="Only clients with a certificate of this authority may connect (PEM).",
    ),
]
DrainS = Annotated[
    float,
    typer.Option(
        envvar="RINGSERVE_DRAIN_S",
        help="Seconds that running turns get at the end, and then rows that belong on --kv-disk.",
    ),
]
MetricsPrefix = Annotated[
    str,
    typer.Option(
        envvar="RINGSERVE_METRICS_PREFIX",
        help="In front of every metric's name; vllm: makes dashboards and autoscalers for vLLM work.",
    ),
]
LogFormatFlag = Annotated[
    LogFormat,
    typer.Option("--log-format", envvar="RINGSERVE_LOG_FORMAT", help="json: an object a line."),
]
LogLevelFlag = Annotated[
    LogLevel | None,
    typer.Option(
        "--log-level",
        envvar="RINGSERVE_LOG_LEVEL",
        help="info logs a line for each turn, without its text.",
        show_default="warning; info with --log-format json or -v",
    ),
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        envvar="RINGSERVE_OTLP_ENDPOINT",
        help="An OpenTelemetry collector for traces: http://HOST:4317, by gRPC.",
        show_default="what OTEL_EXPORTER_OTLP_ENDPOINT says, else none",
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", envvar="RINGSERVE_VERBOSE", help="As --log-level info.")
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object as the last line of the output.")
]
