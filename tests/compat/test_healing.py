"""A stage is lost while clients are served, over real sockets: each sees a pause at most, and its answer whole."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import AsyncOpenAI
from typer.testing import CliRunner

from coordinator.requests import SamplingSpec, SessionId
from fakering.faults import Drop, Lose
from fakering.model import FakeModel
from gateway.cli.app import app
from gateway.http import streaming
from gateway.turns import (
    TextPrompt,
    TurnDelta,
    TurnEvent,
    TurnFinished,
    TurnRecovering,
    TurnRequest,
    TurnStarted,
)
from tests.compat.healing import MID_ANSWER, HeldUp

ROOT = Path(__file__).parents[2]
ENDLESS = FakeModel(258, low=32, high=127)  # what an endless site speaks
PROMPT = "tell me of the ring"
HELLO: Any = [{"role": "user", "content": "Hello"}]
CHAT: Any = {"model": "fake", "messages": HELLO, "temperature": 0, "max_tokens": 40}
PLAIN: Any = {"model": "fake", "prompt": PROMPT, "temperature": 0, "max_tokens": 40}
RESPONSE: Any = {"model": "fake", "input": "Hello", "temperature": 0, "max_output_tokens": 40}
MESSAGE: Any = {
    "model": "fake",
    "messages": HELLO,
    "max_tokens": 40,
    "extra_body": {"temperature": 0},
}
LOST = TurnRecovering("stage 1: died (scripted)")


def turn(text: str = PROMPT, tokens: int = 40, **more: Any) -> TurnRequest:
    greedy = SamplingSpec(temperature=0.0)
    return TurnRequest(TextPrompt(text), sampling=greedy, max_tokens=tokens, draft=False, **more)


async def told(it: Any, asked: TurnRequest) -> list[TurnEvent]:
    """A held up ring heals once the client has heard of it: news that a token overtakes are not told."""
    events = []
    async with it.client.generate(asked) as stream:
        async for event in stream:
            events.append(event)
            if isinstance(event, TurnRecovering) and isinstance(it.ring, HeldUp):
                it.ring.may_heal.set()
    return events


async def unheard(it: Any, asked: TurnRequest) -> list[TurnEvent]:
    """The same, of a ring that heals when somebody else says so."""
    async with it.client.generate(asked) as stream:
        return [event async for event in stream]


def tokens_of(events: list[TurnEvent]) -> tuple[int, ...]:
    return tuple(t for event in events if isinstance(event, TurnDelta) for t in event.token_ids)


async def test_a_grpc_stream_is_told_of_the_pause_and_goes_on_token_for_token(site: Any) -> None:
    async with site(endless=True, faults=(MID_ANSWER,), kind=HeldUp) as it:
        events = await told(it, turn())
        status = it.driver.status()
    assert tokens_of(events) == ENDLESS.oracle(tuple(PROMPT.encode()), 40)
    assert isinstance(events[0], TurnStarted)
    assert isinstance(events[-1], TurnFinished)
    assert events[-1].usage.generated_tokens == 40
    pause = events.index(LOST)
    assert events.count(LOST) == 1
    assert tokens_of(events[:pause])
    assert tokens_of(events[pause:])
    assert (status.epoch, status.replaced, status.ready) == (1, 1, True)


async def test_a_loss_before_the_first_token_is_told_before_the_start(site: Any) -> None:
    async with site(endless=True, faults=(Lose(stage=1, nth=0),), kind=HeldUp) as it:
        events = await told(it, turn())
    assert events[0] == LOST
    assert [isinstance(event, TurnStarted) for event in events].index(True) == 1
    assert tokens_of(events) == ENDLESS.oracle(tuple(PROMPT.encode()), 40)


async def test_the_turn_after_a_recovery_reuses_what_the_last_one_computed(site: Any) -> None:
    async with site(endless=True, faults=(MID_ANSWER,)) as it:
        first = await told(it, turn(session=SessionId("s")))
        said = bytes(tokens_of(first)).decode()
        second = await told(it, turn(PROMPT + said + " and?", session=SessionId("s")))
    assert isinstance(second[0], TurnStarted)
    assert second[0].cached_prefix >= len(PROMPT) + 39


async def openai_texts(client: Any) -> list[str]:
    """The same answer from each of OpenAI's interfaces, streamed."""
    chat = await client.chat.completions.create(**CHAT, stream=True)
    chunks = [chunk async for chunk in chat]
    # Its own type of a plain chunk allows no choice that goes on: not strict here.
    async with AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0) as lenient:
        plain = await lenient.completions.create(**PLAIN, stream=True)
        pieces = [chunk.choices[0].text async for chunk in plain]
    events = [event async for event in await client.responses.create(**RESPONSE, stream=True)]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
    return [said, "".join(pieces), events[-1].response.output_text]


async def openai_wholes(client: Any) -> list[str]:
    chat = await client.chat.completions.create(**CHAT)
    plain = await client.completions.create(**PLAIN)
    response = await client.responses.create(**RESPONSE)
    return [chat.choices[0].message.content, plain.choices[0].text, response.output_text]


@pytest.mark.parametrize("ask", [openai_texts, openai_wholes])
async def test_openais_client_notices_nothing(openai_sdk: Any, ask: Any) -> None:
    losses = tuple(Lose(stage, nth) for stage, nth in ((1, 9), (0, 40), (1, 75), (0, 100)))
    async with openai_sdk(endless=True) as (client, _):
        undisturbed = await ask(client)
    async with openai_sdk(endless=True, faults=losses) as (client, it):
        assert await ask(client) == undisturbed
        assert it.driver.status().epoch >= 3


async def test_anthropics_client_notices_nothing(anthropic_sdk: Any) -> None:
    async def texts(client: Any) -> list[str]:
        async with client.messages.stream(**MESSAGE) as stream:
            streamed = await stream.get_final_message()
        whole = await client.messages.create(**MESSAGE)
        assert (streamed.stop_reason, whole.stop_reason) == ("max_tokens", "max_tokens")
        return [streamed.content[0].text, whole.content[0].text]

    losses = (Lose(stage=1, nth=9), Lose(stage=0, nth=50))
    async with anthropic_sdk(endless=True) as (client, _):
        undisturbed = await texts(client)
    async with anthropic_sdk(endless=True, faults=losses) as (client, it):
        assert await texts(client) == undisturbed
        assert it.driver.status().epoch == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", PLAIN),
        ("/v1/responses", RESPONSE),
        ("/v1/messages", {**CHAT, "max_tokens": 40}),
    ],
)
async def test_a_comment_and_then_signs_of_life_come_between_events_and_in_none(
    http: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    async with http(endless=True, faults=(MID_ANSWER,), kind=HeldUp) as (client, it):
        asked = asyncio.create_task(client.ask("POST", path, {**body, "stream": True}))
        await it.ring.heals.wait()
        loop = asyncio.get_running_loop()
        loop.call_later(0.3, it.ring.may_heal.set)
        status, _, raw = await asked
    blocks = raw.decode().strip("\n").split("\n\n")
    assert status == 200
    assert blocks.count(": recovering") == 1
    pause = blocks.index(": recovering")
    life = {"/v1/responses": "response.in_progress", "/v1/messages": '"type":"ping"'}
    signs = [block for block in blocks[pause:] if life.get(path, ": keep-alive") in block]
    assert len(signs) >= 2
    assert 0 < pause < len(blocks) - len(signs) - 1
    # Whatever else is sent is an event by itself: its name, and one line of data.
    events = [block.split("\n") for block in blocks if not block.startswith(": ")]
    assert all(lines[-1].startswith("data: ") for lines in events)
    assert all(len(lines) == 1 or lines[0].startswith("event: ") for lines in events)


async def test_a_turn_that_comes_while_the_ring_heals_waits_and_is_served(http: Any) -> None:
    async with http(endless=True, faults=(MID_ANSWER,), kind=HeldUp) as (client, it):
        running = asyncio.create_task(unheard(it, turn()))
        await it.ring.heals.wait()
        waiting = asyncio.create_task(unheard(it, turn("later", 7)))
        whole = asyncio.create_task(client.post("/v1/completions", {**PLAIN, "max_tokens": 7}))
        async with asyncio.timeout(5):
            while it.driver.status().waiting_jobs < 3:
                await it.client.rings()
        it.ring.may_heal.set()
        assert tokens_of(await running) == ENDLESS.oracle(tuple(PROMPT.encode()), 40)
        events = await waiting
        _, _, body = await whole
    assert LOST not in events, "it began behind the loss"
    assert tokens_of(events) == ENDLESS.oracle(b"later", 7)
    oracle = ENDLESS.oracle(tuple(PROMPT.encode()), 7)
    assert body["choices"][0]["text"].encode() == bytes(oracle)


async def test_a_turn_that_was_left_before_it_began_leaves_its_session_as_it_was(
    site: Any,
) -> None:
    async with site(endless=True, kind=HeldUp) as it:
        session = SessionId("s")
        await told(it, turn(session=session))
        history = it.service._router.history(session)
        it.ring.lose_next(stage=1)
        async with it.client.generate(turn(PROMPT + " other words", session=session)) as stream:
            assert await anext(stream) == LOST
        async with asyncio.timeout(5):
            await it.service.idle()  # the server has heard of it before the turn could go on
        it.ring.may_heal.set()
        assert history is not None
        assert it.service._router.history(session) == history


async def test_a_deadline_holds_while_the_ring_heals(site: Any) -> None:
    async with site(endless=True, faults=(MID_ANSWER,), kind=HeldUp) as it:
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await unheard(it, turn(timeout_s=0.5))
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        it.ring.may_heal.set()
        assert tokens_of(await told(it, turn())) == ENDLESS.oracle(tuple(PROMPT.encode()), 40)


async def test_readiness_health_and_lists_say_that_it_recovers_and_then_that_it_is_ready(
    http: Any,
) -> None:
    async with http(endless=True, faults=(MID_ANSWER,), kind=HeldUp) as (client, it):
        health = health_pb2_grpc.HealthStub(it.channel)
        running = asyncio.create_task(unheard(it, turn()))
        await it.ring.heals.wait()
        status, headers, raw = await client.ask("GET", "/ready")
        assert (status, headers["retry-after"]) == (503, "5")
        assert b'"status":"recovering"' in raw
        assert b'"reason":"recovering: died (scripted)"' in raw
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        (ring,) = await it.client.rings()
        assert (ring.recovering, ring.ready, ring.epoch) == (True, False, 1)
        assert ring.reason == "recovering: died (scripted)"
        _, _, page = await client.ask("GET", "/status.json")
        assert b'"state":"recovering"' in page
        shown = await asyncio.to_thread(
            CliRunner().invoke, app, ["rings", "ls", "--address", it.address]
        )
        assert "ring-0: recovering (died (scripted)), " in shown.output
        it.ring.may_heal.set()
        await running
        status, _, raw = await client.ask("GET", "/ready")
        assert (status, b'"status":"ready"' in raw) == (200, True)
        (ring,) = await it.client.rings()
        assert (ring.recovering, ring.ready, ring.replaced_stages) == (False, True, 1)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_lost_message_is_a_reason_too(site: Any) -> None:
    text = PROMPT * 30  # several frames: the reply behind the lost one tells of it
    events, why = [], "reply 2 came before 1"
    async with site(endless=True, faults=(Drop(leg=2, nth=1),), kind=HeldUp) as it:
        async with it.client.generate(turn(text)) as stream:
            async for event in stream:
                events.append(event)
                if event == TurnRecovering(why):
                    (ring,) = await it.client.rings()
                    assert ring.reason == f"recovering: {why}"
                    it.ring.may_heal.set()
    assert events.count(TurnRecovering(why)) == 1
    assert tokens_of(events) == ENDLESS.oracle(tuple(text.encode()), 40)


async def test_a_chat_in_the_terminal_shows_a_note(site: Any) -> None:
    async with site(endless=True, faults=(MID_ANSWER,), kind=HeldUp) as it:
        command = (sys.executable, "-c", "from gateway.cli.app import main; main()", "chat")
        process = await asyncio.create_subprocess_exec(
            *(*command, "--address", it.address, "--temperature", "0", "--max-tokens", "40"),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Hello\n")
        process.stdin.close()
        async with asyncio.timeout(30):
            while b"(the ring lost a stage; going on shortly)" != (line := await _line(process)):
                assert line is not None
            it.ring.may_heal.set()
            output, _ = await process.communicate()
    assert b"[length, 40 tokens" in output


async def _line(process: Any) -> bytes | None:
    """Without its end; None: there are no more."""
    line = await process.stdout.readline()
    return line.rstrip(b"\n") if line else None
