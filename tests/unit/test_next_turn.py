"""What the next prompt begins with is known before it comes: a template that rewrites history costs nobody a wait."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.prefixes import common_prefix
from coordinator.requests import GREEDY, SessionId
from coordinator.router import Router
from coordinator.sessions import History
from fakering.model import FakeModel
from fakering.ring import FakeRing
from gateway.chat.boundaries import AddedTokens
from gateway.chat.byte_tokenizer import _SPECIALS, END, ByteTokenizer
from gateway.chat.conversation import TemplateDict
from gateway.chat.messages import Message, ToolCall
from gateway.chat.templates import ChatRenderer
from gateway.next_turn import next_wish
from gateway.service import GenerationService
from gateway.turns import ChatPrompt, TurnDelta, TurnEvent, TurnRequest, TurnStarted

SESSION = SessionId("s")
THOUGHT = 12  # characters of each answer that count as reasoning


def _forgets_thoughts(
    messages: Sequence[TemplateDict],
    tools: Sequence[TemplateDict],
    args: Mapping[str, object],
    *,
    generate: bool,
) -> str:
    said = []
    for place, message in enumerate(messages):
        text = str(message["content"])
        earlier = message["role"] == "assistant" and place < len(messages) - 1
        said.append(f"<|start|>{message['role']}\n{text[THOUGHT * earlier :]}<|end|>\n")
    return "".join(said) + ("<|start|>assistant\n" if generate else "")


class ThinkingTokenizer(ByteTokenizer):
    def __init__(self) -> None:
        added = AddedTokens.of(_SPECIALS, _SPECIALS)
        self._renderer = ChatRenderer(_forgets_thoughts, self.encode, added)


def _history(tokenizer: ByteTokenizer, prompt: ChatPrompt, said: str) -> History:
    rendered = tokenizer.render(prompt.messages)
    return History(rendered.text + said, rendered.token_ids + tokenizer.encode(said))


def test_nothing_is_foreseen_where_the_rows_are_there_already() -> None:
    tokenizer, prompt = ByteTokenizer(), ChatPrompt((Message("user", "Hello"),))
    said = Message("assistant", "Hi there, how are you?")
    history = _history(tokenizer, prompt, "Hi there, how are you?")
    assert next_wish(tokenizer, SESSION, prompt, said, history) is None


def test_a_rewritten_history_is_foreseen_up_to_what_nobody_can_know() -> None:
    tokenizer, prompt = ThinkingTokenizer(), ChatPrompt((Message("user", "Hello"),))
    said = "thinking.... and the answer"
    history = _history(tokenizer, prompt, said)
    wish = next_wish(tokenizer, SESSION, prompt, Message("assistant", said), history)
    assert wish is not None
    known = tokenizer.decode(wish.tokens, skip_special=False)
    assert known == (
        "<|start|>user\nHello<|end|>\n<|start|>assistant\n and the answer<|end|>\n<|start|>user\n"
    )
    assert all(place < len(wish.tokens) for place in wish.boundaries)


def test_calls_are_foreseen_with_the_results_that_will_follow() -> None:
    tokenizer, prompt = ByteTokenizer(), ChatPrompt((Message("user", "Hello"),))
    written = '<tool_call>{"name":"f", "arguments":{}}</tool_call>'
    said = Message("assistant", None, tool_calls=(ToolCall("f", "{}", "call_1"),))
    wish = next_wish(tokenizer, SESSION, prompt, said, _history(tokenizer, prompt, written))
    assert wish is not None
    assert tokenizer.decode(wish.tokens, skip_special=False) == (
        "<|start|>user\nHello<|end|>\n<|start|>assistant\n"
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|end|>\n'
        "<|start|>user\n<tool_response>\n"
    )
    as_rendered = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    history = _history(tokenizer, prompt, as_rendered)
    assert next_wish(tokenizer, SESSION, prompt, said, history) is None


async def test_a_model_that_thinks_starts_its_next_turn_warm() -> None:
    """QwenLM/Qwen3.8#48: what is rendered next turn is no extension of what was generated."""
    language = FakeModel(258, low=32, high=127, end_token=END)
    ring = FakeRing(2, 2, 4096, vocab_size=258, language=language, host_rows=4096)
    driver = RingDriver("ring-0", ring, SchedulerSettings(chunk_rows=32), SystemClock())
    router = Router([driver], session_limit=8)
    tokenizer = ThinkingTokenizer()
    service = GenerationService("fake", router, tokenizer, SystemClock(), random.Random(1))
    await driver.start(lambda _: None)
    try:
        messages = [Message("user", "Tell me of the sea, and take your time. " * 5)]
        first = await _play(service, messages)
        said = "".join(event.text for event in first if isinstance(event, TurnDelta))
        messages += [Message("assistant", said), Message("user", "And of the sky?")]
        prompt = tokenizer.render(messages).token_ids
        known = common_prefix(
            prompt, tokenizer.render([*messages[:2], Message("user", "0")]).token_ids
        )
        for _ in range(1000):  # 10 s
            if driver.usable_prefix(prompt) >= known:
                break
            await asyncio.sleep(0.01)
        assert router.rings()[0].counts.ahead_rows > 0
        second = await _play(service, messages)
        assert isinstance(second[0], TurnStarted)
        assert second[0].cached_prefix == known
        ids = tuple(i for event in second if isinstance(event, TurnDelta) for i in event.token_ids)
        assert ids == language.oracle(prompt, len(ids), stop=(END,))
    finally:
        await driver.stop()


async def _play(service: GenerationService, messages: Sequence[Message]) -> list[TurnEvent]:
    turn = TurnRequest(ChatPrompt(tuple(messages)), session=SESSION, sampling=GREEDY, max_tokens=60)
    return [event async for event in service.generate(turn)]
