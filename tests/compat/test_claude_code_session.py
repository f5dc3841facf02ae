"""A session in Claude Code's shapes keeps its rows: each main turn reuses the one before it, whatever came between.

anthropics/claude-code#63469 (system messages in the middle of a conversation), and the billing line in the head that
is another one in each request: servers that move the one or keep the other compute everything again.
"""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from anthropic import AsyncAnthropic

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.router import Router
from fakering.model import FakeModel
from fakering.ring import FakeRing
from gateway.chat.byte_tokenizer import ByteTokenizer
from gateway.chat.tokenizer import ChatTokenizer, load_tokenizer
from gateway.http.server import serve_http
from gateway.service import GenerationService
from gateway.settings import HttpSettings
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
    await code.title()
    turns.append(await code.main())
    code.used_tool("Bash", "src/lexer.py", cache_control={"type": "ephemeral"})
    code.remind("Plan mode is on.")
    turns.append(await code.main())
    return turns


def _check(turns: list[Main]) -> None:
    told = [(turn.cached, turn.prompt, turn.generated) for turn in turns]
    for before, turn in zip(turns, turns[1:], strict=False):
        assert turn.cached >= ENOUGH * before.length, told


@pytest.mark.parametrize("lanes", [4, 2, 1])
@pytest.mark.parametrize("host_rows", [0, 65536])
async def test_a_fake_ring_reuses_each_main_turn(host_rows: int, lanes: int) -> None:
    language = FakeModel(258, low=32, high=127, end_token=None)
    ring = FakeRing(2, lanes, 16384, vocab_size=258, language=language, host_rows=host_rows)
    async with _served(ring, ByteTokenizer()) as client:
        _check(await _session(ClaudeCode(client, "m")))
