"""Who drives a stage: one gateway at a time, for as long as it shows that it lives.

Each stage holds a lease of its own. Decides who gets it and when another one may; gateways take a ring's leases stage
by stage, in order, all or none, so of two that want a ring the first stage picks one. A lease says nothing of frames:
whoever gets it has the stages rest and opens a later epoch than any of them has seen, which makes frames of all
earlier ones void. Pure: the clock comes in, and nobody is asked or waited for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Served:
    """Where a gateway serves."""

    grpc: str = ""
    http: str = ""


@dataclass(frozen=True, slots=True)
class Owner:
    """A gateway, for as long as its process lives."""

    id: str
    host: str
    pid: int
    space: str = ""  # where `pid` means its process: processes.process_space()
    grpc: str = ""  # where it serves
    http: str = ""
    role: str = "a gateway"

    def __str__(self) -> str:
        serves = f" that serves at {self.grpc}" if self.grpc else ""
        return f"{self.role}{serves} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Tenure:
    """A lease that somebody has, as it was when it was asked for."""

    owner: Owner
    left_s: float  # until another one may take it
    renewals: int  # since its owner got it: more of them later tell that he lives

    def lives_on(self, later: Tenure) -> bool:
        """Whether its owner, or another one, has been heard of in between. Of the same stage: each counts its own."""
        return later.owner.id != self.owner.id or later.renewals > self.renewals


class Lease:
    """One stage's. Used under its owner's lock."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._owner: Owner | None = None
        self._until = 0.0
        self._renewals = 0

    def claim(self, owner: Owner, now: float, ended: str = "") -> Tenure | None:
        """None: it is the owner's from now on. Else whose it is. `ended`: an owner whose process is known to be gone;
        he is not waited for.
        """
        tenure = self.tenure(now)
        if tenure is not None and tenure.owner.id not in (owner.id, ended):
            return tenure
        if self.is_of(owner.id):
            self.renew(owner.id, now)
        else:
            self._owner, self._until, self._renewals = owner, now + self._lease_s, 0
        return None

    def renew(self, owner: str, now: float) -> bool:
        """False: somebody else has taken it, or nobody has it. One that has run out is renewed all the same."""
        if not self.is_of(owner):
            return False
        self._until = now + self._lease_s
        self._renewals += 1
        return True

    def release(self, owner: str) -> None:
        """Anybody may take it at once; nothing happens unless it is the owner's."""
        if self.is_of(owner):
            self._owner = None

    def is_of(self, owner: str) -> bool:
        """Whether what he asks is done. That his time is over does not matter as long as nobody else came."""
        return self._owner is not None and self._owner.id == owner

    def tenure(self, now: float) -> Tenure | None:
        """None: whoever comes first may have it."""
        if self._owner is None or now >= self._until:
            return None
        return Tenure(self._owner, self._until - now, self._renewals)

    def has_run_out(self, now: float) -> bool:
        """Its owner has not been heard of for too long; nobody has come in his place."""
        return self._owner is not None and now >= self._until


class Leased(Protocol):
    """A stage that may be on another host."""

    def claim(self, owner: Owner, ended: str) -> Awaitable[Tenure | None]: ...

    def release(self, owner: str) -> Awaitable[None]: ...


@dataclass(frozen=True, slots=True)
class Refused:
    """The first stage that is another owner's."""

    stage: int
    tenure: Tenure


async def claim_all(stages: Sequence[Leased], owner: Owner, ended: str = "") -> Refused | None:
    """None: all are the owner's. Else he has none of them.

    In order, never at once: of two that come at the same time each would get some.
    """
    for number, stage in enumerate(stages):
        held = await stage.claim(owner, ended)
        if held is not None:
            for each in reversed(stages[:number]):
                await each.release(owner.id)
            return Refused(number, held)
    return None
