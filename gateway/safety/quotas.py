"""What each API key may use: so many jobs at once, so many tokens a minute.

Decides whether a caller's next job is let in, on a clock that it is given. It stops nothing that runs, keeps no queue
and knows no wire.

Tokens run into a bucket of one minute's worth that leaks at the same rate. A job is let in while there is room for one
more token; what it then uses is known only as it goes, so a bucket may overflow, and what is above its rim has to leak
before the next job: over any long time no key uses more than its rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from coordinator.clock import Clock
from coordinator.errors import InvalidSetting, RateLimited
from gateway.safety.keys import Caller

_MINUTE_S = 60.0
# Nobody knows when one of the caller's jobs ends.
_RETRY_JOBS_S = 1.0
# What sums of floats may be off, of a token; and a moment more, so that who waits as long as he is told is let in.
_SLACK = 1e-6
_MOMENT_S = 1e-3


@dataclass(frozen=True, slots=True)
class Limits:
    """Of each key; None: none. Raises InvalidSetting."""

    jobs: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        given = {"key_max_jobs": self.jobs, "key_tokens_per_minute": self.tokens_per_minute}
        for name, most in given.items():
            if most is not None and most < 1:
                raise InvalidSetting(name, f"must be at least 1, got {most}")


@dataclass(slots=True)
class _Account:
    jobs: int = 0
    level: float = 0.0  # tokens in the bucket at `at`
    at: float = 0.0


class Admitted:
    """A job that was let in."""

    def __init__(self, quotas: Quotas, name: str) -> None:
        self._quotas = quotas
        self._name = name

    def used(self, tokens: int) -> None:
        """Prompt tokens that were computed, or tokens that were generated, since the last time it was said."""
        self._quotas._charge(self._name, tokens)


class Quotas:
    """Of one server; called from one event loop. A caller is known by his name."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._accounts: dict[str, _Account] = {}  # one a key: as many as there are keys at most

    @property
    def most_jobs(self) -> int | None:
        """That a caller may have at once."""
        return self._limits.jobs

    @contextmanager
    def admit(self, caller: Caller) -> Iterator[Admitted]:
        """The job runs inside. Raises RateLimited before it begins, and then nothing was counted."""
        account = self._settled(caller.name)
        self._require_job(account)
        self._require_tokens(account)
        account.jobs += 1
        try:
            yield Admitted(self, caller.name)
        finally:
            account.jobs -= 1

    def _require_job(self, account: _Account) -> None:
        most = self._limits.jobs
        if most is not None and account.jobs >= most:
            raise RateLimited(what="turns at once", limit=most, retry_after_s=_RETRY_JOBS_S)

    def _require_tokens(self, account: _Account) -> None:
        most = self._limits.tokens_per_minute
        if most is None:
            return
        above = account.level - (most - 1)
        if above > _SLACK:
            wait_s = above * _MINUTE_S / most + _MOMENT_S
            raise RateLimited(what="tokens per minute", limit=most, retry_after_s=wait_s)

    def _charge(self, name: str, tokens: int) -> None:
        if tokens > 0:
            self._settled(name).level += tokens

    def _settled(self, name: str) -> _Account:
        """The caller's account, with what has leaked by now taken out."""
        now, rate = self._clock.now(), (self._limits.tokens_per_minute or 0) / _MINUTE_S
        account = self._accounts.setdefault(name, _Account(at=now))
        account.level = max(0.0, account.level - (now - account.at) * rate)
        account.at = now
        return account
