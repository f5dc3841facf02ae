"""A real model behind OpenAI's own client: it calls the tool that it must, and answers in the form that it must."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.router import Router
from gateway.chat.tokenizer import load_tokenizer
from gateway.http.server import serve_http
from gateway.service import GenerationService
from gateway.settings import HttpSettings
from stage.config import RingConfig
from stage.local_ring import LocalRing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class Weather(BaseModel):
    """Tells the weather of a city."""

    city: Literal["Bern", "Paris", "Rome"]
    unit: Literal["celsius", "fahrenheit"]


class Answer(BaseModel):
    capital: Literal["Paris", "London"]
    sure: bool


@asynccontextmanager
async def _served(folder: Path) -> AsyncIterator[AsyncOpenAI]:
    ring = LocalRing(RingConfig(folder, "m", ((0, 15), (15, 30)), lanes=2, max_rows=1024))
    driver = RingDriver("ring-0", ring, SchedulerSettings(), SystemClock())
    router = Router([driver], session_limit=8)
    tokenizer = load_tokenizer(folder)
    service = GenerationService("m", router, tokenizer, SystemClock(), random.Random(1))
    await driver.start(lambda _: None)
    try:
        async with (
            serve_http(service, HttpSettings(drain_s=1.0)) as address,
            AsyncOpenAI(
                base_url=f"http://{address}/v1",
                api_key="none",
                max_retries=0,
                _strict_response_validation=True,
            ) as client,
        ):
            yield client
    finally:
        await driver.stop()


async def test_a_real_model_calls_what_it_must_and_goes_on_from_there(smollm2_dir: Path) -> None:
    tool = pydantic_function_tool(Weather, name="weather")
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    ask: dict[str, Any] = {
        "model": "m",
        "messages": messages,
        "tools": [tool],
        "temperature": 0,
        "max_tokens": 60,
        "prompt_cache_key": "s",
    }
    async with _served(smollm2_dir) as client:
        named = {"type": "function", "function": {"name": "weather"}}
        one: dict[str, Any] = {
            "tool_choice": named,
            "parallel_tool_calls": False,
            "stream_options": {"include_usage": True},
        }
        async with client.chat.completions.stream(**ask, **one) as stream:
            first = await stream.get_final_completion()
        said = first.choices[0].message
        (call,) = said.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, Weather)
        assert first.choices[0].finish_reason == "tool_calls"
        called = call.model_dump(include={"id", "type", "function"})
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 20 degrees."},
        ]
        second = await client.chat.completions.create(**ask, tool_choice="none")
        cached = second.usage.prompt_tokens_details.cached_tokens
        # All that was generated but for the token that ended it is reused.
        assert cached >= first.usage.total_tokens - 1
        parsed = await client.chat.completions.parse(
            model="m",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            response_format=Answer,
        )
        assert parsed.choices[0].message.parsed is not None
