"""`ringserve bench restore`: what a turn costs whose rows had left its lane, from host memory and over a restart.

More conversations than lanes, each with a head of its own, one turn at a time. It measures and compares; where rows
come from is the ring's business, and is read from its counters.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.prefixes import common_prefix
from coordinator.requests import SessionId
from coordinator.status import RingStatus
from gateway.bench.endpoints import Answered, Ask, GrpcEndpoint
from gateway.bench.prompts import prose
from gateway.chat.tokenizer import ChatTokenizer
from gateway.launch import Running

# Tokens that each turn adds to its session's history: a tool's answer of a few lines.
_NEW_TOKENS = 40
_ORDER_SEED = 7


@dataclass(frozen=True, slots=True)
class Load:
    sessions: int = 12
    history_tokens: int = 1500
    answer_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn and its cold twin; `restored` rows came from the store, the rest of what was cached lay in a lane."""

    answered: Answered
    cold: Answered
    reusable: int
    restored: int


@dataclass(slots=True)
class Histories:
    """What each session has said so far, prompt and answer."""

    tokens: list[tuple[int, ...]] = field(default_factory=list)

    @staticmethod
    def begin(tokenizer: ChatTokenizer, load: Load) -> Histories:
        heads = (tokenizer.encode(prose(100 + n, 120)) for n in range(load.sessions))
        return Histories([head[: load.history_tokens] for head in heads])


class Restoring:
    """The turns of one process that serves; histories go on over several."""

    def __init__(
        self, endpoint: GrpcEndpoint, running: Running, load: Load, histories: Histories
    ) -> None:
        self._endpoint = endpoint
        self._running = running
        self._load = load
        self._histories = histories
        self.most_stored_rows = 0

    async def first_turns(self) -> None:
        for session, prompt in enumerate(self._histories.tokens):
            self._remember(session, await self._play(session, prompt, reuse=True))

    async def next_turns(self, tokenizer: ChatTokenizer, number: int) -> list[Turn]:
        """A turn of every session, in an order that no cache knows."""
        order = list(range(self._load.sessions))
        random.Random(_ORDER_SEED + number).shuffle(order)
        return [await self._next_turn(tokenizer, session, number) for session in order]

    async def _next_turn(self, tokenizer: ChatTokenizer, session: int, number: int) -> Turn:
        said = tokenizer.encode(prose(1000 * number + session, 4))[:_NEW_TOKENS]
        before = self._histories.tokens[session]
        prompt = (*before, *said)
        restored = self._status().counts.restored_rows
        answered = await self._play(session, prompt, reuse=True)
        restored = self._status().counts.restored_rows - restored
        self._remember(session, answered)
        # Without its session: the lane that it takes is another one, and its rows are nobody's.
        cold = await self._play(None, prompt, reuse=False)
        # The last token of an answer was sampled and never written to a row.
        reusable = common_prefix(before[:-1], prompt)
        return Turn(answered, cold, reusable, restored)

    async def _play(self, session: int | None, prompt: Sequence[int], *, reuse: bool) -> Answered:
        name = None if session is None else SessionId(f"restore-{session}")
        ask = Ask(self._load.answer_tokens, prompt=tuple(prompt), session=name, reuse=reuse)
        answered = await self._endpoint.play(ask)
        self.most_stored_rows = max(self.most_stored_rows, self._status().stored_rows)
        return answered

    def _remember(self, session: int, answered: Answered) -> None:
        self._histories.tokens[session] = (*answered.prompt, *answered.tokens)

    def _status(self) -> RingStatus:
        return self._running.service.rings()[0]
