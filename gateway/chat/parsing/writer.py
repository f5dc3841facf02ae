"""Where parsers put what they found: it counts calls, gives them ids, and decides which white space is the form's.

A template writes line breaks around its markers, and leaves them out of what it is given back. So breaks at either end
of a thought, white space that stands alone between markers, and one break in front of a call are nobody's text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gateway.chat.parts import (
    AnswerPart,
    CallArguments,
    CallOpened,
    SaidText,
    Thought,
    sendable,
)

NewId = Callable[[], str]

# Fields of response templates that hold thoughts.
THOUGHTS = frozenset({"reasoning_content", "reasoning", "thinking", "thoughts"})


class PartsWriter:
    """One answer. `parallel`: False leaves out all calls but the first."""

    def __init__(self, new_id: NewId, *, parallel: bool = True) -> None:
        self._new_id = new_id
        self._parallel = parallel
        self._parts: list[AnswerPart] = []
        self._held = ""  # white space that counts only when something follows
        self._quiet = True  # nothing but white space since the last marker
        self._marked = False
        self._muted = False
        self._opened = 0
        self.spoke = False  # there was text other than white space
        self.thinking = False
        self.calls = 0  # that came to their end

    def take(self) -> tuple[AnswerPart, ...]:
        parts, self._parts = self._parts, []
        return merged(parts)

    def said(self, text: str) -> None:
        text, self._held = self._held + text, ""
        if self._quiet:
            if not text or text.isspace():
                self._held = text
                return
            text = text.lstrip("\n") if self._marked and not self.spoke else text
            self._quiet, self.spoke = False, True
        if text.endswith("\n"):
            text, self._held = text[:-1], "\n"
        self._add(SaidText(text), text)

    def open_thought(self) -> None:
        self._mark()
        self.thinking = True

    def thought(self, text: str) -> None:
        text, self._held = self._held + text, ""
        if self._quiet:
            text = text.lstrip("\n")
            self._quiet = not text
        told = text.rstrip("\n")
        self._held = text[len(told) :]
        self._add(Thought(told), told)

    def close_thought(self) -> None:
        self._mark()
        self.thinking = False

    def open_call(self, name: str) -> None:
        self._mark()
        self._muted = self._opened > 0 and not self._parallel
        if not self._muted:
            self._parts.append(CallOpened(self._opened, self._new_id(), sendable(name)))
            self._opened += 1

    def arguments(self, text: str) -> None:
        if not self._muted:
            self._add(CallArguments(self._opened - 1, sendable(text)), text)

    def end_call(self) -> None:
        self.calls += not self._muted

    def flush(self) -> None:
        held, self._held = self._held, ""
        if held and not self.thinking and not (self._quiet and self._marked):
            self._parts.append(SaidText(held))

    def _mark(self) -> None:
        self._held = ""
        self._quiet = self._marked = True

    def _add(self, part: AnswerPart, text: str) -> None:
        if text:
            self._parts.append(part)


def merged(parts: Iterable[AnswerPart]) -> tuple[AnswerPart, ...]:
    """Neighbours of one kind as one."""
    joined: list[AnswerPart] = []
    for part in parts:
        match (joined[-1] if joined else None), part:
            case SaidText(before), SaidText(text):
                joined[-1] = SaidText(before + text)
            case Thought(before), Thought(text):
                joined[-1] = Thought(before + text)
            case CallArguments(call, before), CallArguments(same, text) if call == same:
                joined[-1] = CallArguments(call, before + text)
            case _:
                joined.append(part)
    return tuple(joined)
