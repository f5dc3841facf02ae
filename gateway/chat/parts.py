"""What an answer is made of once it is taken apart: text, thoughts, tool calls. Knows no wire and no model's format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from gateway.chat.messages import Message, ToolCall


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How a chat's answer is to be taken apart, and what it must be."""

    calls: bool = True  # False: what looks like a call is text
    must_call: bool = False
    only: str | None = None  # the one tool that may be called
    parallel: bool = True  # False: one call at most
    among: tuple[str, ...] = ()  # the tools that may be called; empty: all

    @property
    def is_restricted(self) -> bool:
        return self.only is not None or bool(self.among)

    def may_call(self, name: str) -> bool:
        return name in (self.only or name,) and (not self.among or name in self.among)


@dataclass(frozen=True, slots=True)
class SaidText:
    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """What a model says to itself before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpened:
    """`call` counts an answer's tool calls from 0; `id` is ours."""

    call: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's JSON text; the pieces together are whole unless the answer was cut."""

    call: int
    text: str


AnswerPart = SaidText | Thought | CallOpened | CallArguments


def sendable(text: str) -> str:
    """What a model spelled by escapes may hold half a surrogate pair, which no wire carries."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def message_of(parts: Iterable[AnswerPart]) -> Message:
    """An answer as one message, as clients send it back. Without text its content is None where there are calls."""
    text: list[str] = []
    thoughts: list[str] = []
    opened: list[CallOpened] = []
    arguments: dict[int, list[str]] = {}
    for part in parts:
        match part:
            case SaidText(said):
                text.append(said)
            case Thought(thought):
                thoughts.append(thought)
            case CallOpened(call):
                opened.append(part)
                arguments[call] = []
            case CallArguments(call, piece):
                arguments[call].append(piece)
    calls = tuple(ToolCall(each.name, "".join(arguments[each.call]), each.id) for each in opened)
    content = "".join(text)
    return Message(
        "assistant",
        content or (None if calls else ""),
        tool_calls=calls,
        reasoning="".join(thoughts) or None,
    )


class AnswerParser(Protocol):
    """Takes one answer apart as it comes. What cannot be part of a call or a thought is text: nothing is lost."""

    @property
    def reads_special(self) -> bool:
        """Whether it wants special tokens written out in the text that it is fed."""
        ...

    @property
    def thinking(self) -> bool:
        """Whether a thought is open."""
        ...

    @property
    def calls(self) -> int:
        """How many calls came to their end by now."""
        ...

    def feed(self, text: str) -> tuple[AnswerPart, ...]: ...

    def flush(self) -> tuple[AnswerPart, ...]:
        """What was held back, once no more text comes."""
        ...


class PlainParser:
    """All of it is text."""

    reads_special = False
    thinking = False
    calls = 0

    def feed(self, text: str) -> tuple[AnswerPart, ...]:
        return (SaidText(text),) if text else ()

    def flush(self) -> tuple[AnswerPart, ...]:
        return ()
