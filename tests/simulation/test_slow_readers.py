"""Random turns whose readers are fast, slow or gone, before small queues, on rings that lose frames and stages.

No token is wrong, no job waits for a reader, and only who reads nothing loses a turn.
"""

from __future__ import annotations

import random

import pytest

from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.errors import SlowReader
from coordinator.requests import Finished, Request, SamplingSpec, SessionId
from fakering.clock import VirtualClock
from fakering.faults import Drop, FaultScript, Lose, Restart, Stall
from fakering.model import FakeModel
from fakering.ring import FakeRing
from fakering.texts import novel
from tests.simulation.crowd import Client, Crowd, Visit

MODEL = FakeModel(vocab_size=80, seed=6, quoting=0.5)
UNREAD, UNREAD_S = 12, 20.0
SETTINGS = SchedulerSettings(
    frame_rows=24,
    chunk_rows=10,
    min_chunk_rows=3,
    min_copy_rows=3,
    node_rows=8,
    max_drafts=5,
    reply_timeout_s=5.0,
    queue_limit=3,
    queue_tokens=150,
    unread_tokens=UNREAD,
    unread_s=UNREAD_S,
)
# What frames in flight still bring when a job begins to rest.
LATE = 3 * (SETTINGS.max_drafts + 1)


class Watching(Crowd):
    """Looks at every stream that has not ended, after each step."""

    most_unread = 0

    def look(self) -> None:
        for client in self.clients:
            stream = client.stream
            if stream is not None and stream._end is None and stream._delta is not None:
                self.most_unread = max(self.most_unread, len(stream._delta.tokens))


def visits(dice: random.Random, count: int) -> list[Visit]:
    head = novel(40, dice.randrange(100), 80)
    made = []
    for number in range(count):
        tail = tuple(dice.randrange(80) for _ in range(dice.randint(1, 30)))
        request = Request(
            (*head[: dice.randint(0, 40)], *tail),
            SamplingSpec(temperature=dice.choice((0.0, 0.8)), seed=dice.randrange(99)),
            max_new_tokens=dice.randint(1, 120),
            session=SessionId(f"s{number % 5}") if dice.random() < 0.6 else None,
            draft=dice.random() < 0.7,
            priority=dice.randint(-2, 2),
        )
        manner = dice.choice(("fast", "fast", "slow", "gone"))
        every_s = 0.0 if manner == "fast" else dice.uniform(0.05, 0.9 * UNREAD_S)
        reads = dice.randint(0, 3) if manner == "gone" else None
        made.append(Visit(dice.uniform(0.0, 3.0), request, every_s, reads))
    return made


def faults(dice: random.Random) -> FaultScript:
    kinds = (
        lambda nth: Drop(leg=dice.randrange(3), nth=nth),
        lambda nth: Lose(stage=dice.randrange(2), nth=nth),
        lambda nth: Restart(stage=dice.randrange(2), nth=nth),
        lambda nth: Stall(stage=dice.randrange(2), nth=nth, seconds=dice.uniform(1.0, 30.0)),
    )
    return tuple(dice.choice(kinds)(dice.randrange(200)) for _ in range(dice.randint(0, 3)))


async def played(seed: int) -> tuple[Watching, RingDriver]:
    dice, clock = random.Random(seed), VirtualClock()
    ring = FakeRing(
        2,
        3,
        192,
        vocab_size=80,
        language=MODEL,
        clock=clock,
        step_s=0.01,
        row_s=0.001,
        host_rows=dice.choice((0, 400)),
        faults=faults(dice),
    )
    driver = RingDriver("ring", ring, SETTINGS, clock)
    await driver.start(lambda progress: None)
    crowd = Watching(clock, driver, MODEL)
    await crowd.play(visits(dice, 12))
    return crowd, driver


def check(client: Client) -> None:
    lost = isinstance(client.end, SlowReader)
    assert lost or isinstance(client.end, Finished), client.end
    assert not lost or client.visit.reads is not None, "somebody who reads was given up"


@pytest.mark.parametrize("block", range(4))
async def test_no_reader_changes_a_token_or_keeps_a_lane(block: int) -> None:
    pauses = slow = epochs = sent_away = 0
    for seed in range(block * 7, block * 7 + 7):
        crowd, driver = await played(seed)
        for client in crowd.clients:
            check(client)
        status = driver.status()
        assert (status.running_jobs, status.waiting_jobs, status.busy_lanes) == (0, 0, 0), seed
        assert driver.idle
        assert status.resting_jobs == 0
        assert crowd.most_unread <= UNREAD + LATE, seed
        pauses, slow = pauses + status.counts.pauses, slow + status.counts.slow_readers
        epochs += status.epoch
        sent_away += sum(client.tries for client in crowd.clients)
        await driver.stop()
    # What would make the verdict hollow.
    assert min(pauses, slow, epochs, sent_away) > 0
