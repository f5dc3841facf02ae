"""Reads a JSON body as clients really send it: unknown fields are ignored, null is absent, a wrong value is named.

Decides types only; what a value means is for whoever asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from coordinator.errors import InvalidValue
from gateway.limits import at_most

# Nothing that fits a lane has as many. Reading millions of empty lists stops everybody else for seconds.
_MOST_BRACKETS = 1 << 20
_MOST_OBJECTS = 50_000  # in one list, before each is looked at


def parse(body: bytes) -> Fields:
    """Raises InvalidValue."""
    if len(body) > _MOST_BRACKETS:
        at_most("body", body.count(b"[") + body.count(b"{"), _MOST_BRACKETS, "brackets")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidValue("body", f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidValue("body", "is not a JSON object")
    return Fields(value)


class Fields:
    """One JSON object; `path` is where it lies in the body, for messages."""

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def text(self, name: str) -> str | None:
        value: str | None = self._typed(name, str, "a string")
        return value

    def flag(self, name: str) -> bool:
        return bool(self._typed(name, bool, "true or false"))

    def whole(self, name: str) -> int | None:
        value = self._number(name)
        if value is None or value == int(value):
            return None if value is None else int(value)
        raise InvalidValue(self.path(name), f"must be a whole number, got {value}")

    def number(self, name: str) -> float | None:
        value = self._number(name)
        return None if value is None else float(value)

    def _number(self, name: str) -> int | float | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidValue(self.path(name), "must be a number")
        if not abs(value) <= 2**64:  # nor NaN
            raise InvalidValue(self.path(name), "is too large")
        return value

    def object(self, name: str) -> Fields:
        """Empty where there is none."""
        value = self._typed(name, dict, "an object")
        return Fields({} if value is None else value, self.path(name))

    def plain_object(self, name: str) -> dict[str, Any]:
        return dict(self._typed(name, dict, "an object") or {})

    def objects(self, name: str) -> Iterator[Fields]:
        """The objects of a list."""
        values = self.list(name)
        at_most(self.path(name), len(values), _MOST_OBJECTS, "objects")
        for place, value in enumerate(values):
            path = f"{self.path(name)}[{place}]"
            if not isinstance(value, dict):
                raise InvalidValue(path, "must be an object")
            yield Fields(value, path)

    def list(self, name: str) -> list[Any]:
        return list(self._typed(name, list, "a list") or [])

    def texts(self, name: str) -> tuple[str, ...]:
        """A string, or a list of them."""
        value = self._values.get(name)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, str) for each in values):
            raise InvalidValue(self.path(name), "must be a string or a list of strings")
        return tuple(values)

    def _typed(self, name: str, kind: type, what: str) -> Any:
        value = self._values.get(name)
        if value is not None and not isinstance(value, kind):
            raise InvalidValue(self.path(name), f"must be {what}")
        return value
