"""Parses thoughts in `<think>` and calls as JSON in `<tool_call>`, or between other marks, in one go.

What begins like a call and turns out to be none is given back as text, and so is a thought's mark behind text. It holds
back no more than what may be the beginning of a mark or of a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from gateway.chat.parsing.call_json import CallReader
from gateway.chat.parsing.writer import PartsWriter
from gateway.chat.parts import AnswerPart

_STRAY = " \t\r\n}],"  # what models leave between a call and its closing mark
# Characters of an answer that are looked at once more: calls in calls in calls would be read again for each of them.
_MOST_AGAIN = 1 << 16


@dataclass(frozen=True, slots=True)
class Marks:
    """An opening and a closing one."""

    open: str
    close: str


THINK = Marks("<think>", "</think>")
TOOL_CALL = Marks("<tool_call>", "</tool_call>")
BARE = Marks("{", "")  # an answer that is nothing but calls


class TaggedParser:
    """An AnswerParser. `special`: matches special tokens as they are written out; what is no mark is dropped."""

    def __init__(
        self,
        writer: PartsWriter,
        *,
        think: Marks | None = THINK,
        call: Marks | None = TOOL_CALL,
        thinking: bool = False,
        special: re.Pattern[str] | None = None,
        demanded: bool = False,
    ) -> None:
        """`thinking`: the prompt has opened a thought already; `demanded`: the answer can be nothing but calls."""
        self._writer = writer
        self._think = think
        self._call = call
        self._special = special
        self._demanded = demanded
        self._buffer = ""
        self._raw = ""  # a call that has no name yet
        self._again = 0
        self._reader = CallReader(writer)
        self._mode: Callable[[], bool] = self._text
        if thinking:
            self._begin_thought()

    @property
    def reads_special(self) -> bool:
        return self._special is not None

    @property
    def thinking(self) -> bool:
        return self._writer.thinking

    @property
    def calls(self) -> int:
        return self._writer.calls

    def feed(self, text: str) -> tuple[AnswerPart, ...]:
        self._buffer += self._without_special(text)
        while self._mode():
            pass
        return self._writer.take()

    def flush(self) -> tuple[AnswerPart, ...]:
        rest, self._buffer = self._buffer, ""
        if self._mode == self._thought:
            self._writer.thought(rest)
        elif self._demanded:  # what was cut is the beginning of a call, and no text
            pass
        elif self._mode == self._text:
            self._writer.said(rest)
        elif self._mode == self._in_call and not self._reader.opened:
            self._writer.said(self._raw + rest)
        self._writer.flush()
        return self._writer.take()

    def _without_special(self, text: str) -> str:
        if self._special is None:
            return text
        pairs = [pair for pair in (self._think, self._call) if pair is not None]
        marks = {mark for pair in pairs for mark in (pair.open, pair.close)}
        return self._special.sub(lambda hit: hit[0] if hit[0] in marks else "", text)

    # Each mode takes what it can from the buffer, and says whether there is more to do.

    def _text(self) -> bool:
        place, mark = _first(self._buffer, self._openers())
        if not mark:
            self._said(len(self._buffer) - _held(self._buffer, self._openers()))
            return False
        if mark in self._only_in_front() and self._buffer[:place].strip():
            self._said(place)  # behind text it is text itself
            return True
        self._said(place)
        if self._call == BARE and mark == BARE.open:
            self._begin_call("")
            return True
        self._buffer = self._buffer[len(mark) :]
        if self._call is not None and mark == self._call.open:
            self._begin_call(mark)
        else:
            self._begin_thought()
        return True

    def _openers(self) -> list[str]:
        front = [] if self._writer.spoke else self._only_in_front()
        return front if self._call in (None, BARE) else [self._call.open, *front]

    def _only_in_front(self) -> list[str]:
        thought = [] if self._think is None else [self._think.open]
        return [*thought, BARE.open] if self._call == BARE else thought

    def _said(self, length: int) -> None:
        self._writer.said(self._buffer[:length])
        self._buffer = self._buffer[length:]

    def _begin_thought(self) -> None:
        self._writer.open_thought()
        self._mode = self._thought

    def _thought(self) -> bool:
        assert self._think is not None
        close = self._think.close
        place = self._buffer.find(close)
        if place < 0:
            end = len(self._buffer) - _held(self._buffer, [close])
            self._writer.thought(self._buffer[:end])
            self._buffer = self._buffer[end:]
            return False
        self._writer.thought(self._buffer[:place])
        self._writer.close_thought()
        self._buffer = self._buffer[place + len(close) :]
        self._mode = self._text
        return True

    def _begin_call(self, mark: str) -> None:
        self._raw = mark
        self._reader = CallReader(self._writer)
        self._mode = self._in_call

    def _in_call(self) -> bool:
        taken = self._reader.feed(self._buffer)
        if not self._reader.opened:
            self._raw += self._buffer[:taken]
        self._buffer = self._buffer[taken:]
        if self._reader.done:
            self._mode = self._behind_call
        elif self._reader.broken:
            self._mode = self._text
            if not self._reader.opened:
                self._give_back()
        else:
            return False
        return True

    def _give_back(self) -> None:
        """Its mark is text, and what follows is looked at once more."""
        assert self._call is not None
        self._again += len(self._raw)
        if self._again > _MOST_AGAIN:
            self._writer.said(self._raw)
            return
        own = self._raw.startswith(self._call.open)
        mark = self._call.open if own else self._raw[:1]
        self._writer.said(mark)
        self._buffer = self._raw[len(mark) :] + self._buffer

    def _behind_call(self) -> bool:
        assert self._call is not None
        self._buffer = rest = self._buffer.lstrip(_STRAY)
        close = self._call.close
        if rest.startswith("{"):
            self._begin_call("")
            return True
        if close and rest.startswith(close):
            self._buffer = rest[len(close) :]
        elif not rest or close.startswith(rest):
            return False
        self._mode = self._text
        return True


def _first(text: str, marks: list[str]) -> tuple[int, str]:
    """The mark that comes first, and where; "" for none."""
    found = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    return min(found, default=(len(text), ""))


def _held(text: str, marks: list[str]) -> int:
    """The longest end of the text with which some mark begins."""
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    for length in range(longest, 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
