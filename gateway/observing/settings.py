"""What an operator sees of a process, and how: metrics, log lines, traces.

Says what is wanted; compose.py beside it makes it. OpenTelemetry's own variables are read there, once, at the start.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from coordinator.errors import InvalidSetting

_PREFIX = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_ENDPOINT = re.compile(r"https?://[^\s/]+(/\S*)?")


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"  # an object a line


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ObserveSettings:
    """Raises InvalidSetting."""

    metrics_prefix: str = "ringserve:"
    log_format: LogFormat = LogFormat.TEXT
    # None: warnings, and with JSON, which no one reads while it comes, every turn as well
    log_level: LogLevel | None = None
    otlp_endpoint: str | None = (
        None  # where traces go; None: nowhere, unless OTEL_ variables say so
    )

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.metrics_prefix):
            told = f"must be letters, digits, _ and :, got {self.metrics_prefix!r}"
            raise InvalidSetting("metrics_prefix", told)
        if self.otlp_endpoint is not None and not _ENDPOINT.fullmatch(self.otlp_endpoint):
            told = f"must be http://HOST:PORT or https://HOST:PORT, got {self.otlp_endpoint!r}"
            raise InvalidSetting("otlp_endpoint", told)

    @property
    def level(self) -> LogLevel:
        if self.log_level is not None:
            return self.log_level
        return LogLevel.INFO if self.log_format is LogFormat.JSON else LogLevel.WARNING
