"""API keys: where they are read from, how a key that is shown is compared, and who its owner is to the rest.

Decides what counts as a key and whose it is; which header it comes in is guard.py's. No plain key is kept
behind this file's functions, and neither messages nor representations show one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.errors import InvalidApiKey, InvalidSetting

_LONGEST_KEY = 1024
# No slash: what is a caller's own is named with one behind his name.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_KEY = re.compile(rf"[!-+\--~]{{1,{_LONGEST_KEY}}}")  # visible ASCII but the comma
_COMMENT = "#"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who shows a key. `tenant` as in coordinator.requests.Request: empty where keys are not isolated."""

    name: str
    tenant: str = ""


NOBODY = Caller("")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is known of a key: its digest, from which it cannot be had again."""

    name: str
    digest: bytes = field(repr=False)


class Keyring:
    """Raises InvalidSetting for two keys of one name: their sessions would be one another's."""

    def __init__(self, keys: Iterable[ApiKey], *, isolate: bool = False) -> None:
        self._keys = tuple(dict.fromkeys(keys))
        if not self._keys:
            raise InvalidSetting("api_key", "no key was given")
        names = [key.name for key in self._keys]
        digests = [key.digest for key in self._keys]
        for name in names:
            if names.count(name) > 1:
                raise InvalidSetting("api_key", f"two keys are named {name}")
        if len(set(digests)) < len(digests):
            raise InvalidSetting("api_key", "one key has two names")
        self._callers = tuple(
            Caller(key.name, tenant_of(key) if isolate else "") for key in self._keys
        )

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(key.name for key in self._keys)

    def __repr__(self) -> str:
        return f"Keyring({len(self)} keys)"

    def find(self, key: str) -> Caller | None:
        """Whose key it is. Compares with every key to its end, so that the time tells nothing of any."""
        shown, found = _digest(key), None
        for known, caller in zip(self._keys, self._callers, strict=True):
            if hmac.compare_digest(known.digest, shown):
                found = caller
        return found

    def caller(self, key: str | None) -> Caller:
        """Raises InvalidApiKey."""
        found = self.find(key) if key else None
        if found is None:
            raise InvalidApiKey(given=bool(key))
        return found


def open_keyring(
    keys: Sequence[str] = (), file: Path | None = None, *, isolate: bool = False
) -> Keyring | None:
    """The keys of both; each is `KEY` or `NAME KEY`. None where neither was given. Raises InvalidSetting."""
    if not keys and file is None:
        return None
    known = [_parsed(entry, "api_key", "a key") for entry in keys]
    if file is not None:
        known.extend(_read(file))
    return Keyring(known, isolate=isolate)


def split_keys(text: str) -> tuple[str, ...]:
    """The entries of an environment's value, which commas part."""
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


def tenant_of(key: ApiKey) -> str:
    """The same for a key as long as it lives, so that rows on disk stay its own; a digest of the digest."""
    return hashlib.blake2b(key.digest, digest_size=16, person=b"tenant").hexdigest()


def _read(file: Path) -> Iterator[ApiKey]:
    """A key a line; what is behind a # is a comment."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InvalidSetting("api_key_file", f"{file} cannot be read: {why}") from None
    found = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith(_COMMENT):
            found = True
            yield _parsed(line, "api_key_file", f"line {number} of {file}")
    if not found:
        raise InvalidSetting("api_key_file", f"{file} holds no key")


def _parsed(entry: str, setting: str, place: str) -> ApiKey:
    """Raises InvalidSetting, which shows nothing of the entry: a name may be half of a key."""
    words = entry.split()
    if not 1 <= len(words) <= 2:
        raise InvalidSetting(setting, f"{place} is neither KEY nor NAME KEY")
    key = words[-1]
    if not _KEY.fullmatch(key):
        told = f"{place} has other characters than visible ASCII, or over {_LONGEST_KEY}"
        raise InvalidSetting(setting, told)
    digest = _digest(key)
    name = words[0] if len(words) == 2 else _name_of(digest)
    if not _NAME.fullmatch(name):
        raise InvalidSetting(setting, f"the name on {place} must be letters, digits and ._@-")
    return ApiKey(name, digest)


def _digest(key: str) -> bytes:
    raw = key.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(raw, digest_size=32, person=b"api key").digest()


def _name_of(digest: bytes) -> str:
    """Of a key without a name, for logs and counts."""
    return "key-" + hashlib.blake2b(digest, digest_size=4, person=b"name").hexdigest()
