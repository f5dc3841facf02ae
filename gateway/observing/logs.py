"""Log lines, as text or JSON, on stderr: one event a line, whoever wrote it.

A record's `fields` attribute, a dataclass, becomes `name=value` pairs or members of the object. Nothing that a client
wrote is logged but its request id, which the fronts have cleaned.
"""

from __future__ import annotations

import json
import logging
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from gateway.observing.settings import LogFormat, ObserveSettings

# Others' news of their own lives; their warnings are ours as well.
_NOISY = ("uvicorn", "uvicorn.error", "uvicorn.access", "ray", "transformers", "huggingface_hub")


def log_to_stderr(settings: ObserveSettings) -> None:
    """For a process that serves; once, before anything else is done."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(settings.log_format))
    logging.basicConfig(level=settings.level.upper(), handlers=[handler])
    # A warning is a line like all others.
    logging.captureWarnings(True)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)


def formatter(kind: LogFormat) -> logging.Formatter:
    return JsonLines() if kind is LogFormat.JSON else TextLines()


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        known = ((name, value) for name, value in _fields(record).items() if value is not None)
        pairs = (f" {name}={value}" for name, value in known)
        return super().formatMessage(record) + "".join(pairs)


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # ASCII: a line break or half a surrogate pair in a message stays inside its string.
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    told = getattr(record, "fields", None)
    return {} if told is None else {each.name: getattr(told, each.name) for each in fields(told)}
