"""The door of both fronts: which keys a client shows, whose they are, and what is theirs alone.

Knows headers' names and no wire. How keys are compared is keys.py's. Without keys everybody is one caller
without a name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.errors import InvalidApiKey, InvalidSetting, NotAnOperator
from coordinator.requests import SessionId
from gateway.safety.keys import NOBODY, Caller, Keyring, open_keyring, split_keys
from gateway.safety.settings import SafetySettings
from gateway.safety.tls import ServerTls, open_tls

# As clients of OpenAI, of Anthropic and of Azure name it.
_KEY_HEADERS = ("x-api-key", "api-key")
# A client has one, or the same in two headers.
_MOST_KEYS = 4


@dataclass(frozen=True, slots=True)
class Guard:
    """`keyring` None: no key is asked for."""

    keyring: Keyring | None = None
    tls: ServerTls | None = None
    operators: frozenset[str] | None = None  # names of their keys; None: everybody is one

    def caller(self, headers: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Whose key is among the headers, whose names are in lower case. Raises InvalidApiKey."""
        if self.keyring is None:
            return NOBODY
        shown = _shown_keys(headers)
        for key in shown[:_MOST_KEYS]:
            caller = self.keyring.find(key)
            if caller is not None:
                return caller
        raise InvalidApiKey(given=bool(shown))

    def operator(self, headers: Iterable[tuple[str, str | bytes]]) -> Caller:
        """The same of who may change what the rings are and keep. Raises NotAnOperator too."""
        caller = self.caller(headers)
        if self.operators is not None and caller.name not in self.operators:
            raise NotAnOperator
        return caller


OPEN = Guard()


def open_guard(settings: SafetySettings) -> Guard:
    """Reads the files. Raises InvalidSetting."""
    keys = split_keys(settings.api_keys or "")
    keyring = open_keyring(keys, settings.api_key_file, isolate=settings.isolate_keys)
    tls = None if settings.tls is None else open_tls(settings.tls)
    return Guard(keyring, tls, _operators(settings, keyring))


def _operators(settings: SafetySettings, keyring: Keyring | None) -> frozenset[str] | None:
    if settings.operators is None or keyring is None:
        return None
    named = frozenset(split_keys(settings.operators))
    if unknown := sorted(named - keyring.names):
        raise InvalidSetting("operators", f"no key is named {unknown[0]}")
    return named


def session_of(caller: str, name: str | None) -> SessionId | None:
    """What a session is called behind the door: two callers' are never the same."""
    if not name:
        return None
    return SessionId(f"{caller}/{name}" if caller else name)


def _shown_keys(headers: Iterable[tuple[str, str | bytes]]) -> list[str]:
    shown = []
    for name, value in headers:
        if isinstance(value, bytes):
            continue
        if name == "authorization":
            shown.append(_borne(value))
        elif name in _KEY_HEADERS:
            shown.append(value.strip())
    return [key for key in shown if key]


def _borne(value: str) -> str:
    scheme, _, key = value.strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
