"""Multi-turn cache faults that others reported, as properties of a real ring with a tiny model.

Cold means: another ring, of one stage and one lane, that computes every row of the prompt and drafts nothing. Each
verdict of equality stands behind a cold-against-cold control, and each case about reuse asserts that rows were reused.
(jundot/omlx#1803, a speed-up that was only warm-up, is the benchmark's: it has an unseen-prefix control.)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.drafters import Drafter, DrafterFactory
from coordinator.drafters.ngram import ngram_drafter
from coordinator.driver import RingDriver
from coordinator.frames import JobId
from coordinator.prefixes import common_prefix
from coordinator.requests import (
    Finished,
    Request,
    RowLogprobs,
    SamplingSpec,
    SessionId,
    Started,
    TokenDelta,
)
from fakering.texts import changed, novel, repetitive, shifted
from stage.config import RingConfig
from stage.local_ring import LocalRing

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCABULARY = 199
CHUNK = 16
COUNT = 4  # tokens of an answer
TWO_STAGES = ((0, 2), (2, 4))
THREE_STAGES = ((0, 1), (1, 3), (3, 4))


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[RowLogprobs, ...]
    started: Started
    finished: Finished

    @property
    def cached(self) -> int:
        return self.finished.usage.cached_prefix


@asynccontextmanager
async def ring_of(
    folder: Path,
    splits: tuple[tuple[int, int], ...] = TWO_STAGES,
    *,
    lanes: int = 3,
    max_drafts: int = 15,
    drafters: DrafterFactory = ngram_drafter,
) -> AsyncIterator[RingDriver]:
    settings = SchedulerSettings(
        frame_rows=32, chunk_rows=CHUNK, min_chunk_rows=4, min_copy_rows=1, max_drafts=max_drafts
    )
    ring = LocalRing(RingConfig(folder, "tiny", splits, lanes, max_rows=512))
    driver = RingDriver("ring", ring, settings, SystemClock(), drafters)
    await driver.start(lambda progress: None)
    try:
        yield driver
    finally:
        await driver.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def warm_ring(tiny_model: Path) -> AsyncIterator[RingDriver]:
    async with ring_of(tiny_model) as driver:
        yield driver


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cold_ring(tiny_model: Path) -> AsyncIterator[RingDriver]:
    async with ring_of(tiny_model, ((0, 4),), lanes=1) as driver:
        yield driver


async def answer(driver: RingDriver, request: Request) -> Answer:
    tokens: list[int] = []
    logprobs: list[RowLogprobs] = []
    started = None
    async with driver.submit(request) as stream:
        async for event in stream:
            match event:
                case Started():
                    started = event
                case TokenDelta():
                    tokens.extend(event.tokens)
                    logprobs.extend(event.logprobs)
                case Finished():
                    assert started is not None
                    return Answer(tuple(tokens), tuple(logprobs), started, event)
    raise AssertionError("the stream ended without a word")


def turn(prompt: Sequence[int], session: str | None = None, count: int = COUNT) -> Request:
    owner = None if session is None else SessionId(session)
    return Request(tuple(prompt), max_new_tokens=count, session=owner)


async def cold(driver: RingDriver, request: Request) -> Answer:
    got = await answer(driver, replace(request, session=None, reuse=False, draft=False))
    assert got.cached == 0
    return got


async def control(cold_ring: RingDriver, warm_ring: RingDriver, request: Request) -> Answer:
    """Cold twice, on two rings: what follows is the cache's doing, not the machine's."""
    first, second = await cold(cold_ring, request), await cold(warm_ring, request)
    assert first.tokens == second.tokens
    return first


@pytest.mark.parametrize("chunks", range(1, 13))
async def test_the_first_call_and_all_identical_later_ones_answer_alike(
    warm_ring: RingDriver, cold_ring: RingDriver, chunks: int
) -> None:
    """vllm-project/vllm#40896: with a prefix cache the first call differs from the later ones."""
    for length in (CHUNK * chunks, CHUNK * chunks + 1 - 2 * (chunks % 2)):
        request = turn(novel(length, length, VOCABULARY), f"s{length}")
        expected = await control(cold_ring, warm_ring, request)
        answers = [await answer(warm_ring, request) for _ in range(3)]
        assert {got.tokens for got in answers} == {expected.tokens}
        assert [got.cached for got in answers[1:]] == [length] * 2


async def test_forty_branches_of_one_head_reuse_it_and_answer_as_cold_ones_do(
    tiny_model: Path, cold_ring: RingDriver
) -> None:
    """sgl-project/sglang#34683: a radix hit flips 18 of 40 greedy outputs."""
    head = novel(60, 1, VOCABULARY)
    seen = set()
    # A lane for each, so that the head is never overwritten.
    async with ring_of(tiny_model, lanes=41) as driver:
        await answer(driver, turn(head, "head"))
        for number in range(40):
            depth = 8 + number
            tail = changed((head[depth], *novel(number % 7, 50 + number, VOCABULARY)), 0, 199)
            request = turn((*head[:depth], *tail), f"branch{number}")
            expected = (await cold(cold_ring, request)).tokens
            if number % 5 == 0:
                assert expected == (await cold(cold_ring, request)).tokens
            got = await answer(driver, request)
            assert got.cached == depth
            assert got.tokens == expected, number
            seen.add(expected)
    assert len(seen) > 30, "answers so alike could not show a flip"


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 5 * CHUNK + 7])
async def test_a_full_hit_does_not_break_the_chain_behind_it(
    warm_ring: RingDriver, cold_ring: RingDriver, length: int
) -> None:
    """vllm-project/vllm#11186: a full hit recomputes one token, and what is built on it finds nothing."""
    prompt = novel(length, 300 + length, VOCABULARY)
    session = f"chain{length}"
    first = await answer(warm_ring, turn(prompt, session))
    again = await answer(warm_ring, turn(prompt, session))
    assert (again.cached, again.tokens) == (length, first.tokens)
    history = (*prompt, *again.tokens)
    more = turn((*history, *novel(CHUNK, 5, VOCABULARY)), session)
    got = await answer(warm_ring, more)
    assert got.cached == len(history) - 1  # the last sampled token was never written
    assert got.tokens == (await control(cold_ring, warm_ring, more)).tokens
    branch = turn((*prompt, (first.tokens[0] + 1) % VOCABULARY, *novel(CHUNK, 6, 199)), session)
    got = await answer(warm_ring, branch)
    assert got.cached == length
    assert got.tokens == (await control(cold_ring, warm_ring, branch)).tokens


Trap = Callable[[tuple[int, ...]], tuple[int, ...]]
TRAPS: dict[str, Trap] = {
    "a branch of the first turn": lambda rows: (*rows[:40], *novel(20, 8, VOCABULARY)),
    "a branch before its end": lambda rows: (*rows[:23], *novel(30, 9, VOCABULARY)),
    "one token changed early": lambda rows: changed(rows, 3, VOCABULARY),
    "one token changed late": lambda rows: changed(rows, 70, VOCABULARY),
    "the same rows shifted by one": lambda rows: shifted(rows),
    "a prefix of it": lambda rows: rows[:31],
}


@pytest.mark.parametrize("owner", ["same", "new"])
async def test_a_slot_that_was_used_deeper_answers_only_for_what_it_holds(
    tiny_model: Path, cold_ring: RingDriver, owner: str
) -> None:
    """davidmroth/lucebox-hub@acc3ea3: a slot refreshed deeper in place still answers for a shallow key."""
    async with ring_of(tiny_model, lanes=2) as driver:
        for seed, (name, trap) in enumerate(TRAPS.items(), start=100):
            rows = await _deepened(driver, f"{seed}", seed)
            request = turn(trap(rows), f"{seed}" if owner == "same" else f"new{seed}")
            got = await answer(driver, request)
            shared = common_prefix(rows, request.prompt)
            assert got.cached == min(shared, len(request.prompt) - 1), name
            assert got.tokens == (await cold(cold_ring, request)).tokens, name


async def _deepened(driver: RingDriver, session: str, seed: int) -> tuple[int, ...]:
    """Two turns of a session in one lane; returns the rows that it holds then."""
    short = novel(40, seed, VOCABULARY)
    first = await answer(driver, turn(short, session))
    deep = (*short, *first.tokens, *novel(60, seed + 1000, VOCABULARY))
    second = await answer(driver, turn(deep, session))
    assert second.cached == len(short) + COUNT - 1
    assert second.started.lane == first.started.lane
    return (*deep, *second.tokens)[:-1]


class _Scripted:
    """A drafter that knows the answer and is wrong where its pattern says so."""

    def __init__(self, truth: tuple[int, ...], prompt: int, pattern: Sequence[bool]) -> None:
        self._truth = truth
        self._known = -prompt
        self._right = pattern

    def extend(self, tokens: Sequence[int]) -> None:
        self._known += len(tokens)

    def draft(self, guess: Sequence[int], limit: int) -> tuple[int, ...]:
        start = self._known + len(guess)
        wanted = self._truth[start : start + limit]
        right = [
            self._right[place % len(self._right)] for place in range(start, start + len(wanted))
        ]
        return tuple(
            token if ok else (token + 1) % VOCABULARY
            for token, ok in zip(wanted, right, strict=True)
        )

    def close(self) -> None:
        return None


PATTERNS = {
    "always right": (True,),
    "never right": (False,),
    "every third is wrong": (True, True, False),
    "wrong in runs": (True,) * 9 + (False,) * 3,
}


@pytest.mark.parametrize("drafts", [1, 2, 4])
async def test_drafts_through_three_stages_change_no_token(
    tiny_model: Path, cold_ring: RingDriver, drafts: int
) -> None:
    """vllm-project/vllm#57755: stages that pass on the first sampled column only garble speculated text."""
    request = replace(turn(novel(30, 40, VOCABULARY), count=24), reuse=False)
    plain = await cold(cold_ring, request)
    assert (await cold(cold_ring, request)).tokens == plain.tokens
    patterns = iter(PATTERNS.values())

    def scripted(job: JobId, wake: Callable[[], object], tenant: str) -> Drafter:
        return _Scripted(plain.tokens, len(request.prompt), next(patterns))

    async with ring_of(tiny_model, THREE_STAGES, max_drafts=drafts, drafters=scripted) as driver:
        for pattern in PATTERNS:
            got = await answer(driver, request)
            assert got.tokens == plain.tokens, pattern
            timings = got.finished.timings
            assert timings.drafted > 0
            assert (timings.accepted > 0) == (pattern != "never right")
            assert (timings.accepted < timings.drafted) == (pattern != "always right")


CANARY = (13, 198, 7, 198, 13) * 12
PROBE = SamplingSpec(temperature=0.0, logprobs=20)


async def _beside_a_canary(driver: RingDriver, request: Request) -> list[Answer]:
    """The request's answers: alone, where the canary's lane was, and while the canary decodes."""
    alone = await answer(driver, request)
    await answer(driver, turn(CANARY, "canary", 6))
    after = await answer(driver, request)
    driver.close_session(SessionId("canary"))
    taken = await answer(driver, request)
    canary, beside = await asyncio.gather(
        answer(driver, turn(CANARY, "canary", 24)), answer(driver, request)
    )
    assert len(canary.tokens) == 24
    return [alone, after, taken, beside]


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("reuse", [True, False])
async def test_one_sessions_context_never_reaches_another(
    tiny_model: Path, cold_ring: RingDriver, lanes: int, reuse: bool
) -> None:
    """itigges22/ATLAS#87: a suspected leak of one session's context into another through a kept slot.

    Bit-equal log-probabilities of the 20 likeliest tokens of each row stand for the logits.
    """
    request = Request(novel(50, 61, VOCABULARY), PROBE, 8, session=SessionId("other"), reuse=reuse)
    expected = await cold(cold_ring, request)
    assert len(expected.logprobs[0].top) == 20
    async with ring_of(tiny_model, lanes=lanes) as driver:
        for got in await _beside_a_canary(driver, request):
            assert (got.tokens, got.logprobs) == (expected.tokens, expected.logprobs)
    # Shows that a leak would be seen: the canary before the prompt changes every figure.
    leaked = await cold(cold_ring, replace(request, prompt=(*CANARY, *request.prompt)))
    assert leaked.logprobs[0] != expected.logprobs[0]


async def _dialogue(driver: RingDriver, draft: bool) -> list[Answer]:
    history: tuple[int, ...] = ()
    answers = []
    for number in range(3):
        history += repetitive(25 + 3 * number, 70, VOCABULARY, period=5)
        got = await answer(driver, replace(turn(history, "talk", 12), draft=draft))
        answers.append(got)
        history += got.tokens
    return answers


async def test_a_drafter_takes_nothing_off_the_cache(tiny_model: Path) -> None:
    """vllm-project/vllm#54360: turning on any drafter makes hits fall to 0 without a warning."""
    async with ring_of(tiny_model) as driver:
        plain = await _dialogue(driver, draft=False)
    for later, earlier in zip(plain[1:], plain, strict=False):
        assert later.cached == earlier.started.prompt_tokens + len(earlier.tokens) - 1
    for pattern in PATTERNS.values():
        turns = iter(plain)

        def scripted(job: JobId, wake: Callable[[], object], tenant: str) -> Drafter:
            truth = next(turns)  # noqa: B023  # the ring of this pattern alone asks
            return _Scripted(truth.tokens, truth.started.prompt_tokens, pattern)  # noqa: B023

        async with ring_of(tiny_model, drafters=scripted) as driver:
            drafted = await _dialogue(driver, draft=True)
        assert [got.tokens for got in drafted] == [got.tokens for got in plain]
        assert all(got.finished.timings.drafted > 0 for got in drafted)
        assert [got.cached for got in drafted] == [got.cached for got in plain]
