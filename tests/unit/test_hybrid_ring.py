"""Conversations of models with recurrent layers on a whole ring: never cold again after the first turn, never wrong."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.drafters import Drafter
from coordinator.driver import RingDriver
from coordinator.frames import JobId
from coordinator.requests import Request, SessionId, Started, TokenDelta
from stage.config import RingConfig
from stage.local_ring import LocalRing

VOCABULARY = 160
ANSWER = 24
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}
TWO, THREE = ((0, 2), (2, 4)), ((0, 1), (1, 3), (3, 4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers.set_seed(3)
    config = transformers.Qwen3_5TextConfig(**SMALL)
    folder = tmp_path_factory.mktemp("hybrid")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


class Oracle(Drafter):
    """Drafts that are right as often as asked: it knows the answer, and errs by a seeded dice."""

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, ...]], right: float) -> None:
        self._answers = answers
        self._right = right
        self._context: list[int] = []
        self._dice = random.Random(1)

    def extend(self, tokens: Sequence[int]) -> None:
        self._context.extend(tokens)

    def draft(self, guess: Sequence[int], limit: int) -> tuple[int, ...]:
        now = (*self._context, *guess)
        for prompt, answer in self._answers.items():
            whole = prompt + answer
            if len(now) >= len(prompt) and whole[: len(now)] == now:
                right = whole[len(now) : len(now) + limit]
                return tuple(
                    t if self._dice.random() < self._right else (t + 1) % VOCABULARY for t in right
                )
        return tuple(self._dice.randrange(VOCABULARY) for _ in range(limit))

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Turn:
    tokens: tuple[int, ...]
    cached: int


Answers = dict[tuple[int, ...], tuple[int, ...]]


@asynccontextmanager
async def driven(
    folder: Path,
    splits: tuple[tuple[int, int], ...],
    answers: Answers | None = None,
    right: float = 1.0,
    lanes: int = 1,
) -> AsyncIterator[RingDriver]:
    config = RingConfig(folder, "hybrid", splits, lanes, 1024, kv_host_bytes=2**26)

    def drafters(job: JobId, wake: object, tenant: str) -> Drafter:
        return Oracle(answers or {}, right)

    driver = RingDriver("ring-0", LocalRing(config), SchedulerSettings(), SystemClock(), drafters)
    await driver.start(lambda _: None)
    try:
        yield driver
    finally:
        await driver.stop()


async def play(
    driver: RingDriver, prompt: Sequence[int], session: str | None, *, reuse: bool = True
) -> Turn:
    request = Request(
        tuple(prompt),
        max_new_tokens=ANSWER,
        boundaries=(0, 40, len(prompt) - 3),
        anchor=40,
        session=None if session is None else SessionId(session),
        reuse=reuse,
        draft=reuse,
    )
    tokens: list[int] = []
    cached = -1
    async with driver.submit(request) as stream:
        async for event in stream:
            if isinstance(event, Started):
                cached = event.cached_prefix
            elif isinstance(event, TokenDelta):
                tokens.extend(event.tokens)
    return Turn(tuple(tokens), cached)


def words(seed: int, count: int) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.randrange(3, VOCABULARY) for _ in range(count))


HEAD = words(0, 40)


async def cold_answers(folder: Path) -> tuple[list[tuple[int, ...]], Answers]:
    """Six turns, each extending the one before; every row of each computed."""
    prompts: list[tuple[int, ...]] = []
    answers: Answers = {}
    async with driven(folder, TWO) as driver:
        prompt = HEAD + words(1, 150)
        for number in range(6):
            prompts.append(prompt)
            answers[prompt] = (await play(driver, prompt, None, reuse=False)).tokens
            prompt = prompt + answers[prompt] + words(10 + number, 30)
    return prompts, answers


@pytest.mark.parametrize("splits", [TWO, THREE])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
async def test_six_turns_with_any_drafter_stay_warm_and_right(
    folder: Path, splits: tuple[tuple[int, int], ...], right: float
) -> None:
    """vllm-project/vllm#43559, ml-explore/mlx-lm#1109, vllm-project/vllm#57755: rejected drafts leave no trace.

    The first of three stages has recurrent layers only (vllm-project/vllm#51752).
    """
    prompts, answers = await cold_answers(folder)
    async with driven(folder, splits, answers, right) as driver:
        previous = 0
        for number, prompt in enumerate(prompts):
            turn = await play(driver, prompt, "a")
            assert turn.tokens == answers[prompt]
            # All that the turn before left, but for the last token, which was never written.
            assert turn.cached == (0 if number == 0 else previous + ANSWER - 1)
            previous = len(prompt)
        counts = driver.status().counts
        assert counts.refusals == 0
        assert counts.accepted == 0 if right == 0.0 else counts.accepted > 0


async def test_regenerate_branch_and_eviction_go_on_from_checkpoints(folder: Path) -> None:
    """ggml-org/llama.cpp#24003: an exact resend on layers that cannot be rewound, three times over."""
    prompts, answers = await cold_answers(folder)
    async with driven(folder, TWO, answers) as driver:
        for prompt in prompts[:3]:
            await play(driver, prompt, "a")
        for _ in range(3):
            again = await play(driver, prompts[2], "a")
            assert again.tokens == answers[prompts[2]]
            assert again.cached == len(prompts[2]) - 1
        # A branch of an earlier turn: everything up to its end is there.
        branch = prompts[1] + words(77, 12)
        warm = await play(driver, branch, "b")
        assert warm.cached >= len(prompts[1]) - 1
        assert warm.tokens == (await play(driver, branch, None, reuse=False)).tokens
        # Another head takes the only lane; then the conversation comes back from the store.
        await play(driver, words(99, 300), "c")
        back = await play(driver, prompts[3], "a")
        assert back.tokens == answers[prompts[3]]
        assert back.cached >= len(prompts[2]) + ANSWER - 1
        # Another conversation with the same head begins behind it.
        other = HEAD + words(55, 60)
        first = await play(driver, other, "d")
        assert first.cached == len(HEAD)
        assert first.tokens == (await play(driver, other, None, reuse=False)).tokens


async def test_a_stage_that_lost_its_checkpoints_costs_time_and_no_token(folder: Path) -> None:
    """LMCache/LMCache#2863: only the attention rows came back."""
    prompts, answers = await cold_answers(folder)
    async with driven(folder, TWO, answers) as driver:
        await play(driver, prompts[0], "a")
        await play(driver, words(99, 300), "c")
        ring = driver._ring
        assert isinstance(ring, LocalRing)
        lost = ring._threads[0].stage._ops._checkpoints
        lost.drop(tuple(lost._saved))
        turn = await play(driver, prompts[1], "a")
        assert turn.tokens == answers[prompts[1]]
        assert turn.cached == 0, "what was told is what was reused"
        assert driver.status().counts.refusals > 0
        assert (await play(driver, prompts[2], "a")).cached == len(prompts[1]) + ANSWER - 1


async def test_tokens_are_those_of_transformers(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts, answers = await cold_answers(folder)
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = model.generate(ids, max_new_tokens=ANSWER, do_sample=False, pad_token_id=0)
        assert tuple(whole[0, len(prompt) :].tolist()) == answers[prompt]
