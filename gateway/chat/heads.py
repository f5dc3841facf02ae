"""Where tools and system prompt end in a rendered conversation: found from the template itself, by trying.

What two conversations render alike that share nothing but their head is the head. It is cut in front of the special
token that begins the next message, where there is one. The answer is a token count of the prompt at hand, and a hint
for pinning: whatever a template does, it is at worst 0, and never an error.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from os.path import commonprefix

from coordinator.errors import InvalidValue
from coordinator.prefixes import common_prefix
from gateway.chat.boundaries import AddedTokens
from gateway.chat.messages import Message, Tool

Args = Mapping[str, object]
# Without a generation prompt. Raises InvalidValue.
RenderHead = Callable[[Sequence[Message], Sequence[Tool], Args], str]

# Characters that a template puts between a message's opening token and its text, at most: 41 in Llama 3's.
_LONGEST_FRAME = 64
# A shorter head is computed sooner than it is brought back (SchedulerSettings.min_copy_rows).
_LEAST_TOKENS = 16
# Of all heads that are remembered, 4 bytes each; an entry by itself counts as much as some of them.
_MOST_TOKENS = 4 * 2**20
_TOKENS_OF_AN_ENTRY = 64

# They begin differently, and one goes on: a head does not depend on what is said or on how much.
_SHORT = (Message("user", "Alpha"),)
_LONG = (Message("user", "0"), Message("assistant", "beta"), Message("user", "Gamma"))


def leading(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages that belong to the head."""
    return tuple(takewhile(lambda message: message.role in ("system", "developer"), messages))


class Heads:
    """One template's heads; those seen last are remembered, so that a conversation is tried out once. Thread-safe."""

    def __init__(
        self,
        render: RenderHead,
        encode: Callable[[str], Sequence[int]],
        added: AddedTokens,
        openers: frozenset[int],
    ) -> None:
        self._render = render
        self._encode = encode
        self._added = added
        self._openers = openers
        self._known = _Remembered(_MOST_TOKENS)

    def anchor(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        args: Args,
        text: str,
        ids: Sequence[int],
    ) -> int:
        """How many of the ids are the head's, of a conversation that renders to `text`. 0: there is none."""
        lead = leading(messages)
        if not (lead or tools):
            return 0
        key = _digest(lead, tools, args)
        known = self._known.get(key)
        # What comes in front of it may have changed, such as the date.
        if known is None or common_prefix(known, ids[: len(known)]) < len(known):
            known = array("i", ids[: self._measured(lead, tools, args, text, ids)])
            self._known.put(key, known)
        return len(known)

    def tokens(
        self, messages: Sequence[Message], tools: Sequence[Tool], args: Args
    ) -> tuple[int, ...]:
        """The ids that each conversation with this head begins with. Raises InvalidValue."""
        lead = leading(messages)
        text = self._render((*lead, *_SHORT), tools, args)
        ids = self._encode(text)
        return tuple(ids[: self._cut(self._text(lead, tools, args, text), ids)])

    def _measured(
        self,
        lead: tuple[Message, ...],
        tools: Sequence[Tool],
        args: Args,
        text: str,
        ids: Sequence[int],
    ) -> int:
        try:
            count = self._cut(self._text(lead, tools, args, text), ids)
        except InvalidValue:
            return 0
        return count if count >= _LEAST_TOKENS else 0

    def _text(self, lead: tuple[Message, ...], tools: Sequence[Tool], args: Args, text: str) -> str:
        """What the conversation's text shares with every other one of this head. Raises InvalidValue."""
        tried = [self._render((*lead, *_SHORT), tools, args)]
        try:
            tried.append(self._render((*lead, *_LONG), tools, args))
        except InvalidValue:  # answers that nobody asked it for; one user message must do
            tried.append(self._render((*lead, *_LONG[:1]), tools, args))
        return commonprefix([text, *tried])

    def _cut(self, head: str, ids: Sequence[int]) -> int:
        """Where in the ids the head ends. Raises InvalidValue."""
        places = [at for at, token in self._added.places(head) if token in self._openers]
        if places and len(head) - places[-1] <= _LONGEST_FRAME:
            # As many as there are in the text are in the ids, which were encoded from it.
            opened = [index for index, token in enumerate(ids) if token in self._openers]
            return opened[len(places) - 1] if len(opened) >= len(places) else 0
        # A token that reaches over the end of the head does not count.
        return common_prefix(self._encode(head), ids)


class _Remembered:
    """The heads' ids by a digest of what they are made of; the one used longest ago goes first."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._heads: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> array[int] | None:
        with self._lock:
            if key in self._heads:
                self._heads.move_to_end(key)
            return self._heads.get(key)

    def put(self, key: bytes, ids: array[int]) -> None:
        with self._lock:
            self._forget(key)
            self._heads[key] = ids
            self._room -= len(ids) + _TOKENS_OF_AN_ENTRY
            while self._room < 0:
                self._forget(next(iter(self._heads)))

    def _forget(self, key: bytes) -> None:
        gone = self._heads.pop(key, None)
        self._room += 0 if gone is None else len(gone) + _TOKENS_OF_AN_ENTRY


def _digest(lead: tuple[Message, ...], tools: Sequence[Tool], args: Args) -> bytes:
    """A clash would cost a short head, no token: the ids are compared as well."""
    said = repr((lead, tuple(tools), dict(args)))
    return hashlib.blake2b(said.encode(), digest_size=16).digest()
