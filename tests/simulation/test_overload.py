"""Crowds before a small ring, in virtual time: who is told when to come back mostly gets in, and all are served."""

from __future__ import annotations

import random
from statistics import median

import pytest

from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.requests import Finished, Request
from fakering.clock import VirtualClock
from fakering.model import FakeModel
from fakering.ring import FakeRing
from fakering.texts import novel
from tests.simulation.crowd import Client, Crowd, Visit

MODEL = FakeModel(vocab_size=90, seed=4)
STEP_S, ROW_S = 0.01, 0.002


def asked(number: int, tokens: int, answer: int) -> Request:
    return Request(novel(tokens, number, 90), max_new_tokens=answer)


async def crowded(visits: list[Visit], before: list[Visit], **settings: int) -> list[Client]:
    """What became of them on a ring of two lanes, which has served others before."""
    clock = VirtualClock()
    ring = FakeRing(
        2, 2, 4096, vocab_size=90, language=MODEL, clock=clock, step_s=STEP_S, row_s=ROW_S
    )
    driver = RingDriver("ring-0", ring, SchedulerSettings(**settings), clock)
    await driver.start(lambda progress: None)
    await Crowd(clock, driver, MODEL).play(before)
    crowd = Crowd(clock, driver, MODEL)
    await crowd.play(visits)
    status = driver.status()
    assert (status.running_jobs, status.waiting_jobs, status.busy_lanes) == (0, 0, 0)
    assert all(isinstance(client.end, Finished) for client in crowd.clients)
    await driver.stop()
    return crowd.clients


def some(dice: random.Random, count: int, tokens: int, answer: int, over_s: float) -> list[Visit]:
    """Each up to twice as long as another; `over_s` 0: all at once."""
    return [
        Visit(
            dice.uniform(0.0, over_s),
            asked(
                dice.randrange(10**6),
                tokens + dice.randrange(tokens),
                answer + dice.randrange(answer),
            ),
        )
        for _ in range(count)
    ]


def first_returns(clients: list[Client]) -> float:
    """The share of those who were sent away that got in when they came back."""
    sent_away = [client for client in clients if client.told]
    return sum(client.tries == 1 for client in sent_away) / len(sent_away)


def took_s(clients: list[Client]) -> float:
    """From the first that got in to the last that was served."""
    return max(client.ended_s or 0.0 for client in clients) - (clients[0].got_in_s or 0.0)


@pytest.mark.parametrize(
    ("crowd", "tokens", "answer"),
    [(60, 40, 12), (18, 300, 20), (18, 700, 8)],
    ids=["chats", "questions", "documents"],
)
async def test_who_comes_back_when_told_mostly_gets_in(
    crowd: int, tokens: int, answer: int
) -> None:
    """All at once before two lanes, and eight may wait."""
    dice = random.Random(tokens)
    before = some(dice, 8, tokens, answer, 16.0)
    visits = some(dice, crowd, tokens, answer, 0.0)
    clients = await crowded(visits, before, queue_limit=8)
    sent_away = [client for client in clients if client.told]
    assert len(sent_away) == crowd - 10
    assert first_returns(clients) > 0.8
    assert max(client.tries for client in sent_away) <= 2
    assert median(client.late_s for client in sent_away) == 0.0
    assert all(client.late_s <= 60.0 for client in sent_away)
    # Nor was it bought by an idle ring.
    assert took_s(clients) < 1.15 * took_s(await crowded(visits, before, queue_limit=crowd))


async def test_nobody_starves_where_strangers_come_all_the_time() -> None:
    """Half as many again as the ring can serve, for a while: places that were promised may be taken by others."""
    dice = random.Random(7)
    before = some(dice, 8, 100, 12, 8.0)
    clients = await crowded(some(dice, 80, 100, 12, 20.0), before, queue_limit=8)
    sent_away = [client for client in clients if client.told]
    assert len(sent_away) > 20
    assert first_returns(clients) > 0.6
    assert max(client.tries for client in sent_away) <= 4


async def test_before_anything_was_measured_all_are_served_all_the_same() -> None:
    dice = random.Random(8)
    clients = await crowded(some(dice, 30, 100, 12, 0.0), [], queue_limit=4)
    sent_away = [client for client in clients if client.told]
    assert len(sent_away) == 30 - 6
    assert max(client.tries for client in sent_away) <= 3


async def test_two_hundred_before_a_queue_of_the_usual_size() -> None:
    dice = random.Random(9)
    before = some(dice, 8, 60, 4, 8.0)
    clients = await crowded(some(dice, 200, 60, 4, 0.0), before)
    sent_away = [client for client in clients if client.told]
    assert len(sent_away) == 200 - 66
    assert first_returns(clients) > 0.8
    assert max(client.tries for client in sent_away) <= 2
