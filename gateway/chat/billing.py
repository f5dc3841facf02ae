"""Leaves out the line that Claude Code writes for Anthropic's books: it is another one in each request.

It stands in front of the system prompt; read as a part of it, it would void every row of the conversation. This is the
one place that knows it, for all fronts: those that put text blocks together leave it out of each block first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gateway.chat.messages import Message

_BILLING = "x-anthropic-billing-header"


def without_billing(text: str) -> str:
    """What a system text says but for that line; empty where there is nothing else."""
    if not text.startswith(_BILLING):
        return text
    return text.partition("\n")[2].lstrip("\n")


def billed_to_nobody(messages: Iterable[Message]) -> list[tuple[int, Message]]:
    """The messages with the index that each was sent at, without those system messages that hold nothing else."""
    kept: list[tuple[int, Message]] = []
    for index, message in enumerate(messages):
        text = message.content or ""
        if message.role not in ("system", "developer") or not text.startswith(_BILLING):
            kept.append((index, message))
        elif rest := without_billing(text):
            kept.append((index, replace(message, content=rest)))
    return kept
