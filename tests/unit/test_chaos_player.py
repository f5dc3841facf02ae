"""What a stream may suffer on its way, and what the storm calls it: nothing that was wrong or lost passes for right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from coordinator.errors import InvalidSetting, SetupError
from coordinator.requests import GREEDY, FinishReason, Timings, Usage
from gateway.chaos.book import Book
from gateway.chaos.checker import cold_answers, wrong_answers
from gateway.chaos.options import StormOptions
from gateway.chaos.player import Player
from gateway.chaos.report import ChaosReport, report
from gateway.chaos.traffic import Ask, Kind, Step
from gateway.client import Client
from gateway.turns import TurnDelta, TurnFinished, TurnRequest, TurnStarted

RIGHT = (7, 8, 9, 9, 8, 7)
ASK = Ask((1, 2, 3), GREEDY, len(RIGHT), draft=True)
STARTED = TurnStarted(3, 0, None, "ring-0", 0, 1)
FINISHED = TurnFinished(FinishReason.LENGTH, None, cast("Usage", None), cast("Timings", None))
HANGS = "hangs"
PATIENCE_S = 0.2


def gone(code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> AioRpcError:
    """As gRPC tells it when nobody said anything."""
    return AioRpcError(code, Metadata(), Metadata(), details="Socket closed")


def answer(*tokens: int) -> list[Any]:
    return [STARTED, *(TurnDelta((token,)) for token in tokens), FINISHED]


class Server:
    """Answers each turn by the next script: events, an error, or silence until the turn's deadline."""

    def __init__(self, *scripts: list[Any]) -> None:
        self._scripts = list(scripts)

    @asynccontextmanager
    async def generate(self, request: TurnRequest) -> AsyncIterator[AsyncIterator[Any]]:
        yield self._events(self._scripts.pop(0), request)

    async def _events(self, script: list[Any], request: TurnRequest) -> AsyncIterator[Any]:
        for each in script:
            if isinstance(each, AioRpcError):
                raise each
            if each == HANGS:
                assert request.timeout_s is not None, "nothing would ever end this stream"
                await asyncio.sleep(request.timeout_s)
                raise gone(grpc.StatusCode.DEADLINE_EXCEEDED)
            yield each


Returns = Callable[[], Awaitable[Client]]


async def played(*scripts: list[Any], returns: Returns | None = None) -> ChaosReport:
    book = Book()
    player = Player(cast("Client", Server(*scripts)), book, PATIENCE_S, returns)
    book.ended(await player._play(0, Step(Kind.EXTEND, "s", ASK)))
    return report(book, [], wrong_answers(book, {ASK: RIGHT}), [])


async def test_a_stream_that_is_right_is_right() -> None:
    told = await played(answer(*RIGHT))
    assert (told.streams, told.wrong_streams, told.lost_streams, told.is_clean) == (1, 0, 0, True)


@pytest.mark.parametrize(
    "tokens",
    [
        (7, 8, 9, 5, 8, 7),  # one is another
        (7, 8, 9, 8, 7),  # one was dropped
        (7, 8, 9, 9, 9, 8, 7),  # one came twice
        (7, 8, 9, 9, 8, 7, 7),  # ... at the very end
        (7, 8, 9, 9, 8),  # it ended early, as if it had its length
        (7, 8, 9, 9, 7, 8),  # two changed places
        (),
    ],
)
async def test_a_stream_of_other_tokens_is_wrong_however_well_it_ended(
    tokens: tuple[int, ...],
) -> None:
    told = await played(answer(*tokens))
    assert (told.wrong_streams, told.lost_streams, told.is_clean) == (1, 0, False)


@pytest.mark.parametrize(
    "script",
    [
        answer(*RIGHT)[:-1],  # every token came, and no end
        [STARTED],
        [],
        [*answer(*RIGHT)[:3], HANGS],
        [HANGS],
        [*answer(*RIGHT)[:3], gone()],
        [gone(grpc.StatusCode.INTERNAL)],
    ],
)
async def test_a_stream_without_an_end_is_lost_also_where_it_hangs(script: list[Any]) -> None:
    told = await played(script)
    assert (told.wrong_streams, told.lost_streams, told.is_clean) == (0, 1, False)


async def test_lanes_that_are_too_small_for_a_conversation_are_refused_and_lose_no_stream() -> None:
    book = Book()
    player = Player(cast("Client", Server()), book, PATIENCE_S)
    with pytest.raises(InvalidSetting, match="max_rows: conversations need [0-9]+, got 700"):
        async with player.talking(StormOptions(), lambda text: tuple(text.encode()), 700):
            raise AssertionError("it talks")
    assert book.streams == 0


async def replaced(*scripts: list[Any]) -> Client:
    return cast("Client", Server(*scripts))


async def test_a_stream_that_its_gateways_death_cut_off_is_asked_again_of_the_next_one() -> None:
    told = await played([*answer(*RIGHT)[:3], gone()], returns=lambda: replaced(answer(*RIGHT)))
    assert (told.asked_again, told.is_clean) == (1, True)


async def test_what_came_before_a_gateways_death_has_to_be_right_too() -> None:
    told = await played([*answer(7, 5)[:3], gone()], returns=lambda: replaced(answer(*RIGHT)))
    assert (told.asked_again, told.wrong_streams) == (1, 1)
    assert "differ from their cold answer at token 1 of 6" in told.problems[0]


async def test_a_stream_that_a_living_gateway_lost_is_lost() -> None:
    book = Book()
    server = cast("Client", Server([STARTED, gone()], answer(*RIGHT)))

    async def same() -> Client:
        return server

    player = Player(server, book, PATIENCE_S, same)
    book.ended(await player._play(0, Step(Kind.EXTEND, "s", ASK)))
    assert book.lost == ["stream 0 (extend) on ring-0: UNAVAILABLE: Socket closed"]


async def test_a_cold_answer_that_ends_early_or_never_is_no_measure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def cold(script: list[Any]) -> object:
        return await cold_answers(cast("Client", Server(script)), [ASK], 1, lambda _: None)

    assert await cold(answer(*RIGHT)) == {ASK: RIGHT}
    with pytest.raises(SetupError, match="answered 5 tokens where 6 were asked for"):
        await cold(answer(*RIGHT[:5]))
    monkeypatch.setattr("gateway.chaos.checker._COLD_S", 0.01)
    with pytest.raises(AioRpcError):
        await cold([STARTED, HANGS])
