"""Warm and cold logits are the same bits, wherever the prefix came from: 200 random dialogues on a real small model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from torch import Tensor

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.events import Send
from coordinator.frames import CopyRows, Frame, LoadNodes, OpenLane, Segment, SegmentKind
from coordinator.requests import Request, SessionId
from stage.config import RingConfig
from stage.local_ring import LocalRing

DIALOGUES = 200
RESTART_EVERY = 50


class Watched:
    """A ring whose tail's logits and whose openings can be seen."""

    def __init__(self, driver: RingDriver, ring: LocalRing) -> None:
        self.driver = driver
        self.logits: list[Tensor] = []
        self.sources: Counter[str] = Counter()
        memos = ring._threads[-1].stage._memos
        merged = memos.sampled

        def seen(taken: tuple[Segment, ...], logits: Tensor | None) -> Tensor | None:
            """What is sampled from, be it computed or recalled."""
            output = merged(taken, logits)
            if output is not None and len(output):
                self.logits.append(output[-1].clone())
            return output

        memos.sampled = seen  # type: ignore[method-assign]
        core = driver._scheduler
        assert core is not None
        self._ops_from(core)

    def _ops_from(self, core: object) -> None:
        on = core.on  # type: ignore[attr-defined]

        def noted(event: object) -> list[object]:
            actions: list[object] = on(event)
            for action in actions:
                if isinstance(action, Send):
                    self._note_all(action.frame)
            return actions

        core.on = noted  # type: ignore[attr-defined]

    def _note_all(self, frame: Frame) -> None:
        for op in frame.ops:
            self._note(op)
        recalled = (s.kind is SegmentKind.RECALL for s in frame.segments)
        self.sources["a memo"] += sum(recalled)

    def _note(self, op: object) -> None:
        if isinstance(op, LoadNodes):
            self.sources["store"] += 1
        elif isinstance(op, CopyRows):
            self.sources["another lane"] += 1
        elif isinstance(op, OpenLane) and op.cached_prefix:
            self.sources["a lane"] += 1

    async def first_logits(self, prompt: tuple[int, ...], session: str | None) -> Tensor:
        """Of the prompt's last row, which seed the answer."""
        self.logits.clear()
        request = Request(
            prompt,
            max_new_tokens=3,
            session=None if session is None else SessionId(session),
            reuse=session is not None,
            draft=False,
        )
        async with self.driver.submit(request) as stream:
            async for _ in stream:
                pass
        return self.logits[0]


@asynccontextmanager
async def watched(model: Path, disk: Path) -> AsyncIterator[Watched]:
    config = RingConfig(model, "tiny", ((0, 2), (2, 4)), 3, 512, kv_host_bytes=2**23, kv_disk=disk)
    ring = LocalRing(config)
    settings = SchedulerSettings(node_rows=16, min_copy_rows=4, chunk_rows=64)
    driver = RingDriver("ring-0", ring, settings, SystemClock())
    await driver.start(lambda _: None)
    try:
        yield Watched(driver, ring)
    finally:
        await driver.stop()


async def test_warm_logits_are_those_of_a_cold_run_wherever_the_prefix_came_from(
    tiny_model: Path, tmp_path: Path
) -> None:
    """sgl-project/sglang#34683 and vllm-project/vllm#40896: a hit may not flip a token. With a cold-cold control."""
    dice = random.Random(11)
    heads = [tuple(dice.randrange(3, 199) for _ in range(60)) for _ in range(3)]
    past: dict[str, tuple[int, ...]] = {}
    sources: Counter[str] = Counter()
    behind_restart = 0
    for begin in range(0, DIALOGUES, RESTART_EVERY):
        async with watched(tiny_model, tmp_path) as ring:
            for number in range(begin, begin + RESTART_EVERY):
                session, prompt = _next_prompt(dice, heads, past)
                warm = await ring.first_logits(prompt, session)
                if number == begin and number:
                    behind_restart += ring.sources["store"]
                cold = await ring.first_logits(prompt, None)
                assert torch.equal(warm, cold), f"dialogue {number}"
                if number % 10 == 0:
                    assert torch.equal(cold, await ring.first_logits(prompt, None))
                past[session] = prompt
            sources += ring.sources
    assert min(sources["store"], sources["a lane"]) > 20, sources
    assert sources["another lane"] > 0, sources
    assert sources["a memo"] > 5, sources
    assert behind_restart > 0


def _next_prompt(
    dice: random.Random, heads: list[tuple[int, ...]], past: dict[str, tuple[int, ...]]
) -> tuple[str, tuple[int, ...]]:
    """A turn that goes on, a branch, a resend, or a conversation of its own behind a shared head."""
    fresh = tuple(dice.randrange(3, 199) for _ in range(dice.randint(1, 40)))
    if past and dice.random() < 0.7:
        session = dice.choice(sorted(past))
        before = past[session]
        keep = len(before) if dice.random() < 0.7 else dice.randint(1, len(before))
        prompt = before[:keep] + (() if dice.random() < 0.15 else fresh)
        return session, prompt[:400]
    return f"s{dice.randrange(12)}", dice.choice(heads) + fresh
