"""What a ringserve process is told to do: one frozen record, checked when it is made.

Defaults are written here (and in coordinator/config.py) once; the command line shows them from here. Nothing here reads
the environment: gateway/cli/app.py does, by each flag's RINGSERVE_* name.
"""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from coordinator.config import UNREAD_S, SchedulerSettings
from coordinator.errors import InvalidSetting
from gateway.intake import MOST_BYTES
from gateway.observing.settings import ObserveSettings
from gateway.safety.settings import SafetySettings

KV_DISK_BYTES = 16 * 2**30
LONGEST_REQUEST = 16 * 2**20  # bytes, of one request
# How much longer than the coordinator fronts bear with who does not read: it ends such a turn first, and says why.
PATIENCE = 1.1
MOST_SPARES = 1024


class RingKind(StrEnum):
    RAY = "ray"  # one Ray actor a stage
    LOCAL = "local"  # threads in this process
    FAKE = "fake"  # no model: for client authors


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Numerics(StrEnum):
    AUTO = "auto"
    EXACT = "exact"
    FAST = "fast"


class Dtype(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True, slots=True)
class GrpcSettings:
    """Where and how the gRPC server listens. Raises InvalidSetting."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one
    guarded: bool = False  # strangers are kept out: SafetySettings.keeps_strangers_out
    insecure: bool = False  # allows a host that others can reach all the same
    reflection: bool = True
    max_message_bytes: int = LONGEST_REQUEST
    # Seconds that running turns get to end when the server stops.
    drain_s: float = 30.0
    # A peer that fell silent (a pulled cable) is pinged after so many seconds, and given up after so many more;
    # gRPC's default is hours.
    keepalive_s: float = 30.0
    keepalive_timeout_s: float = 20.0
    # Calls at once; gRPC itself refuses more before it reads them. Each may bring a message of that size.
    max_calls: int = 800
    # Seconds that an answer may lie unread: SchedulerSettings.unread_s.
    unread_s: float = UNREAD_S

    def __post_init__(self) -> None:
        _check_listening(self, "grpc_port")
        if self.max_calls < 1:
            raise InvalidSetting("max_calls", f"must be at least 1, got {self.max_calls}")
        for name in ("keepalive_s", "keepalive_timeout_s", "unread_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidSetting(name, f"must be greater than 0, got {value}")


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Where and how the HTTP server listens. Raises InvalidSetting."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one
    guarded: bool = False  # as in GrpcSettings
    insecure: bool = False
    max_body_bytes: int = LONGEST_REQUEST
    # Seconds that running requests get to end when the server stops.
    drain_s: float = 30.0
    # More are answered with 503. A process often may have no more than 1,024 open files, and Ray wants some.
    max_connections: int = 800
    # Seconds from a request's first byte to its last: 16 MiB at 1 Mbit/s take 134.
    request_s: float = 180.0
    # Seconds that an answer may lie unread once its connection's buffers are full: SchedulerSettings.unread_s.
    unread_s: float = UNREAD_S

    def __post_init__(self) -> None:
        _check_listening(self, "http_port")
        if self.max_connections < 1:
            raise InvalidSetting(
                "max_connections", f"must be at least 1, got {self.max_connections}"
            )
        for name in ("request_s", "unread_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidSetting(name, f"must be greater than 0, got {value}")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """One process: a model, its rings and its front. Raises InvalidSetting."""

    model: str
    ring: RingKind = RingKind.RAY
    stages: int = 2
    rings: int = 1
    lanes: int = 4
    max_rows: int | None = None  # None: what the model and the memory allow
    device: Device = Device.AUTO
    dtype: Dtype = Dtype.AUTO
    numerics: Numerics = Numerics.AUTO
    served_name: str | None = None  # None: the model folder's name
    ray_address: str | None = None  # HOST:PORT; None: a Ray of our own on this machine
    spread: bool = False  # a node of the cluster for each stage of a ring
    detached: bool = False  # the rings outlive this process, for the next one to go on with
    draft_model: str | None = None  # None: only what stood in the context before is drafted
    # Of each stage, for rows that have left their lanes; None: a quarter of what the host has, shared by its stages.
    kv_host_bytes: int | None = None
    # A folder that keeps them over a restart; each ring has one of its own in it.
    kv_disk: Path | None = None
    kv_disk_bytes: int = KV_DISK_BYTES  # of each stage
    # Another stage keeps a copy of what each has in host memory, and gives it to whatever takes its place.
    mirror: bool = False
    # Of each ring: loaded processes that wait to take a lost stage's place.
    spares: int = 0
    # Seconds between the probes of a stage's process, and without an answer until it counts as lost.
    probe_s: float = 1.0
    probe_timeout_s: float = 5.0
    # Seconds that a stage may load without any progress.
    load_timeout_s: float = 300.0
    # Bytes of requests that are held at once, by all fronts together.
    request_bytes: int = MOST_BYTES
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    grpc: GrpcSettings = field(default_factory=GrpcSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    safety: SafetySettings = field(default_factory=SafetySettings)
    observe: ObserveSettings = field(default_factory=ObserveSettings)

    def __post_init__(self) -> None:
        for name, most in (("stages", 1024), ("rings", 1024), ("lanes", 65536)):
            size = getattr(self, name)
            if size < 1:
                raise InvalidSetting(name, f"must be at least 1, got {size}")
            if size > most:
                raise InvalidSetting(name, f"must be at most {most}, got {size}")
        if self.max_rows is not None and self.max_rows < 2:
            raise InvalidSetting("max_rows", f"must be at least 2, got {self.max_rows}")
        if not self.model:
            raise InvalidSetting("model", "is empty")
        longest = max(self.grpc.max_message_bytes, self.http.max_body_bytes)
        if self.request_bytes < longest:
            told = f"must be at least {longest}, the longest request, got {self.request_bytes}"
            raise InvalidSetting("request_bytes", told)
        if self.draft_model is not None and self.ring is RingKind.FAKE:
            raise InvalidSetting("draft_model", "a fake ring has no vocabulary to share")
        if self.ray_address is not None:
            check_ray_address(self.ray_address)
        if self.detached and (self.ring is not RingKind.RAY or self.ray_address is None):
            raise InvalidSetting(
                "detached",
                "needs --ring ray and --ray-address: a Ray of our own ends with this process; "
                "start one with `ray start --head`",
            )
        if (self.grpc.guarded or self.http.guarded) and not self.safety.keeps_strangers_out:
            raise InvalidSetting("host", "no key and no authority of clients keeps strangers out")
        self._check_store()
        self._check_waits()

    @property
    def is_readable_by_others(self) -> bool:
        """What clients send and get crosses a network, and nothing hides it there."""
        hosts = (self.grpc.host, self.http.host)
        return self.safety.tls is None and not all(map(_is_loopback, hosts))

    def _check_store(self) -> None:
        if self.kv_host_bytes is not None and self.kv_host_bytes < 0:
            raise InvalidSetting("kv_host_bytes", f"must not be negative, got {self.kv_host_bytes}")
        if self.kv_disk_bytes < 1:
            raise InvalidSetting("kv_disk_bytes", f"must be at least 1, got {self.kv_disk_bytes}")
        if self.kv_disk is not None and self.kv_host_bytes == 0:
            raise InvalidSetting("kv_disk", "rows get there from host memory; kv_host_bytes is 0")
        if self.kv_disk is not None and self.ring is RingKind.FAKE:
            raise InvalidSetting("kv_disk", "a fake ring has no rows to keep")
        if self.mirror:
            self._check_mirror()

    def _check_mirror(self) -> None:
        if self.ring is not RingKind.RAY:
            raise InvalidSetting("mirror", "needs --ring ray: other rings' stages end together")
        if self.stages < 2:
            raise InvalidSetting("mirror", "needs another stage to keep the copy")
        if self.kv_host_bytes == 0:
            raise InvalidSetting("mirror", "copies what lies in host memory; kv_host_bytes is 0")

    def _check_waits(self) -> None:
        for name in ("probe_s", "probe_timeout_s", "load_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidSetting(name, f"must be greater than 0, got {value}")
        if not 0 <= self.spares <= MOST_SPARES:
            raise InvalidSetting("spare", f"must be between 0 and {MOST_SPARES}, got {self.spares}")
        if self.spares and self.ring is not RingKind.RAY:
            raise InvalidSetting("spare", f"a {self.ring} ring has no processes to spare")


def _check_listening(settings: GrpcSettings | HttpSettings, port: str) -> None:
    """What is the same of every front. `port`: the name of its flag."""
    if not 0 <= settings.port <= 65535:
        raise InvalidSetting(port, f"must be between 0 and 65535, got {settings.port}")
    if not (math.isfinite(settings.drain_s) and settings.drain_s >= 0):
        raise InvalidSetting("drain_s", f"must not be negative, got {settings.drain_s}")
    if not (settings.guarded or settings.insecure or _is_loopback(settings.host)):
        told = (
            f"{settings.host} can be reached by others; give --api-key-file or --tls-client-ca, "
            "or say --insecure to serve everybody"
        )
        raise InvalidSetting("host", told)


def check_ray_address(address: str) -> None:
    """Not auto, which may mean a Ray that has ended; nor a client's ray://, a proxy that no frame passes through.
    Raises InvalidSetting.
    """
    host, _, port = address.rpartition(":")
    at_a_port = port.isascii() and port.isdigit() and 0 < int(port) <= 65535
    if not (host and "/" not in host and at_a_port):
        told = f"must be HOST:PORT as for ray start --address, got {address!r}"
        raise InvalidSetting("ray_address", told)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
