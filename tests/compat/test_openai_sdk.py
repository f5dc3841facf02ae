"""OpenAI's own client drives the HTTP front over a socket, strictly: what it cannot read is a fault of ours."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

HELLO: Any = [{"role": "user", "content": "Hello"}]


async def test_whole_and_streamed_chats_agree(openai_sdk: Any) -> None:
    async with openai_sdk(endless=True) as (client, _):
        ask: Any = {"model": "fake", "messages": HELLO, "max_tokens": 9, "temperature": 0}
        whole = await client.chat.completions.create(**ask)
        stream = await client.chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert said == whole.choices[0].message.content != ""
        assert whole.choices[0].finish_reason == "length"
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens


async def test_the_stream_helper_puts_the_answer_together(openai_sdk: Any) -> None:
    async with openai_sdk() as (client, _):
        ask: Any = {"model": "fake", "messages": HELLO, "temperature": 0}
        async with client.chat.completions.stream(**ask, logprobs=True) as stream:
            async for _event in stream:
                pass
            final = await stream.get_final_completion()
        whole = await client.chat.completions.create(**ask)
        assert final.choices[0].message.content == whole.choices[0].message.content
        assert final.choices[0].finish_reason == "stop"
        assert len(final.choices[0].logprobs.content) == whole.usage.completion_tokens


async def test_plain_completions_and_models(openai_sdk: Any) -> None:
    async with openai_sdk(endless=True) as (client, _):
        answer = await client.completions.create(
            model="fake", prompt="One two", max_tokens=4, temperature=0, logprobs=2
        )
        assert len(answer.choices[0].logprobs.tokens) == 4
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("fake")).id == "fake"


async def test_errors_are_those_that_agents_know(openai_sdk: Any) -> None:
    async with openai_sdk() as (client, _):
        long: Any = [{"role": "user", "content": "x" * 3000}]
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="fake", messages=long, stream=True)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as named:
            await client.chat.completions.create(model="fake", messages=HELLO, temperature=-1)
        assert (named.value.param, named.value.code) == ("temperature", "invalid_value")
        with pytest.raises(openai.NotFoundError) as other:
            await client.chat.completions.create(model="gpt", messages=HELLO)
        assert other.value.code == "model_not_found"


async def test_an_error_behind_the_first_byte_comes_in_band(openai_sdk: Any) -> None:
    """A stream that merely ended would be taken for a whole answer."""
    async with openai_sdk(endless=True, step_s=0.01) as (client, fake):
        stream = await client.chat.completions.create(model="fake", messages=HELLO, stream=True)

        async def read() -> None:
            async for _ in stream:
                await fake.driver._ring.stop()

        with pytest.raises(openai.APIError, match="lost"):
            await read()


async def test_closing_a_stream_frees_its_lane(openai_sdk: Any) -> None:
    async with openai_sdk(endless=True, step_s=0.01) as (client, fake):
        stream = await client.chat.completions.create(model="fake", messages=HELLO, stream=True)
        await anext(aiter(stream))
        assert fake.driver.status().busy_lanes == 1
        await stream.close()
        for _ in range(500):
            if fake.driver.status().busy_lanes == 0:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the lane is still taken")
