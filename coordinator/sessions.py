"""Sessions: the turns of one client conversation, their token history and the ring they are pinned
to.

Decides which token ids a follow-up prompt gets (token-stable history) and what is forgotten first.
It knows nothing of validity: rows are the ledger's business, and a wrong pin costs time, never a
token.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from coordinator.requests import SessionId

# Of all sessions together: some 400 of 32,768 tokens each.
HISTORY_BYTES = 256 * 2**20
# Side calls come in few kinds: what a conversation is about, whether there is quota, what a page says.
_MOST_BRANCHES = 4
_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class History:
    """A session's last turn: `token_ids` are prompt + generated, `text` what they render to,
    specials included. `others`: the last turns of its other branches, such as the conversation that
    a side call came in between of; the latest first.
    """

    text: str
    token_ids: tuple[int, ...]
    others: tuple[History, ...] = ()
    # The text's length behind each id, where the last ids may be nobody's: drafts that failed lie in a lane, too.
    ends: tuple[int, ...] = ()

    def branches(self) -> Iterator[History]:
        yield self
        yield from self.others


def gone_on(history: History | None, text: str) -> History | None:
    """The branch that the text goes on from; of several the longest."""
    if history is None:
        return None
    fitting = [each for each in history.branches() if each.token_ids and text.startswith(each.text)]
    return max(fitting, key=lambda each: len(each.text), default=None)


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
    begun = gone_on(history, text)
    if begun is not None:
        rest = tuple(encode(text[len(begun.text) :]))
        if not rest or is_special(begun.token_ids[-1]) or is_special(rest[0]):
            return begun.token_ids + rest
    return tuple(encode(text))


@dataclass(frozen=True, slots=True)
class _Session:
    ring: str | None = None
    history: History | None = None


class SessionTable:
    """Remembers at most `limit` sessions; the one that was used longest ago is forgotten first.

    Histories have a bound in bytes as well: beyond it the oldest go, and their sessions keep their
    rings.
    """

    def __init__(self, limit: int, history_bytes: int = HISTORY_BYTES) -> None:
        self._limit = limit
        self._room = history_bytes
        self._sizes: OrderedDict[SessionId, int] = OrderedDict()  # of those that have a history
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
        """The session's last turn; what it did not go on from stays beside it as other branches."""
        self._forget_size(session)
        entry = self._sessions.get(session, _Session())
        history = _beside(history, entry.history)
        self._put(session, replace(entry, history=history))
        self._sizes[session] = _bytes_of(history)
        self._room -= self._sizes[session]
        while self._room < 0:
            oldest = next(iter(self._sizes))
            self._forget_size(oldest)
            self._sessions[oldest] = replace(self._sessions[oldest], history=None)

    def forget(self, session: SessionId) -> bool:
        self._forget_size(session)
        return self._sessions.pop(session, None) is not None

    def _put(self, session: SessionId, entry: _Session) -> None:
        self._sessions[session] = entry
        self._sessions.move_to_end(session)
        while len(self._sessions) > self._limit:
            oldest, _ = self._sessions.popitem(last=False)
            self._forget_size(oldest)

    def _forget_size(self, session: SessionId) -> None:
        self._room += self._sizes.pop(session, 0)


def _beside(history: History, known: History | None) -> History:
    if known is None:
        return history
    left = (
        replace(each, others=())
        for each in known.branches()
        if not history.text.startswith(each.text)
    )
    return replace(history, others=tuple(left)[: _MOST_BRANCHES - 1])


def _bytes_of(history: History) -> int:
    """Ids are mostly shared small objects: their references count."""
    return sum(
        _ID_BYTES * len(each.token_ids) + sys.getsizeof(each.text) for each in history.branches()
    )
