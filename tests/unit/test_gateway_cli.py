"""The command line: what it refuses, what it prints, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from typer.testing import CliRunner

from coordinator.config import SchedulerSettings
from coordinator.errors import InvalidSetting, ModelUnusable
from coordinator.ring import StageProgress
from gateway.cli.app import app
from gateway.cli.exits import flag_of
from gateway.cli.plan_view import _limited
from gateway.cli.serve import _Interrupts
from gateway.client import Client
from gateway.launch import ring_config
from gateway.models import find_model
from gateway.progress import LineBoard, open_board
from gateway.settings import GrpcSettings, RingKind, ServeSettings
from gateway.turns import TextPrompt, TurnRequest
from stage.model.footprint import Footprint
from stage.plan import plan_footprint
from tests.compat.http_client import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from gateway.cli.app import main; main()"]


def ringserve(*arguments: str, **environment: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, env=environment)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "fake", "--ring", "fake", "--stages", "0"),
        ("serve", "fake", "--ring", "fake", "--lanes", "-1"),
        ("serve", "fake", "--ring", "fake", "--max-rows", "1"),
        ("serve", "fake", "--ring", "fake", "--drafts", "-1"),
        ("serve", "fake", "--ring", "fake", "--grpc-port", "70000"),
        ("serve", "fake", "--ring", "fake", "--host", "0.0.0.0"),
        ("serve", "fake", "--ring", "square"),
        ("serve", "fake", "--no-such-flag"),
        ("chat", "--address", "x", "--max-tokens", "0"),
        ("chat", "--address", "x", "--temperature", "nan"),
        ("chat", "--address", "x", "--seed", "-1"),
        ("serve",),
    ],
)
def test_an_impossible_flag_is_bad_usage(arguments: tuple[str, ...]) -> None:
    code, output = ringserve(*arguments)
    assert code == 2
    assert "Traceback" not in output


def test_a_model_that_is_not_there_is_one_clear_line() -> None:
    for command in (("serve",), ("plan",), ("demo", "--model")):
        code, output = ringserve(*command, "/no/such/model")
        assert code == 1
        assert output == (
            "error: there is no model '/no/such/model': no such folder; smollm2 is built in\n"
        )


def test_a_flag_has_a_name_in_the_environment_and_the_flag_wins() -> None:
    flags = ("serve", "fake", "--ring", "fake")
    code, output = ringserve(*flags, RINGSERVE_STAGES="0")
    assert (code, output) == (2, "error: --stages: must be at least 1, got 0\n")
    code, output = ringserve(*flags, "--stages", "-1", RINGSERVE_STAGES="0")
    assert output == "error: --stages: must be at least 1, got -1\n"


def test_help_shows_the_defaults_of_the_settings() -> None:
    code, output = ringserve("serve", "--help", COLUMNS="200", TERM="dumb")
    assert code == 0
    assert f"[default: {ServeSettings(model='m').lanes}]" in output
    assert f"[default: {SchedulerSettings().max_drafts}]" in output
    assert "RINGSERVE_MAX_ROWS" in output


def test_neither_help_nor_a_fake_ring_needs_what_is_heavy() -> None:
    script = (
        "import sys; import gateway.cli.app; light = set(sys.modules);"
        "import gateway.cli.serve, gateway.chat.byte_tokenizer;"
        "print(sorted({'grpc', 'torch', 'ray', 'transformers'} & light),"
        "sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[] []\n"


def test_a_host_that_others_reach_must_be_allowed() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.4", "example.org"):
        with pytest.raises(InvalidSetting):
            GrpcSettings(host=host)
        assert GrpcSettings(host=host, insecure=True).host == host
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert GrpcSettings(host=host).host == host


def test_a_local_folder_is_a_model_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    found = find_model(str(folder), lambda _: None)
    assert (found.path, found.name) == (folder, "tiny-model")


def test_a_hub_id_that_is_not_cached_fails_in_one_line_when_offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelUnusable) as refused:
        find_model("nobody/no-such-model", lambda _: None)
    said = str(refused.value)
    assert said.startswith("there is no model 'nobody/no-such-model': no such folder, and the hub")
    assert said.endswith("; smollm2 is built in")
    assert "\n" not in said


def test_lines_of_progress_are_few_and_tell_each_stage() -> None:
    lines: list[str] = []
    sink = LineBoard(lines.append).sink("ring-0")
    for stage in range(2):
        for done in range(0, 101):
            sink(StageProgress(stage, done * 2**20, 100 * 2**20, "weights"))
        sink(StageProgress(stage, 100 * 2**20, 100 * 2**20, "warm-up"))
    assert len(lines) == 2 * 6
    assert lines[0] == "ring-0 stage 0 weights 0 of 100 MiB"
    assert lines[-2:] == ["ring-0 stage 1 weights 100 of 100 MiB", "ring-0 stage 1 warm-up"]


def test_a_terminal_gets_bars_and_a_pipe_gets_lines() -> None:
    shown = {}
    for terminal in (True, False):
        out = StringIO()
        console = Console(file=out, force_terminal=terminal, width=100)
        with open_board(console) as board:
            board.note("[b] downloading")
            board.sink("ring-0")(StageProgress(0, 2**20, 2**21, "weights"))
        shown[terminal] = out.getvalue()
    assert shown[False] == "[b] downloading\nring-0 stage 0 weights 1 of 2 MiB\n"
    assert "\x1b[" in shown[True]
    assert "━" in shown[True]


@asynccontextmanager
async def server(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A server in its own process, and its ready line."""
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "serve", "demo", "--ring", "fake", *flags),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "RINGSERVE_LANES": "3"},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            yield process, (await process.stdout.readline()).decode()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_drains_and_ends_well(number: signal.Signals) -> None:
    async with server() as (process, ready):
        process.send_signal(number)
        rest, errors = await process.communicate()
    assert ready.startswith("ready: grpc 127.0.0.1:")
    assert "3 lanes x 4096 rows" in ready
    assert "numerics exact" in ready
    assert (process.returncode, rest) == (0, b"")
    assert b"draining: no turn is running; Ctrl-C again stops at once\nstopped\n" in errors
    assert b"Traceback" not in errors


async def test_a_second_signal_stops_a_drain_at_once() -> None:
    endless = TurnRequest(TextPrompt("x"), ignore_eos=True)
    async with (
        server("--max-rows", "100000", "--drafts", "0") as (process, ready),
        Client(ready.split()[2].rstrip(",")) as client,
        client.generate(endless) as stream,
    ):
        await anext(stream)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while b"draining" not in (line := await process.stderr.readline()):
            assert line
        assert b"draining: 1 turn is running" in line
        process.send_signal(signal.SIGINT)
        errors = await process.stderr.read()
        assert await process.wait() == 130
    assert errors == b"interrupted\n"


async def _loading(launch: str) -> asyncio.subprocess.Process:
    """A server whose model does not come; it prints a line when it has begun to wait."""
    script = (
        "import asyncio, os, signal, threading, time, gateway.cli.serve as serve\n"
        "from contextlib import asynccontextmanager\n"
        "from gateway.settings import RingKind, ServeSettings\n"
        "@asynccontextmanager\n"
        "async def launch(settings, board):\n"
        f"    {launch}\n"
        "    yield\n"
        "serve.launch = launch\n"
        "settings = ServeSettings('m', ring=RingKind.FAKE)\n"
        "raise SystemExit(serve.serve_until_interrupted(settings))\n"
    )
    return await _begun(script)


async def _begun(script: str) -> asyncio.subprocess.Process:
    """Python, when it has said its first line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    return process


async def _end(process: asyncio.subprocess.Process) -> tuple[int | None, bytes]:
    """Its exit code, and what it said on standard error."""
    async with asyncio.timeout(20):
        _, errors = await process.communicate()
    return process.returncode, errors


async def test_a_signal_while_loading_says_interrupted() -> None:
    process = await _loading("print('loading', flush=True); await asyncio.Event().wait()")
    process.send_signal(signal.SIGINT)
    assert await _end(process) == (130, b"interrupted\n")


@pytest.mark.parametrize(
    "launch",
    [
        "await asyncio.to_thread(lambda: (print('loading', flush=True), time.sleep(60)))",
        "print('loading', flush=True); [time.sleep(0.01) for _ in range(6000)]",
    ],
)
async def test_a_signal_ends_it_whatever_is_imported_or_keeps_the_event_loop(launch: str) -> None:
    process = await _loading(launch)
    process.send_signal(signal.SIGTERM)
    assert await _end(process) == (130, b"interrupted\n")


async def test_what_rays_handler_leaves_behind_does_not_abort_the_end() -> None:
    """It sets an alarm that does, and hands the signal on."""
    process = await _loading(
        "ours = signal.getsignal(signal.SIGTERM); "
        "signal.signal(signal.SIGALRM, lambda *_: os.abort()); "
        "signal.signal(signal.SIGTERM, lambda *a: (signal.setitimer(signal.ITIMER_REAL, 0.3), ours(*a))); "
        "print('loading', flush=True); os.kill(os.getpid(), signal.SIGTERM)\n"
        "    try: await asyncio.Event().wait()\n"
        "    finally: await asyncio.sleep(0.7)"
    )
    assert await _end(process) == (130, b"interrupted\n")


async def test_an_interruption_of_the_imports_is_one_line() -> None:
    """Before there is a command line that could say so."""
    script = (
        "import sys, time\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        "            print('importing', flush=True); time.sleep(60)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "from gateway.cli.entry import main; main()\n"
    )
    process = await _begun(script)
    process.send_signal(signal.SIGINT)
    assert await _end(process) == (130, b"interrupted\n")


async def test_a_handler_that_somebody_sets_while_it_serves_does_not_stay() -> None:
    """Ray's core sets its own whenever it starts, as with a ring that is added behind the last one."""
    with _Interrupts(print) as interrupts:
        interrupts.drain_from_now()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        await until(lambda: signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN)
        async with asyncio.timeout(5):
            os.kill(os.getpid(), signal.SIGTERM)
            await interrupts.asked()


async def test_a_second_signal_does_not_wait_for_a_thread_that_loads() -> None:
    process = await _loading(
        "await asyncio.to_thread(lambda: (print('loading', flush=True), threading.Event().wait()))"
    )
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    code, errors = await _end(process)
    assert code == 130
    assert b"Traceback" not in errors


def test_a_server_that_is_not_there_is_one_clear_line_in_chat() -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*taken.getsockname())
        code, output = ringserve("chat", "--address", address)
    assert code == 1
    assert output.startswith(f"cannot reach {address}: ")
    assert output.count("\n") == 1


def test_a_plan_says_whose_limit_it_is() -> None:
    model = Footprint("m", "float32", (2**20,), (1024,), 0, 0, 0, False, 64, 64, 64, 8192)
    plan = plan_footprint(model, 1, 1, None, (2**34,))
    tight = plan_footprint(model, 1, 1, None, (400 * 2**20,))
    assert _limited(plan.rows_that_fit, plan) == "8192 (the model's limit)"
    assert "the memory's limit" in _limited(tight.rows_that_fit, tight)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--request-bytes", "1M"),
        ("--drafts", "64"),
        ("--heal-attempts", "0"),
        ("--probe-timeout-s", "-1"),
        ("--spare", "2000"),
        ("--drain-s", "-1"),
        ("--http-port", "70000"),
    ],
)
def test_what_a_flag_cannot_be_is_said_of_the_flag(flag: str, value: str) -> None:
    code, output = ringserve("serve", "fake", "--ring", "fake", flag, value)
    assert code == 2
    assert output.startswith(f"error: {flag}: must ")
    assert output.count("\n") == 1


def test_a_setting_without_a_flag_keeps_its_name() -> None:
    assert flag_of("queue_limit") == "--queue-limit"
    assert flag_of("address") == "--address"
    assert flag_of("chunk_rows") == "chunk_rows"


def test_settings_refuse_what_cannot_be() -> None:
    for wrong in ({"rings": 0}, {"model": ""}, {"max_rows": 0}):
        with pytest.raises(InvalidSetting):
            ServeSettings(**{"model": "m", "ring": RingKind.FAKE, **wrong})


def test_a_disk_without_host_memory_in_front_of_it_is_refused(tmp_path: Path) -> None:
    """Rows reach the disk from there: the folder would stay empty without a word."""
    with pytest.raises(InvalidSetting, match="kv_host_bytes is 0"):
        ServeSettings(model="x", kv_disk=tmp_path, kv_host_bytes=0)


def test_a_store_beyond_this_hosts_memory_is_refused_at_the_start(tiny_model: Path) -> None:
    settings = ServeSettings(model=str(tiny_model), ring=RingKind.LOCAL, kv_host_bytes=2**50)
    with pytest.raises(InvalidSetting, match="more than the"):
        ring_config(settings, LineBoard(lambda text: None))
