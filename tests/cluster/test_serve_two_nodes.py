"""`ringserve serve` as an operator starts it, in a cluster of two nodes that others go on using."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from coordinator.errors import SetupError
from coordinator.requests import GREEDY, SessionId
from gateway.chat.messages import Message
from gateway.client import Client
from gateway.ray_address import check_ray
from gateway.turns import ChatPrompt, TurnDelta, TurnRequest, TurnStarted

if TYPE_CHECKING:
    from stage.ray_ring import RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session")]

_ROOT = Path(__file__).parents[2]
_COMMAND = (sys.executable, "-c", "from gateway.cli.app import main; main()", "serve")
_START_S = 60.0
# Ray tells of a dead actor and of freed processors a moment later.
_NEWS_S = 10.0


@pytest.fixture(scope="module")
def address(ray_cluster: RayCluster) -> str:
    import ray

    found: str = ray.get_runtime_context().gcs_address
    return found


@asynccontextmanager
async def _serve(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A server in its own process, and its ready line."""
    process = await asyncio.create_subprocess_exec(
        *(*_COMMAND, *arguments),
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_S):
            ready = await process.stdout.readline()
        yield process, ready.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def _stage_nodes() -> list[str]:
    """The node of each stage that lives in the cluster."""
    from ray._private.state import actors

    living = [actor for actor in actors().values() if actor["State"] != "DEAD"]
    return [
        actor["Address"]["NodeID"] for actor in living if actor["ActorClassName"] == "StageActor"
    ]


def _groups() -> list[str]:
    from ray.util import placement_group_table

    groups = placement_group_table().values()
    return [group["state"] for group in groups if group["state"] != "REMOVED"]


def _all_is_free() -> bool:
    import ray

    return bool(ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


async def _two_turns(
    client: Client, session: str, *, reuse: bool
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Each turn's tokens and its cached prefix."""
    messages = [Message("system", "You read dates. " * 20), Message("user", "What day is it?")]
    answers, cached = [], []
    for question in ("And tomorrow?", ""):
        prompt = ChatPrompt(tuple(messages))
        turn = TurnRequest(
            prompt,
            session=SessionId(session),
            sampling=GREEDY,
            max_tokens=12,
            ignore_eos=True,
            reuse=reuse,
        )
        tokens: list[int] = []
        text = ""
        async with client.generate(turn) as stream:
            async for event in stream:
                if isinstance(event, TurnStarted):
                    cached.append(event.cached_prefix)
                elif isinstance(event, TurnDelta):
                    tokens += event.token_ids
                    text += event.text
        answers.append(tuple(tokens))
        messages += [Message("assistant", text), Message("user", question)]
    return answers, cached


async def test_serve_spreads_its_stages_chats_and_leaves_nothing_in_the_cluster(
    small_model: Path, address: str, second_node: None
) -> None:
    import ray

    assert (_stage_nodes(), _groups()) == ([], [])
    flags = ("--ray-address", address, "--spread", "--lanes", "2", "--max-rows", "1024")
    async with _serve(str(small_model), *flags) as (process, ready):
        assert ready.startswith("ready: grpc 127.0.0.1:"), await process.communicate()
        assert "1 ray ring of 2 stages" in ready
        assert _groups() == ["CREATED"]
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        assert (len(alive), sorted(_stage_nodes())) == (2, sorted(alive))

        async with Client(ready.split()[2].rstrip(",")) as client:
            warm, cached = await _two_turns(client, "warm", reuse=True)
            cold, uncached = await _two_turns(client, "cold", reuse=False)
        assert [len(tokens) for tokens in cold] == [12, 12]
        assert warm == cold
        assert cached[1] > 100
        assert uncached == [0, 0]

        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            rest, errors = await process.communicate()
    assert (process.returncode, rest) == (0, b"")
    assert errors.endswith(b"draining: no turn is running; Ctrl-C again stops at once\nstopped\n")
    assert b"Traceback" not in errors

    deadline = time.monotonic() + _NEWS_S
    while (_stage_nodes(), _groups(), _all_is_free()) != ([], [], True):
        assert time.monotonic() < deadline, (_stage_nodes(), _groups())
    assert {node["NodeID"] for node in ray.nodes() if node["Alive"]} == alive


async def test_a_ray_that_asks_for_a_token_is_told_from_one_that_is_not_there(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert os.environ["RAY_AUTH_MODE"] == "token", "a Ray of one's own sets it"
    check_ray(address)
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SetupError, match="asks for a token: put its ~/.ray/auth_token"):
        check_ray(address)
