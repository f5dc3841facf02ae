"""A session in Codex's shapes keeps its rows: each turn reuses the one before it, through tool loops and questions."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

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
from tests.compat.codex import Codex, StreamLost, Turn
from tests.compat.http_client import Http

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from coordinator.ring import Ring

ENOUGH = 0.95
LISTING = "\n".join(f"src/module_{n}.py: {n * 37} lines" for n in range(12))


@asynccontextmanager
async def _served(ring: Ring, tokenizer: ChatTokenizer) -> AsyncIterator[Http]:
    driver = RingDriver("ring-0", ring, SchedulerSettings(), SystemClock())
    router = Router([driver], session_limit=64)
    service = GenerationService("m", router, tokenizer, SystemClock(), random.Random(1))
    await driver.start(lambda _: None)
    try:
        async with serve_http(service, HttpSettings(drain_s=1.0)) as address:
            yield Http(address)
    finally:
        await driver.stop()


def _fake(max_rows: int = 16384) -> FakeRing:
    language = FakeModel(258, low=32, high=127, end_token=END)
    return FakeRing(2, 4, max_rows, vocab_size=258, language=language)


async def _session(codex: Codex, *questions: str) -> list[Turn]:
    """Each question has a loop of tools behind it: the model must call one, once more, and then may say anything."""
    turns = []
    codex.begin()
    for question in questions:
        codex.ask(question)
        for output in (LISTING, [{"type": "input_text", "text": "Exit code: 1\n"}]):
            turns.append(await codex.turn(tool_choice="required"))
            for call in _calls(turns[-1]) or [_called(codex)]:
                codex.result(call, output)
        turns.append(await codex.turn())
    return turns


def _calls(turn: Turn) -> list[Any]:
    return [item for item in turn.items if item["type"].endswith("_call")]


def _called(codex: Codex) -> Any:
    """An answer that was cut before it called anything is taken to have called this."""
    call = {"type": "function_call", "name": "shell_command", "arguments": '{"command":"ls"}'}
    codex.input.append({**call, "call_id": f"call_{len(codex.input)}"})
    return codex.input[-1]


def _check(turns: list[Turn]) -> None:
    told = [(turn.cached, turn.prompt, turn.generated) for turn in turns]
    for before, turn in zip(turns, turns[1:], strict=False):
        assert turn.cached >= ENOUGH * before.length, told


async def test_a_fake_ring_reuses_each_turn() -> None:
    async with _served(_fake(), ByteTokenizer()) as http:
        codex = Codex(http, "m", more={"seed": 3, "max_output_tokens": 160})
        turns = await _session(codex, "Where is the parser?", "Thank you. Now mend it.")
        assert sum(bool(_calls(turn)) for turn in turns) >= 4
        _check(turns)


async def test_a_real_ring_reuses_each_turn(smollm2_dir: Path) -> None:
    """Its model spells words otherwise than its tokenizer does, and its second answer is cut in the middle."""
    import torch

    from stage.config import RingConfig
    from stage.local_ring import LocalRing

    torch.set_num_threads(1)
    ring = LocalRing(RingConfig(smollm2_dir, "m", ((0, 15), (15, 30)), lanes=2, max_rows=4096))
    async with _served(ring, load_tokenizer(smollm2_dir)) as http:
        codex = Codex(http, "m", rules=24, more={"seed": 1, "max_output_tokens": 56})
        turns = await _session(codex, "Where is the parser?")
        assert all(_calls(turn) for turn in turns[:2])
        _check(turns)


async def test_a_conversation_that_outgrew_the_context_fails_by_the_code_that_codex_compacts_on() -> (
    None
):
    async with _served(_fake(max_rows=2048), ByteTokenizer()) as http:
        codex = Codex(http, "m")
        codex.begin()
        codex.ask("x" * 3000)
        with pytest.raises(StreamLost, match="context_length_exceeded"):
            await codex.turn()
