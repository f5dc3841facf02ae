"""`ringserve bench multiturn`: sessions of growing conversations over one shared head, against one endpoint.

In this order: all sessions at once; one more session alone; prompts as long that nobody has seen; then every turn
again without reuse, to compare the tokens. It measures and compares; what counts as reusable is request_log.py's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from coordinator.requests import SessionId
from gateway.bench.endpoints import Answered, Ask, Endpoint
from gateway.bench.workload import Load, head, unseen, user_turn
from gateway.chat.messages import Message

Tell = Callable[[str], None]

# Unseen prompts: each is a whole cold prefill.
_CONTROLS = 3
# Ids that any vocabulary has; no chat begins with the first of them.
_WARM_UP = tuple(range(70, 90))


@dataclass(frozen=True, slots=True)
class Measured:
    """Turns of `sessions` ran beside one another, those of `solo`, its cold twins and `controls` alone."""

    sessions: tuple[tuple[Answered, ...], ...]
    solo: tuple[Answered, ...]
    controls: tuple[Answered, ...]
    solo_cold: tuple[Answered, ...]  # empty where the endpoint cannot repeat a turn
    cold: tuple[tuple[Answered, ...], ...]
    begin_s: float
    wall_s: float

    @property
    def turns(self) -> tuple[Answered, ...]:
        return tuple(turn for session in self.sessions for turn in session)

    @property
    def wrong_turns(self) -> int | None:
        """Turns whose tokens are not those of their cold run."""
        if not self.solo_cold:
            return None
        warm = (*self.turns, *self.solo)
        cold = (*(turn for session in self.cold for turn in session), *self.solo_cold)
        return sum(a.tokens != b.tokens for a, b in zip(warm, cold, strict=True))


async def measure(endpoint: Endpoint, load: Load, *, lanes: int, tell: Tell) -> Measured:
    """`lanes`: how many cold runs go beside one another. Raises what the endpoint raises."""
    await endpoint.play(_warm_up(endpoint))
    tell(f"{load.sessions} sessions of {load.turns} turns beside one another")
    begin_s = time.perf_counter()
    sessions = await asyncio.gather(*(_converse(endpoint, load, n) for n in range(load.sessions)))
    wall_s = time.perf_counter() - begin_s
    tell("one more session alone")
    solo = await _converse(endpoint, load, load.sessions)
    tell("prompts as long that nobody has seen")
    controls = await _play_controls(endpoint, load)
    solo_cold: tuple[Answered, ...] = ()
    cold: list[tuple[Answered, ...]] = []
    if endpoint.tells_tokens:
        tell(f"all {load.turns * (load.sessions + 1)} turns again, every row computed")
        solo_cold = tuple([await endpoint.play(_cold_twin(turn, load)) for turn in solo])
        cold = await _cold_twins(endpoint, load, sessions, lanes)
    return Measured(tuple(sessions), solo, controls, solo_cold, tuple(cold), begin_s, wall_s)


def _warm_up(endpoint: Endpoint) -> Ask:
    """It may share no token with what follows: it is not in the log of what could be reused."""
    if endpoint.tells_tokens:
        return Ask(4, prompt=_WARM_UP, reuse=False)
    return Ask(4, (Message("user", "Are you there?"),))


async def _converse(endpoint: Endpoint, load: Load, session: int) -> tuple[Answered, ...]:
    name = SessionId(f"bench-{session}")
    messages: list[Message] = [head()]
    answers = []
    for turn in range(load.turns):
        messages.append(user_turn(session, turn))
        answer = await endpoint.play(Ask(load.answer_tokens, tuple(messages), session=name))
        answers.append(answer)
        messages.append(Message("assistant", answer.text))
    return tuple(answers)


async def _play_controls(endpoint: Endpoint, load: Load) -> tuple[Answered, ...]:
    """As long as the solo session's follow-up turns."""
    messages = [head(), *(user_turn(load.sessions, turn) for turn in range(load.turns))]
    seeds = range(min(_CONTROLS, max(load.turns - 1, 1)))
    return tuple([await endpoint.play(Ask(1, unseen(tuple(messages), seed))) for seed in seeds])


async def _cold_twins(
    endpoint: Endpoint, load: Load, sessions: Sequence[Sequence[Answered]], lanes: int
) -> list[tuple[Answered, ...]]:
    room = asyncio.Semaphore(lanes)

    async def play(turn: Answered) -> Answered:
        async with room:
            return await endpoint.play(_cold_twin(turn, load))

    return [tuple(await _all(play(turn) for turn in session)) for session in sessions]


async def _all(plays: Iterable[Awaitable[Answered]]) -> list[Answered]:
    return await asyncio.gather(*plays)


def _cold_twin(turn: Answered, load: Load) -> Ask:
    return replace(Ask(load.answer_tokens), prompt=turn.prompt, reuse=False)
