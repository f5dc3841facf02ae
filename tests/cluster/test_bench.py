"""The benches through Ray: a small random model behind SmolLM2's tokenizer, so that minutes become seconds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.errors import SetupError
from gateway.bench.multiturn_command import MultiturnOptions, Target, run_multiturn
from gateway.bench.workload import Load
from gateway.cli.app import app
from gateway.launch import launch
from gateway.progress import SilentBoard
from gateway.server_address import ServerAddress
from gateway.settings import RingKind, ServeSettings

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def _bench(*arguments: str) -> dict[str, object]:
    result = CliRunner(env=dict(os.environ)).invoke(app, ["bench", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    told: dict[str, object] = json.loads(result.stdout.strip().splitlines()[-1])
    return told


def test_sessions_are_exact_and_stand_beside_a_baseline(small_model: Path) -> None:
    sizes = ("--sessions", "2", "--turns", "2", "--answer-tokens", "6", "--lanes", "2")
    told = _bench("multiturn", "--model", str(small_model), *sizes, "--baseline")
    assert told["wrong_turns"] == 0
    assert told["control_cached_tokens"] < 100
    first, second = told["turns"]
    assert second["reused_tokens"] == second["reusable_tokens"] > 0.8 * second["prompt_tokens"]
    assert first["reused_tokens"] <= first["reusable_tokens"]
    assert min(told["baseline"].values()) > 0


async def test_a_running_server_is_measured_by_its_address(small_model: Path) -> None:
    served = ServeSettings(model=str(small_model), ring=RingKind.LOCAL, lanes=2, max_rows=4096)
    async with launch(served, SilentBoard()) as running:
        options = MultiturnOptions(
            Load(1, 2, 4), Target(ServerAddress(running.grpc_address)), baseline=False, plot=None
        )
        found = await run_multiturn(ServeSettings(model=str(small_model)), options, SilentBoard())
        assert (found.report.wrong_turns, found.report.rings) == (0, 1)
        assert found.report.reused_tokens == found.report.reusable_tokens > 0
        assert found.samples[-1].busy_s > found.samples[0].busy_s
        nowhere = MultiturnOptions(
            Load(1, 1, 1), Target(ServerAddress("127.0.0.1:1")), baseline=False, plot=None
        )
        with pytest.raises(SetupError, match="UNAVAILABLE"):
            await run_multiturn(served, nowhere, SilentBoard())
