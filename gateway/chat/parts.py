"""What an answer is made of once it is taken apart: text, thoughts, tool calls. Knows no wire and no model's format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How a chat's answer is to be taken apart, and what it must be."""

    calls: bool = True  # False: what looks like a call is text
    must_call: bool = False
    only: str | None = None  # the one tool that may be called
    parallel: bool = True  # False: one call at most


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


class AnswerParser(Protocol):
    """Takes one answer apart as it comes. What cannot be part of a call or a thought is text: nothing is lost."""

    @property
    def reads_special(self) -> bool:
        """Whether it wants special tokens written out in the text that it is fed."""
        ...

    def feed(self, text: str) -> tuple[AnswerPart, ...]: ...

    def flush(self) -> tuple[AnswerPart, ...]:
        """What was held back, once no more text comes."""
        ...


class PlainParser:
    """All of it is text."""

    reads_special = False

    def feed(self, text: str) -> tuple[AnswerPart, ...]:
        return (SaidText(text),) if text else ()

    def flush(self) -> tuple[AnswerPart, ...]:
        return ()
