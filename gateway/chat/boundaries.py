"""Where each message of a rendered conversation begins, in tokens. A pure and prefix-stable function.

A message begins where the rendering of the messages before it ends, if that rendering is a beginning of
the whole text; a template that refuses a shorter conversation, or words it otherwise, has no boundary
there. Characters become token indices by counting special tokens, in the text and in the ids: that holds
for spliced ids as well. A boundary that no special token marks is left out: tokens may merge across it.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from typing import TYPE_CHECKING

from coordinator.errors import InvalidValue

if TYPE_CHECKING:
    from gateway.chat.conversation import Conversation, TemplateDict

_REMEMBERED = 8192  # shorter conversations; 100 bytes or so each

Render = Callable[[Sequence["TemplateDict"]], str]  # without a generation prompt


@dataclass(frozen=True, slots=True)
class _Rendering:
    """What is remembered of a shorter conversation: how long its text is, and the text's digest."""

    length: int
    digest: bytes


class MessageStarts:
    """Finds the character at which each message begins. A turn renders only what it is the first to say.

    An agent's conversation of 200 messages would otherwise be rendered 200 times a turn, at about 1 ms each.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, _Rendering | None] = OrderedDict()
        self._lock = Lock()  # front ends render in worker threads

    def find(
        self, text: str, talk: Conversation, args: Mapping[str, object], render: Render
    ) -> Iterator[int]:
        """Rising, the first message's 0 included, and the start of the answer if the text goes on to it."""
        yield 0
        read, at = blake2b(digest_size=16), 0
        for count, key in enumerate(_keys(talk, args), start=1):
            shorter = self._rendering(key, talk.messages[:count], render)
            if shorter is None or not at < shorter.length < len(text):
                continue
            extended = read.copy()
            extended.update(_bytes(text[at : shorter.length]))
            if extended.digest() == shorter.digest:
                read, at = extended, shorter.length
                yield at

    def _rendering(
        self, key: bytes, messages: Sequence[TemplateDict], render: Render
    ) -> _Rendering | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        found = _rendered(messages, render)
        with self._lock:
            self._known[key] = found
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return found


def _rendered(messages: Sequence[TemplateDict], render: Render) -> _Rendering | None:
    try:
        text = render(messages)
    except (
        InvalidValue
    ):  # a template may want a user message; only the whole conversation must render
        return None
    return _Rendering(len(text), blake2b(_bytes(text), digest_size=16).digest())


def _keys(talk: Conversation, args: Mapping[str, object]) -> Iterator[bytes]:
    """One key for each beginning of the conversation, of all that its rendering depends on."""
    state = blake2b(digest_size=16)
    _say(state, [talk.tools, dict(args)])
    for message in talk.messages:
        _say(state, message)
        yield state.digest()


def _say(state: blake2b, value: object) -> None:
    said = _bytes(json.dumps(value, default=repr))
    state.update(len(said).to_bytes(8, "little") + said)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """The tokens that a tokenizer takes out of a text before anything else, and which of them are special."""

    pattern: re.Pattern[str]
    special_texts: frozenset[str]
    special_ids: frozenset[int]

    @staticmethod
    def of(texts: Iterable[str], special: Mapping[str, int]) -> AddedTokens:
        longest_first = sorted(texts, key=len, reverse=True)
        pattern = re.compile("|".join(re.escape(text) for text in longest_first) or r"(?!)")
        return AddedTokens(pattern, frozenset(special), frozenset(special.values()))

    def starts(self, text: str) -> list[int]:
        """The characters at which special tokens stand."""
        hits = self.pattern.finditer(text)
        return [hit.start() for hit in hits if hit.group() in self.special_texts]


def token_boundaries(
    text: str, ids: Sequence[int], starts: Iterable[int], added: AddedTokens
) -> tuple[int, ...]:
    """Character starts as token indices; those that no special token marks are left out."""
    in_text = added.starts(text)
    in_ids = [index for index, token in enumerate(ids) if token in added.special_ids]
    # They differ when an earlier answer spelled a special token out in letters.
    index_of = dict(zip(in_text, in_ids, strict=True)) if len(in_text) == len(in_ids) else {}
    index_of[0] = 0
    return tuple(index_of[start] for start in starts if start in index_of)
