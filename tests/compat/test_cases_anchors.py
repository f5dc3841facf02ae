"""A client that shuffles its tools, as others met it: both orders are kept, and each is found again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from coordinator.config import SchedulerSettings
from coordinator.prefixes import common_prefix
from coordinator.requests import GREEDY, MissKind, SessionId
from gateway.chat.byte_tokenizer import ByteTokenizer
from gateway.chat.messages import Message, Tool
from gateway.client import Client
from gateway.turns import ChatPrompt, Prompt, TextPrompt, TurnDelta, TurnRequest, TurnStarted

Sites = Callable[..., AbstractAsyncContextManager[Any]]
STORE = 8192
BLOCK = SchedulerSettings().node_rows
LEAST = SchedulerSettings().min_copy_rows
SYSTEM = Message("system", "You are a careful assistant who keeps to the facts.")
TOOLS = tuple(Tool(f"get_{name}", f"Looks the {name} up") for name in ("weather", "time", "road"))
SHUFFLED = (TOOLS[1], TOOLS[2], TOOLS[0])
REPLY = 6
# Longer than a block: the one in which the head ends is whole, and stays the same as the talk goes on.
QUESTION = "How is the weather there, and how long would the way by the old road take me today?"


@dataclass(frozen=True)
class Told:
    """A served turn: what it began with, and its rows in the end."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    started: TurnStarted

    @property
    def rows(self) -> tuple[int, ...]:
        return (*self.prompt, *self.answer)[:-1]

    @property
    def kept(self) -> int:
        """Of the rows those that outlive the lane: less than some in the last block are not worth it."""
        rest = len(self.rows) % BLOCK
        return len(self.rows) - (rest if rest < LEAST else 0)


async def told(client: Client, prompt: Prompt, session: str | None, *, reuse: bool = True) -> Told:
    owner = None if session is None else SessionId(session)
    turn = TurnRequest(
        prompt, session=owner, sampling=GREEDY, max_tokens=REPLY, reuse=reuse, draft=False
    )
    async with client.generate(turn) as stream:
        started, *events = [event async for event in stream]
    assert isinstance(started, TurnStarted)
    said = [event.token_ids for event in events if isinstance(event, TurnDelta)]
    tokenizer = ByteTokenizer()
    match prompt:
        case ChatPrompt(messages, tools):
            ids = tokenizer.render(messages, tools).token_ids
        case TextPrompt(text):
            ids = tokenizer.encode(text)
        case _:
            raise AssertionError("no such prompt here")
    assert len(ids) == started.prompt_tokens
    return Told(ids, tuple(token for part in said for token in part), started)


async def flood(client: Client, number: int) -> None:
    """Other conversations: more than there are lanes, and more of them than the store has room for."""
    for other in range(8):
        await told(client, TextPrompt(f"{number}{other}" * 700), f"flood{number}-{other}")


async def test_tools_in_two_orders_are_both_kept_and_a_shuffle_back_hits(site: Sites) -> None:
    """NousResearch/hermes-agent#27339: the client shuffles its tools on a new turn; all behind them is lost."""
    talk: tuple[Message, ...] = (SYSTEM, Message("user", QUESTION))
    turns: list[Told] = []
    heads = {order: ByteTokenizer().render(talk, order).anchor for order in (TOOLS, SHUFFLED)}
    async with site(host_rows=STORE, endless=True) as it:
        for number, order in enumerate((TOOLS, SHUFFLED, TOOLS, SHUFFLED)):
            turn = await told(it.client, ChatPrompt(talk, order), "agent")
            turns.append(turn)
            said = ByteTokenizer().decode(turn.answer, skip_special=False)
            talk = (*talk, Message("assistant", said), Message("user", f"{number}: and now?"))
        shared = common_prefix(turns[0].prompt, turns[1].prompt)
        assert LEAST < shared < min(heads.values()), "the order must matter, and soon"
        await _both_are_anchors(it, turns, tuple(heads.values()))
        # What a lane holds, and what the store holds beside the anchors, becomes others'.
        late = []
        for number, order in enumerate((SHUFFLED, TOOLS)):
            await flood(it.client, number)
            late.append(await told(it.client, ChatPrompt((SYSTEM, talk[-1]), order), "late"))
        controls = [
            await told(it.client, ChatPrompt((SYSTEM, talk[-1]), order), None, reuse=False)
            for order in (SHUFFLED, TOOLS)
        ]
    # The second order is a miss where the orders part; from then on each finds what it left.
    assert turns[1].started.cached_prefix == shared
    assert turns[1].started.miss is not None
    assert turns[1].started.miss.kind is MissKind.DIVERGED
    for before, after in ((turns[0], turns[2]), (turns[1], turns[3])):
        same = common_prefix(before.rows, after.prompt)
        assert same == len(before.rows), "the conversation goes on from there"
        assert after.started.cached_prefix == before.kept > heads[TOOLS]
    for turn, order, control in zip(late, (SHUFFLED, TOOLS), controls, strict=True):
        assert turn.started.cached_prefix >= heads[order]
        assert turn.answer == control.answer
        assert control.started.cached_prefix == 0


async def _both_are_anchors(it: Any, turns: Sequence[Told], heads: Sequence[int]) -> None:
    """The blocks of both heads are pinned, those that they share once, and no others."""
    wanted = {
        (start, turn.prompt[: start + BLOCK])
        for turn, head in zip(turns, heads, strict=False)
        for start in range(0, head, BLOCK)
    }
    async with asyncio.timeout(10):
        while True:
            pinned = [node.start async for node in it.client.nodes() if node.pinned]
            if len(pinned) >= len(wanted):
                break
    assert sorted(pinned) == sorted(start for start, _ in wanted)
