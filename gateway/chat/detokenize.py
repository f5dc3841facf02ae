"""Token ids to text, in deltas that never split a character.

A token may hold part of a character's bytes (emoji, CJK, byte fall-back). Each token is looked up as
bytes once, and an incremental UTF-8 decoder holds back an incomplete end; so the text does not depend on
how the ids were cut into deltas, and a token costs one look-up. Whole code points are never held: the parts of
a ZWJ family or a combining mark are sent as they come, and join again in the client.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

_REPLACEMENT = "\ufffd"
_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """One stream of ids. The deltas of any cut, and the flush, concatenate to the same text."""

    def feed(self, ids: Iterable[int]) -> str: ...

    def flush(self) -> str:
        """The rest, when no more ids come: an incomplete character becomes U+FFFD."""
        ...


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """What each token id spells, in bytes; ids that are absent spell nothing."""

    pieces: Mapping[int, bytes]
    special: frozenset[int]
    leading_spaces: int = 0  # how many the tokenizer's decoder drops at the beginning of a text


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes: byte-level BPE, and SentencePiece with byte fall-back.

    Where bytes are no UTF-8 they become U+FFFD one bad sequence at a time, as a byte-level decoder
    does it; transformers' byte fall-back would spoil a whole run of byte tokens instead.
    """

    def __init__(self, table: TokenBytes, *, skip_special: bool = True) -> None:
        self._pieces = table.pieces
        self._skipped = table.special if skip_special else frozenset[int]()
        self._leading = table.leading_spaces
        self._decoder = _UTF8("replace")

    def feed(self, ids: Iterable[int]) -> str:
        pieces = self._pieces
        data = b"".join(pieces.get(i, b"") for i in ids if i not in self._skipped)
        return self._decoder.decode(self._without_lead(data))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _without_lead(self, data: bytes) -> bytes:
        if not self._leading or not data:
            return data
        rest = data[: self._leading].lstrip(b" ")
        dropped = min(len(data), self._leading) - len(rest)
        self._leading = 0 if rest else self._leading - dropped
        return data[dropped:]


class WindowedDetokenizer:
    """For any other tokenizer: decodes a short window of ids again and again and sends what grew.

    The window begins two deltas back, because what a token spells may depend on the token before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skipped: frozenset[int]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._window: list[int] = []
        self._sent = 0  # ids of the window whose text was sent

    def feed(self, ids: Iterable[int]) -> str:
        return "".join(self._take(i) for i in ids if i not in self._skipped)

    def flush(self) -> str:
        before = self._decode(self._window[: self._sent])
        return self._decode(self._window)[len(before) :]

    def _take(self, token: int) -> str:
        self._window.append(token)
        before = self._decode(self._window[: self._sent])
        text = self._decode(self._window)
        if len(text) <= len(before) or text.endswith(_REPLACEMENT):
            return ""
        self._window = self._window[self._sent :]
        self._sent = len(self._window)
        return text[len(before) :]
