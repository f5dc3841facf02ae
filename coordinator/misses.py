"""Why a turn reused less than its session's last length.

Remembers, for each session, the tokens whose rows lay in its lane when its last turn ended. A reason is for the
reader; nothing is decided by it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.frames import NO_ROOT, Epoch, NodeId
from coordinator.prefixes import common_prefix
from coordinator.requests import Miss, MissKind, Request, SessionId

# Of all sessions together, 4 bytes each: 128 MB.
_MOST_TOKENS = 32 * 2**20
# Of one session: its conversation and a few kinds of side calls.
_MOST_BRANCHES = 4
# Fewer rows are computed sooner than they are copied or brought back (SchedulerSettings.min_copy_rows): that these few
# were not reused is no news where the prompt goes another way behind them.
_LEAST_ROWS = 16


@dataclass(frozen=True, slots=True)
class _Past:
    tokens: array[int]
    epoch: Epoch
    root: NodeId


class SessionPasts:
    """What each session's last turn left, in each of its branches; the session whose turn ended longest ago is
    forgotten first.
    """

    def __init__(self, limit: int, most_tokens: int = _MOST_TOKENS) -> None:
        self._limit = limit
        self._room = most_tokens
        self._pasts: OrderedDict[SessionId, tuple[_Past, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pasts)

    def ended(
        self, session: SessionId, tokens: Sequence[int], epoch: Epoch, root: NodeId = NO_ROOT
    ) -> None:
        others = [
            past
            for past in self._pasts.get(session, ())
            if past.root == root and not _goes_on(tokens, past)
        ]
        self.forget(session)
        pasts = (_Past(array("i", tokens), epoch, root), *others)[:_MOST_BRANCHES]
        self._pasts[session] = pasts
        self._room -= _count(pasts)
        while len(self._pasts) > self._limit or (self._room < 0 and len(self._pasts) > 1):
            self.forget(next(iter(self._pasts)))

    def forget(self, session: SessionId) -> None:
        self._room += _count(self._pasts.pop(session, ()))

    def miss(
        self,
        request: Request,
        *,
        cached_prefix: int,
        epoch: Epoch,
        root: NodeId = NO_ROOT,
        held: int = 0,
    ) -> Miss | None:
        """None: everything that the session's last turn left was reused, or nothing was promised.

        `held`: rows of the prompt under its root that lie in some lane, whether or not they can be gone on from.
        What is of another root is never spoken of.
        """
        if request.session is None:
            return None
        if request.moved:
            return Miss(MissKind.RING_LOST)
        pasts = [past for past in self._pasts.get(request.session, ()) if past.root == root]
        if not pasts:
            return Miss(MissKind.NEW_SESSION)
        last = len(request.prompt) - 1
        depths = [common_prefix(past.tokens, request.prompt) for past in pasts]
        shared = min(max(depths), last)
        past = pasts[depths.index(max(depths))]
        if cached_prefix >= min(len(past.tokens), last):
            return None
        leaves = shared < min(len(past.tokens), last)
        if cached_prefix < shared - (_LEAST_ROWS if leaves else 0):
            if past.epoch != epoch:
                return Miss(MissKind.RING_LOST)
            return Miss(MissKind.NO_CHECKPOINT if held >= shared else MissKind.EVICTED)
        return Miss(MissKind.DIVERGED, shared, _message_of(request.boundaries, shared))


def _goes_on(tokens: Sequence[int], past: _Past) -> bool:
    """Whether most of what the past had is there again: the same branch, if perhaps with another end."""
    return 2 * common_prefix(past.tokens, tokens) >= len(past.tokens)


def _count(pasts: Iterable[_Past]) -> int:
    return sum(len(past.tokens) for past in pasts)


def _message_of(boundaries: tuple[int, ...], row: int) -> int | None:
    """The index of the chat message that a prompt row lies in."""
    message = bisect_right(boundaries, row) - 1
    return message if message >= 0 else None
