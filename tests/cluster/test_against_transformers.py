"""Greedy tokens through the Ray ring are those of transformers' own generate, with and without drafts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.requests import GREEDY, Finished, Request, SamplingSpec, TokenDelta

if TYPE_CHECKING:
    from stage.ray_ring import RayCluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),  # sixteen answers and the reference's eight on two cores
]

_TOKENS = 64

_CODE = """def parse_date(text: str) -> date:
    \"\"\"Reads a date in ISO form.\"\"\"
    year, month, day = text.split("-")
    return date(int(year), int(month), int(day))

def format_date(value: date) -> str:
"""

_PROMPTS = (
    "Hello",
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    _CODE,
    "Überraschung: 東京は日本の首都です。🙂 Καλημέρα κόσμε. Смотри",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    '{"name": "read_file", "arguments": {"path": "src/dates.py"}}\n{"name":',
    "The old fisherman looked at the sea. He had seen it all before. " * 110,  # 1,500 tokens
)


@pytest.fixture(scope="module")
def prompts(smollm2_dir: Path) -> list[tuple[int, ...]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    encoded = [tuple(tokenizer.encode(text)) for text in _PROMPTS]
    return [*encoded[:-1], encoded[-1][:1500]]


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    import torch
    from transformers import AutoModelForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
            do_sample=False,
            max_new_tokens=_TOKENS,
            min_new_tokens=_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(tuple(ids[0, len(prompt) :].tolist()))
    torch.set_num_threads(threads)
    return answers


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def driver(smollm2_dir: Path, ray_cluster: RayCluster) -> AsyncIterator[RingDriver]:
    from stage.config import RingConfig
    from stage.ray_ring import RayRing

    config = RingConfig(smollm2_dir, "smollm2", ((0, 15), (15, 30)), lanes=4, max_rows=2048)
    driver = RingDriver("ring-0", RayRing(config, ray_cluster), SchedulerSettings(), SystemClock())
    await driver.start(lambda progress: None)
    yield driver
    await driver.stop()


async def _answer(
    driver: RingDriver, prompt: tuple[int, ...], sampling: SamplingSpec, **options: bool
) -> tuple[tuple[int, ...], Finished]:
    tokens: list[int] = []
    request = Request(prompt, sampling, max_new_tokens=_TOKENS, **options)
    async with driver.submit(request) as stream:
        async for event in stream:
            if isinstance(event, TokenDelta):
                tokens.extend(event.tokens)
            elif isinstance(event, Finished):
                return tuple(tokens), event
    raise AssertionError("the stream ended without a word")


async def test_greedy_tokens_equal_generate_with_and_without_drafts(
    driver: RingDriver, prompts: list[tuple[int, ...]], reference: list[tuple[int, ...]]
) -> None:
    for draft in (True, False):
        # All at once, with more jobs than lanes: neighbours and the queue may not change a token.
        answers = await asyncio.gather(
            *(_answer(driver, prompt, GREEDY, draft=draft, reuse=False) for prompt in prompts)
        )
        assert [tokens for tokens, _ in answers] == reference
        drafted = sum(finished.timings.drafted for _, finished in answers)
        assert (drafted > 0) == draft
    assert sum(finished.timings.accepted for _, finished in answers) == 0
