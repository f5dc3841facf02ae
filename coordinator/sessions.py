"""Sessions: the turns of one client conversation, their token history and the ring they are pinned
to.

Decides which token ids a follow-up prompt gets (token-stable history) and what is forgotten first.
It knows nothing of validity: rows are the ledger's business, and a wrong pin costs time, never a
token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from coordinator.requests import SessionId


@dataclass(frozen=True, slots=True)
class History:
    """A session's last turn: `token_ids` are prompt + generated, `text` what they render to,
    specials included.
    """

    text: str
    token_ids: tuple[int, ...]


def splice(
    history: History | None,
    text: str,
    encode: Callable[[str], Sequence[int]],
    is_special: Callable[[int], bool],
) -> tuple[int, ...]:
    """The token ids of a rendered prompt, with the session's own ids where its text goes on from
    them.

    Text that was generated as ids A|B may tokenize as AB next turn, which would void every later
    row. The ids are spliced only where the seam is a special token: no tokenizer merges across one.
    `encode` must add no special tokens and no leading space of its own.
    """
    if history is not None and history.token_ids and text.startswith(history.text):
        rest = tuple(encode(text[len(history.text) :]))
        if not rest or is_special(history.token_ids[-1]) or is_special(rest[0]):
            return history.token_ids + rest
    return tuple(encode(text))


@dataclass(frozen=True, slots=True)
class _Session:
    ring: str | None = None
    history: History | None = None


class SessionTable:
    """Remembers at most `limit` sessions; the one that was used longest ago is forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: OrderedDict[SessionId, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: SessionId) -> bool:
        return session in self._sessions

    def ring(self, session: SessionId) -> str | None:
        return self._sessions.get(session, _Session()).ring

    def history(self, session: SessionId) -> History | None:
        return self._sessions.get(session, _Session()).history

    def pin(self, session: SessionId, ring: str) -> None:
        self._put(session, replace(self._sessions.get(session, _Session()), ring=ring))

    def remember(self, session: SessionId, history: History) -> None:
        self._put(session, replace(self._sessions.get(session, _Session()), history=history))

    def forget(self, session: SessionId) -> bool:
        return self._sessions.pop(session, None) is not None

    def _put(self, session: SessionId, entry: _Session) -> None:
        self._sessions[session] = entry
        self._sessions.move_to_end(session)
        while len(self._sessions) > self._limit:
            self._sessions.popitem(last=False)
