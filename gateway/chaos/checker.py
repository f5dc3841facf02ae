"""What must be so when the storm is over: every answer is the cold one, nothing is left over, accounts agree.

Decides what is wrong, and says it in a line each. It asks the rings, their stages' processes and an undisturbed ring.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.errors import SetupError
from coordinator.frames import Epoch
from coordinator.router import Router
from coordinator.status import RingStatus
from gateway.chaos.book import Book
from gateway.chaos.moments import SeenRing
from gateway.chaos.player import request_of
from gateway.chaos.processes import has_ended, stage_pids
from gateway.chaos.traffic import Ask
from gateway.chaos.victims import OfProcesses
from gateway.chaos.waiting import until
from gateway.client import Client
from gateway.turns import TurnDelta

_MOST_LANES = 1 << 16
# For one answer of a ring that nothing disturbs.
_COLD_S = 600.0

Cold = Mapping[Ask, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Wrong:
    """An answer that is not the cold one, and how often it was given."""

    ask: Ask
    tokens: tuple[int, ...]
    cold: tuple[int, ...]
    streams: int

    def __str__(self) -> str:
        pairs = zip(self.tokens, self.cold, strict=False)
        same = next(
            (n for n, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(self.cold))
        )
        sampled = (
            "greedy" if not self.ask.sampling.temperature else f"seed {self.ask.sampling.seed}"
        )
        return (
            f"{self.streams} streams of {len(self.ask.prompt)} prompt tokens ({sampled}) differ from their cold "
            f"answer at token {same} of {len(self.cold)}"
        )


async def cold_answers(
    client: Client, asks: Sequence[Ask], beside: int, tell: Callable[[str], None]
) -> dict[Ask, tuple[int, ...]]:
    """Each ask alone on what it reads: no reuse, no drafts. `beside`: how many run at once. Raises SetupError when an
    answer is not as long as it was asked to be: then it is no measure of others.
    """
    room, found = asyncio.Semaphore(beside), {}

    async def play(ask: Ask) -> None:
        tokens: list[int] = []
        request = request_of(ask, cold=True, timeout_s=_COLD_S)
        async with room, client.generate(request) as stream:
            async for event in stream:
                if isinstance(event, TurnDelta):
                    tokens.extend(event.token_ids)
        if len(tokens) != ask.max_tokens:
            told = f"{len(tokens)} tokens where {ask.max_tokens} were asked for"
            raise SetupError(f"an undisturbed ring answered {told}")
        found[ask] = tuple(tokens)
        if len(found) % 50 == 0:
            tell(f"{len(found)} of {len(asks)} cold answers")

    await asyncio.gather(*(play(ask) for ask in asks))
    return found


def wrong_answers(book: Book, cold: Cold) -> list[Wrong]:
    """What was cut off and asked again has to be how the cold answer begins."""
    whole = [
        Wrong(ask, tokens, cold[ask], streams)
        for ask, given in book.answers.items()
        for tokens, streams in given.items()
        if tokens != cold[ask]
    ]
    return whole + [
        Wrong(ask, tokens, cold[ask], streams)
        for ask, given in book.beginnings.items()
        for tokens, streams in given.items()
        if tokens != cold[ask][: len(tokens)]
    ]


class EndCheck:
    """Of the rings that were struck and of those that were not, once no stream runs any more."""

    def __init__(self, router: Router, rings: Sequence[SeenRing], spares: int) -> None:
        self._router = router
        self._rings = rings
        self._spares = spares

    async def problems(self, struck: str, within_s: float) -> list[str]:
        """Waits until everything is at rest; what is not in time is a problem. Afterwards rings take no frames."""
        await until(lambda: not self._unrest(), within_s)
        found = self._unrest()
        for ring in self._rings:
            if ring.name != struck and ring.openings:
                found.append(f"{ring.name} was not struck, and lost {len(ring.openings)} epochs")
        if found:
            return found
        return [told for ring in self._rings for told in await self._audit(ring)]

    def _unrest(self) -> list[str]:
        found = []
        for status in self._router.rings():
            found += [f"{status.name}: {told}" for told in _unrest(status)]
        return found + self._processes()

    def _processes(self) -> list[str]:
        of_processes = [ring.inner for ring in self._rings if isinstance(ring.inner, OfProcesses)]
        if not of_processes:
            return []
        seated = {pid for ring in of_processes for pid in (*ring.pids, *ring.spares)}
        found = [f"process {pid} belongs to no ring" for pid in stage_pids() if pid not in seated]
        short = [ring for ring in of_processes if len(ring.spares) < self._spares]
        return found + [f"{len(ring.spares)} of {self._spares} spares" for ring in short]

    async def _audit(self, ring: SeenRing) -> list[str]:
        """What the coordinator believes against what every stage says that it holds."""
        status = next(each for each in self._router.rings() if each.name == ring.name)
        lanes = self._router.lanes(ring.name, _MOST_LANES)
        nodes = {each.node.id for each in self._router.nodes(ring.name)}
        held = await ring.inner.open_epoch(Epoch(status.epoch + 1))
        found = []
        for lane in lanes:
            rows = len(held.lane(lane.lane).tokens)
            if rows != lane.valid_rows:
                told = f"{ring.name}: lane {lane.lane} has {rows} rows"
                found.append(f"{told}, {lane.valid_rows} are believed")
        kept = {node.id for node in held.nodes}
        if kept != nodes:
            told = f"{ring.name}: stages keep {len(kept - nodes)} nodes that nobody knows"
            found.append(f"{told}, and lack {len(nodes - kept)}")
        return found


def _unrest(status: RingStatus) -> Iterable[str]:
    """What should be nought or false of a ring at rest."""
    if status.info is None or not status.ready:
        yield f"is not ready: {status.reason}"
    for name in ("busy_lanes", "waiting_jobs", "running_jobs", "frames_in_flight", "pinned_rows"):
        if count := getattr(status, name):
            yield f"{count} {name.replace('_', ' ')} at rest"
    if status.info is not None and status.stored_rows > status.info.host_rows:
        yield f"{status.stored_rows} rows stored, and room for {status.info.host_rows}"


async def left_over(before: Sequence[int], within_s: float) -> list[str]:
    """Stages' processes when all rings have been stopped. `before`: those that there were then, since who outlives its
    raylet is this process's descendant no more.
    """

    def left() -> list[int]:
        return sorted(pid for pid in {*before, *stage_pids()} if not has_ended(pid))

    await until(lambda: not left(), within_s)
    return [f"process {pid} is left over" for pid in left()]
