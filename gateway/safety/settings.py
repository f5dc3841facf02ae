"""What both fronts demand of whoever connects: keys, certificates, limits for each key.

Says what is demanded, and reads the files that say so once, before anything is loaded. How a key is compared is
gateway/safety/keys.py's, how much of it is left gateway/safety/quotas.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from coordinator.errors import InvalidSetting
from gateway.safety.keys import split_keys
from gateway.safety.quotas import Limits
from gateway.safety.tls import TlsSettings


@dataclass(frozen=True, slots=True)
class SafetySettings:
    """The same for both fronts. Raises InvalidSetting."""

    api_keys: str | None = field(default=None, repr=False)  # as access.split_keys takes them
    api_key_file: Path | None = None
    operators: str | None = None  # names of keys, with commas between; None: all of them
    isolate_keys: bool = False  # no key's rows are reused for another's
    key_max_jobs: int | None = None  # at once, of each key
    key_tokens_per_minute: int | None = None  # of each key
    tls: TlsSettings | None = None

    def __post_init__(self) -> None:
        # Nobody who meant to ask for keys is to serve everybody.
        if self.api_keys is not None and not split_keys(self.api_keys):
            raise InvalidSetting("api_key", "is empty")
        for name in ("key_max_jobs", "key_tokens_per_minute"):
            most = getattr(self, name)
            if most is not None and most < 1:
                raise InvalidSetting(name, f"must be at least 1, got {most}")
        for name in ("operators", "isolate_keys", "key_max_jobs", "key_tokens_per_minute"):
            if getattr(self, name) and not self.has_keys:
                raise InvalidSetting(name, "is about keys, and none was given")

    @property
    def limits(self) -> Limits:
        return Limits(self.key_max_jobs, self.key_tokens_per_minute)

    @property
    def has_keys(self) -> bool:
        return self.api_keys is not None or self.api_key_file is not None

    @property
    def keeps_strangers_out(self) -> bool:
        """Nobody gets an answer without a key, or a certificate of the clients' authority."""
        return self.has_keys or (self.tls is not None and self.tls.client_ca is not None)
