"""Why a turn reused less than its session's last length.

Remembers, for each session, how many rows held its tokens when its last turn ended. A reason is for
the reader; nothing is decided by it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass

from coordinator.frames import Epoch
from coordinator.requests import Miss, MissKind, Request, SessionId


@dataclass(frozen=True, slots=True)
class _Length:
    rows: int
    epoch: Epoch


class SessionLengths:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lengths: OrderedDict[SessionId, _Length] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lengths)

    def ended(self, session: SessionId, rows: int, epoch: Epoch) -> None:
        self._lengths[session] = _Length(rows, epoch)
        self._lengths.move_to_end(session)
        while len(self._lengths) > self._limit:
            self._lengths.popitem(last=False)

    def forget(self, session: SessionId) -> None:
        self._lengths.pop(session, None)

    def miss(
        self, request: Request, *, cached_prefix: int, epoch: Epoch, has_lane: bool
    ) -> Miss | None:
        """`has_lane`: a lane still holds rows of the request's session. None: everything was
        reused.
        """
        if request.session is None:
            return None  # nothing was promised
        known = self._lengths.get(request.session)
        if request.moved:
            return Miss(MissKind.RING_LOST)
        if known is None:
            return Miss(MissKind.NEW_SESSION)
        if cached_prefix >= min(known.rows, len(request.prompt) - 1):
            return None
        if known.epoch != epoch:
            return Miss(MissKind.RING_LOST)
        if not has_lane:
            return Miss(MissKind.EVICTED)
        return Miss(
            MissKind.DIVERGED, cached_prefix, _message_of(request.boundaries, cached_prefix)
        )


def _message_of(boundaries: tuple[int, ...], row: int) -> int | None:
    """The index of the chat message that a prompt row lies in."""
    message = bisect_right(boundaries, row) - 1
    return message if message >= 0 else None
