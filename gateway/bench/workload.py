"""What the bench's sessions say: one head of about 2,000 tokens for all, then tool-like turns of each one's own.

Decides only texts, by the session's and the turn's numbers alone, so that every run asks the same.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace

from gateway.chat.messages import Message
from gateway.cli.dialogue import SYSTEM, TOOLS

_MODULES = (
    "dates",
    "paths",
    "orders",
    "users",
    "search",
    "mail",
    "prices",
    "stock",
    "routes",
    "login",
)
_VERBS = ("parse", "format", "load", "store", "merge", "split", "check", "count", "sort", "join")
_ERRORS = ("ValueError", "KeyError", "TypeError", "IndexError", "AssertionError", "TimeoutError")
_LISTED = 3

_NOTES = """Notes of earlier visits to this repository:
- The tests of mail and of login need no server: both are given a fake one by the fixtures in tests/conftest.py.
- Prices are whole cents. Whoever finds a float in prices.py has found a bug and says so before anything else.
- routes.py is read by the dispatcher at start and by nobody else; a change there needs a restart, not a reload.
- stock.py locks a row for the length of a request. Two requests for the same article wait for each other, on purpose.
- The search index is rebuilt by tools/index.py, which takes nine minutes; ask before you run it.
- A build has a number that rises by one. A bug report without the number of its build is sent back with thanks."""


@dataclass(frozen=True, slots=True)
class Load:
    sessions: int
    turns: int
    answer_tokens: int  # the most tokens of one answer


def head() -> Message:
    """Rules and tool schemas as one system message: not every endpoint takes tools."""
    tools = "\n".join(
        json.dumps(
            {"name": each.name, "description": each.description, "parameters": each.parameters},
            indent=1,
        )
        for each in TOOLS
    )
    return replace(SYSTEM, content=f"{SYSTEM.content}\n\n{_NOTES}\n\nTools:\n{tools}")


def user_turn(session: int, turn: int) -> Message:
    """What a tool printed, and a short question."""
    rng = random.Random(f"{session}/{turn}")
    module, verb = rng.choice(_MODULES), rng.choice(_VERBS)
    if turn == 0:
        return Message(
            "user", f"{module}.py fails in {verb}_{module} since build {session}. Look at it first."
        )
    failed = "\n".join(
        f"FAILED tests/test_{module}.py::test_{rng.choice(_VERBS)}_{rng.randrange(1000)} - "
        f"{rng.choice(_ERRORS)}: line {rng.randrange(10, 900)} in {verb}_{module}"
        for _ in range(_LISTED)
    )
    passed = rng.randrange(20, 400)
    return Message(
        "user", f"Output of run_tests: {_LISTED} failed, {passed} passed.\n{failed}\nWhat next?"
    )


def unseen(messages: tuple[Message, ...], seed: int) -> tuple[Message, ...]:
    """The same words in another order: as long, and with no prefix that a server can have seen."""
    rng = random.Random(f"unseen/{seed}")
    return tuple(_shuffled(message, rng) for message in messages)


def _shuffled(message: Message, rng: random.Random) -> Message:
    words = (message.content or "").split(" ")
    rng.shuffle(words)
    return replace(message, content=" ".join(words))
