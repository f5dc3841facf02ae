"""`ringserve serve --detached`: conversations outlive their gateway; ps, stop and drain see the rings."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from coordinator.requests import GREEDY, SessionId
from gateway.chat.messages import Message
from gateway.client import Client
from gateway.turns import ChatPrompt, TurnDelta, TurnRequest, TurnStarted
from tests.cluster.watched_ring import all_end, processes

if TYPE_CHECKING:
    from stage.ray_ring import RayCluster

pytestmark = [
    pytest.mark.long,
    pytest.mark.cluster,
    pytest.mark.timeout(900),  # it starts several servers, one after another
    pytest.mark.asyncio(loop_scope="session"),
]

_ROOT = Path(__file__).parents[2]
_COMMAND = (sys.executable, "-c", "from gateway.cli.app import main; main()")
_START_S = 180.0
_TOKENS = 12
_QUESTIONS = ("What day is it?", "And tomorrow?", "And the day after?", "Who asks?")


@dataclass
class Command:
    code: int
    out: str
    err: str


@dataclass
class Conversation:
    """What a client keeps of one, and what the ring then holds."""

    session: str
    messages: list[Message]
    ids: list[int] = field(default_factory=list)  # of the last answer
    rows: int = 0

    async def turn(self, client: Client, *, reuse: bool = True) -> int:
        """How many tokens of the prompt were there already."""
        asked = TurnRequest(
            ChatPrompt(tuple(self.messages)),
            session=SessionId(self.session),
            sampling=GREEDY,
            max_tokens=_TOKENS,
            ignore_eos=True,
            reuse=reuse,
        )
        self.ids, text = [], ""
        async with client.generate(asked) as stream:
            async for event in stream:
                if isinstance(event, TurnStarted):
                    started = event
                elif isinstance(event, TurnDelta):
                    self.ids += event.token_ids
                    text += event.text
        # Of the last token there is no row.
        self.rows = started.prompt_tokens + len(self.ids) - 1
        self.messages += [Message("assistant", text), Message("user", "And then?")]
        return started.cached_prefix

    def colder(self) -> Conversation:
        return Conversation(f"{self.session} cold", list(self.messages))


class Cluster:
    """The session's Ray, where servers come and go."""

    def __init__(self, address: str, model: Path) -> None:
        self.address = address
        self.flags = ("--detached", "--lanes", "4", "--max-rows", "1024", "--served-name", "small")
        self.model = model
        self.ready = ""  # what the last server said

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[tuple[asyncio.subprocess.Process, Client]]:
        process = await self._begin("serve", str(self.model), *self.flags)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                self.ready = (await process.stdout.readline()).decode()
            assert self.ready.startswith("ready: grpc "), await process.communicate()
            async with Client(self.ready.split()[2].rstrip(",")) as client:
                yield process, client
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def command(self, *arguments: str) -> Command:
        process = await self._begin(*arguments)
        async with asyncio.timeout(_START_S):
            out, err = await process.communicate()
        assert process.returncode is not None
        return Command(process.returncode, out.decode(), err.decode())

    async def rings(self) -> list[dict[str, Any]]:
        told = await self.command("ps", "--json")
        assert told.code == 0, told.err
        rings: list[dict[str, Any]] = json.loads(told.out)["rings"]
        return rings

    async def _begin(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(*_COMMAND, *arguments, "--ray-address", self.address),
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(small_model: Path, ray_cluster: RayCluster) -> AsyncIterator[Cluster]:
    import ray

    from stage.ray_ring.census import end_all

    yield Cluster(ray.get_runtime_context().gcs_address, small_model)
    await asyncio.to_thread(end_all, "small-0")


def conversations() -> list[Conversation]:
    system = Message("system", "You read dates. " * 10)
    return [
        Conversation(f"session {number}", [system, Message("user", question)])
        for number, question in enumerate(_QUESTIONS)
    ]


def pids_of(ring: dict[str, Any]) -> list[int]:
    return [stage["pid"] for stage in ring["stages"]]


async def test_a_killed_gateways_conversations_go_on_where_they_were(cluster: Cluster) -> None:
    talks = conversations()
    async with cluster.serving() as (process, client):
        for talk in talks * 2:
            await talk.turn(client)
        (ring,) = await cluster.rings()
        assert ring["driver"]["pid"] == process.pid

        second = await cluster.command("serve", str(cluster.model), *cluster.flags)
        assert (second.code, second.out) == (1, "")
        (line,) = second.err.splitlines()
        assert line.startswith("error: the detached ring small-0 is driven by a gateway")
        assert f"serves at {ring['driver']['grpc']} " in line
        assert f"pid {process.pid}" in line
        assert (await cluster.rings())[0]["epoch"] == ring["epoch"], "the first was disturbed"
        process.kill()

    assert any(_comes_back_otherwise(cluster.model, talk) for talk in talks), "nothing is shown"
    async with cluster.serving() as (_, client):
        (later,) = await cluster.rings()
        assert (pids_of(later), later["epoch"]) == (pids_of(ring), ring["epoch"] + 1)
        assert f"detached with {sum(later['rows'])} rows from before" in cluster.ready
        for talk in talks:
            held, cold = talk.rows, talk.colder()
            assert await talk.turn(client) == held
            assert await cold.turn(client, reuse=False) == 0
            assert cold.ids == talk.ids


def _comes_back_otherwise(model: Path, talk: Conversation) -> bool:
    """Whether an answer's text makes other tokens than it was said with."""
    from gateway.chat.tokenizer import load_tokenizer

    text = talk.messages[-2].content
    assert text is not None
    return load_tokenizer(model).encode(text) != tuple(talk.ids)


async def test_a_ring_that_was_left_is_shown_healed_and_drained(
    cluster: Cluster, tmp_path: Path
) -> None:
    (talk, *_) = conversations()
    async with cluster.serving() as (process, client):
        await talk.turn(client)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    (ring,) = await cluster.rings()
    assert (ring["driver"], ring["rows"]) == (None, [talk.rows, 0, 0, 0])
    told = (await cluster.command("ps")).out.splitlines()
    assert told[0].startswith(f"small-0: model small, epoch {ring['epoch']}, driven by nobody")
    assert [line.split(":")[0] for line in told[1:]] == ["  stage 0", "  stage 1"]

    other = await cluster.command("serve", str(_other_model(tmp_path, cluster)), *cluster.flags)
    assert (other.code, other.out, other.err.count("\n")) == (1, "", 1)
    assert "holds another model" in other.err
    assert "`ringserve stop small-0`" in other.err

    first, second = pids_of(ring)
    handles = processes((second,))
    os.kill(second, signal.SIGKILL)
    assert await all_end(handles, 5.0)
    async with cluster.serving() as (process, client):
        (healed,) = await cluster.rings()
        assert pids_of(healed)[0] == first
        assert pids_of(healed)[1] != second
        cold = talk.colder()
        await talk.turn(client)
        await cold.turn(client, reuse=False)
        assert cold.ids == talk.ids

        refused = await cluster.command("stop", "small-0")
        assert refused.code == 1
        assert "small-0 is driven by a gateway" in refused.err
        assert "--force" in refused.err
        handles = processes(tuple(pids_of(healed)))
        drained = await cluster.command("drain", "small-0")
        assert (drained.code, drained.out) == (0, "small-0 is draining, 0 turns to go\n")
        assert await all_end(handles, 10.0)
        assert process.returncode is None
    assert await cluster.rings() == []


def _other_model(folder: Path, cluster: Cluster) -> Path:
    """Of the same size, with other weights."""
    import shutil

    from transformers import AutoModelForCausalLM, set_seed

    other = folder / "other"
    shutil.copytree(cluster.model, other)
    set_seed(12)
    model = AutoModelForCausalLM.from_pretrained(other)
    for weight in model.parameters():
        weight.data.normal_(0.0, 0.2)
    model.save_pretrained(other)
    return other


async def test_a_ring_can_be_ended_by_name_whoever_drives_it(cluster: Cluster) -> None:
    async with cluster.serving() as (_, client):
        (talk, *_) = conversations()
        await talk.turn(client)
        (ring,) = await cluster.rings()
        handles = processes(tuple(pids_of(ring)))
        stopped = await cluster.command("stop", "small-0", "--force")
        assert (stopped.code, stopped.out) == (0, "small-0 has ended, 2 processes\n")
        assert await all_end(handles, 5.0)
    unknown = await cluster.command("drain", "small-7")
    assert unknown.code == 1
    assert unknown.err.startswith("error: no detached ring 'small-7' is in this cluster")
