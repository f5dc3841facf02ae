"""A session in Claude Code's shapes keeps its rows: each main turn reuses the one before it, whatever came between.

anthropics/claude-code#63469 (system messages in the middle of a conversation), and the billing line in the head that
is another one in each request: servers that move the one or keep the other compute everything again.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from anthropic import AsyncAnthropic

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.router import Router
from fakering.model import FakeModel
from fakering.ring import FakeRing
from gateway.chat.byte_tokenizer import END, ByteTokenizer
from gateway.chat.tokenizer import ChatTokenizer, load_tokenizer
from gateway.http.server import serve_http
from gateway.service import GenerationService
from gateway.settings import HttpSettings
from stage.config import RingConfig
from stage.local_ring import LocalRing
from tests.compat.claude_code import ClaudeCode, Main

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from coordinator.ring import Ring

ENOUGH = 0.95


@asynccontextmanager
async def _served(ring: Ring, tokenizer: ChatTokenizer) -> AsyncIterator[AsyncAnthropic]:
    driver = RingDriver("ring-0", ring, SchedulerSettings(), SystemClock())
    router = Router([driver], session_limit=64)
    service = GenerationService("m", router, tokenizer, SystemClock(), random.Random(1))
    await driver.start(lambda _: None)
    try:
        async with (
            serve_http(service, HttpSettings(drain_s=1.0)) as address,
            AsyncAnthropic(base_url=f"http://{address}", api_key="none", max_retries=0) as client,
        ):
            yield client
    finally:
        await driver.stop()


async def _session(code: ClaudeCode) -> list[Main]:
    """A title, a probe, a tool loop with reminders, a count between turns, and a title again."""
    turns = []
    await code.quota_probe()
    code.user("<system-reminder>\nThere are no todos.\n</system-reminder>", "Where is the parser?")
    await code.title()
    turns.append(await code.main())
    code.used_tool("Grep", [{"type": "text", "text": "src/parser.py:1: class Parser"}])
    turns.append(await code.main())
    code.used_tool("Read", "File does not exist.", is_error=True)
    code.remind("The file /src/lexer.py was changed by the user.")
    await code.title()
    await code.quota_probe()
    turns.append(await code.main())
    assert await code.counted() > turns[-1].prompt
    code.user("Thank you. And the lexer?")
    turn, _ = await asyncio.gather(code.main(), code.title())
    turns.append(turn)
    code.used_tool("Bash", "src/lexer.py", cache_control={"type": "ephemeral"})
    code.remind("Plan mode is on.")
    turns.append(await code.main())
    return turns


def _check(turns: list[Main]) -> None:
    told = [(turn.cached, turn.prompt, turn.generated) for turn in turns]
    for before, turn in pairwise(turns):
        assert turn.cached >= ENOUGH * before.length, told


@pytest.mark.parametrize(("lanes", "host_rows"), [(4, 0), (2, 0), (2, 65536), (1, 65536)])
async def test_a_fake_ring_reuses_each_main_turn(lanes: int, host_rows: int) -> None:
    """A side call finds another lane, and the one lane's rows are kept in host memory meanwhile."""
    language = FakeModel(258, low=32, high=127, end_token=None)
    ring = FakeRing(2, lanes, 16384, vocab_size=258, language=language, host_rows=host_rows)
    async with _served(ring, ByteTokenizer()) as client:
        _check(await _session(ClaudeCode(client, "m")))


async def test_calls_that_the_ring_made_come_back_and_are_gone_on_from() -> None:
    language = FakeModel(258, low=32, high=127, end_token=END)
    ring = FakeRing(2, 2, 16384, vocab_size=258, language=language)
    async with _served(ring, ByteTokenizer()) as client:
        code = ClaudeCode(client, "m", most=400)
        one_call = {"type": "any", "disable_parallel_tool_use": True}
        code.user("Where is the parser?")
        turns = [await code.main(tool_choice=one_call)]
        for count in range(3):
            code.ran_tools(f"src/parser{count}.py")
            await code.title()
            turns.append(await code.main(tool_choice=one_call))
        _check(turns)
        for before, turn in pairwise(turns):
            assert turn.cached >= before.prompt - 1


async def test_a_real_model_reuses_each_main_turn(smollm2_dir: Path) -> None:
    splits = ((0, 15), (15, 30))
    config = RingConfig(smollm2_dir, "m", splits, lanes=2, max_rows=1024, kv_host_bytes=0)
    async with _served(LocalRing(config), load_tokenizer(smollm2_dir)) as client:
        _check(await _session(ClaudeCode(client, "m", rules=3, tools=2, most=8)))
