"""Hybrid models behind a restart: a conversation goes on from the state that the stages left on disk, and is right."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import transformers

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.drafters.none import NoDrafter
from coordinator.driver import RingDriver
from coordinator.requests import Request, SessionId, Started, TokenDelta
from stage.config import RingConfig
from stage.local_ring import LocalRing

VOCABULARY = 160
ANSWER = 12
# Four layers, the last of which attends: of three stages, one has recurrent layers only and one has none.
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
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


@dataclass(frozen=True)
class Turn:
    tokens: tuple[int, ...]
    cached: int


def saved_model(folder: Path, seed: int) -> Path:
    transformers.set_seed(seed)
    config = transformers.Qwen3_5TextConfig(**SMALL)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("hybrid"), 3)


@asynccontextmanager
async def driven(
    model: Path, disk: Path | None, splits: tuple[tuple[int, int], ...] = TWO, **rest: int
) -> AsyncIterator[RingDriver]:
    config = RingConfig(model, "hybrid", splits, 1, 512, kv_host_bytes=2**26, kv_disk=disk, **rest)
    ring = LocalRing(config)
    driver = RingDriver("ring-0", ring, SchedulerSettings(), SystemClock(), lambda *_: NoDrafter())
    await driver.start(lambda _: None)
    try:
        yield driver
    finally:
        await driver.stop()


async def play(driver: RingDriver, prompt: Sequence[int], session: str | None) -> Turn:
    """One turn; without a session it is cold."""
    request = Request(
        tuple(prompt),
        max_new_tokens=ANSWER,
        boundaries=(0, 40, len(prompt) - 3),
        anchor=40,
        session=None if session is None else SessionId(session),
        reuse=session is not None,
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


async def two_turns(driver: RingDriver) -> tuple[int, ...]:
    """A conversation, and then another one in its lane, so that all of it is stored. Returns the third prompt."""
    prompt = HEAD + words(1, 100)
    for number in range(2):
        prompt = prompt + (await play(driver, prompt, "a")).tokens + words(10 + number, 20)
    await play(driver, words(99, 150), "b")
    return prompt


def restore_point(third: tuple[int, ...]) -> int:
    """The end of the second turn: its last token was never written to a row."""
    return len(third) - 20 - 1


@pytest.mark.parametrize("splits", [TWO, THREE])
async def test_the_third_turn_behind_a_restart_starts_where_the_second_ended(
    model: Path, tmp_path: Path, splits: tuple[tuple[int, int], ...]
) -> None:
    async with driven(model, tmp_path, splits) as driver:
        third = await two_turns(driver)
    async with driven(model, tmp_path, splits) as driver:
        warm = await play(driver, third, "a")
        assert warm.cached == restore_point(third)
        assert warm.tokens == (await play(driver, third, None)).tokens
        # Another conversation with the same head begins behind it.
        other = HEAD + words(55, 60)
        first = await play(driver, other, "c")
        assert first.cached == len(HEAD)
        assert first.tokens == (await play(driver, other, None)).tokens
        assert driver.status().counts.refusals == 0


def files(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(pattern))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [cut, Path.unlink], ids=["cut", "vanished"])
@pytest.mark.parametrize("is_running", [True, False], ids=["while it runs", "before the start"])
async def test_one_stages_damaged_states_cost_time_and_no_token(
    model: Path, tmp_path: Path, damage: Callable[[Path], None], is_running: bool
) -> None:
    async with driven(model, tmp_path) as driver:
        third = await two_turns(driver)
    states = files(tmp_path, "*.2-4.state")
    assert states
    if not is_running:
        for path in states:
            damage(path)
    async with driven(model, tmp_path) as driver:
        if is_running:
            for path in states:
                damage(path)
        turn = await play(driver, third, "a")
        assert turn.tokens == (await play(driver, third, None)).tokens
        assert (driver.status().counts.refusals > 0) is is_running
        # What was computed instead is kept again.
        fourth = third + turn.tokens + words(30, 20)
        assert (await play(driver, fourth, "a")).cached == restore_point(fourth)


async def test_another_models_states_are_not_used(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = saved_model(tmp_path / "other", 4)
    async with driven(model, tmp_path / "disk") as driver:
        third = await two_turns(driver)
    async with driven(other, tmp_path / "disk") as driver:
        assert caplog.text.count("files of other rows") == 2  # a line of each stage
        turn = await play(driver, third, "a")
        assert turn.cached == 0
        assert turn.tokens == (await play(driver, third, None)).tokens


async def test_rows_and_states_stay_within_the_budget_of_the_disk(
    model: Path, tmp_path: Path
) -> None:
    budget = 150_000
    for _ in range(2):
        async with driven(model, tmp_path, kv_disk_bytes=budget) as driver:
            for number in range(4):
                prompt = words(number, 150)
                turn = await play(driver, prompt, f"{number}")
                assert turn.tokens == (await play(driver, prompt, None)).tokens
        for suffix in ("*.0-2.*", "*.2-4.*"):
            assert 0 < sum(path.stat().st_size for path in files(tmp_path, suffix)) <= budget
