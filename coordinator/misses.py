"""Why a turn reused less than its session's last length.

Remembers, for each session, the tokens whose rows lay in its lane when its last turn ended. A reason is for the
reader; nothing is decided by it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.frames import Epoch
from coordinator.prefixes import common_prefix
from coordinator.requests import Miss, MissKind, Request, SessionId

# Of all sessions together, 4 bytes each: 128 MB.
_MOST_TOKENS = 32 * 2**20


@dataclass(frozen=True, slots=True)
class _Past:
    tokens: array[int]
    epoch: Epoch


class SessionPasts:
    """What each session's last turn left; the one that ended longest ago is forgotten first."""

    def __init__(self, limit: int, most_tokens: int = _MOST_TOKENS) -> None:
        self._limit = limit
        self._room = most_tokens
        self._pasts: OrderedDict[SessionId, _Past] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pasts)

    def ended(self, session: SessionId, tokens: Sequence[int], epoch: Epoch) -> None:
        self.forget(session)
        self._pasts[session] = _Past(array("i", tokens), epoch)
        self._room -= len(tokens)
        while len(self._pasts) > self._limit or (self._room < 0 and len(self._pasts) > 1):
            self.forget(next(iter(self._pasts)))

    def forget(self, session: SessionId) -> None:
        past = self._pasts.pop(session, None)
        self._room += len(past.tokens) if past is not None else 0

    def miss(
        self, request: Request, *, cached_prefix: int, epoch: Epoch, held: int = 0
    ) -> Miss | None:
        """None: everything that the session's last turn left was reused, or nothing was promised.

        `held`: rows of the prompt that lie in some lane, whether or not they can be gone on from.
        """
        if request.session is None:
            return None
        past = self._pasts.get(request.session)
        if request.moved:
            return Miss(MissKind.RING_LOST)
        if past is None:
            return Miss(MissKind.NEW_SESSION)
        last = len(request.prompt) - 1
        if cached_prefix >= min(len(past.tokens), last):
            return None
        shared = min(common_prefix(past.tokens, request.prompt), last)
        if cached_prefix < shared:
            if past.epoch != epoch:
                return Miss(MissKind.RING_LOST)
            return Miss(MissKind.NO_CHECKPOINT if held >= shared else MissKind.EVICTED)
        return Miss(MissKind.DIVERGED, shared, _message_of(request.boundaries, shared))


def _message_of(boundaries: tuple[int, ...], row: int) -> int | None:
    """The index of the chat message that a prompt row lies in."""
    message = bisect_right(boundaries, row) - 1
    return message if message >= 0 else None
