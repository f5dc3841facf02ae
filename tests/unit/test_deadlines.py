"""Every wait of a serving process has a deadline from its settings, and is told at the start."""

from __future__ import annotations

import json
import logging
import socket
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from coordinator.config import SchedulerSettings
from coordinator.errors import InvalidSetting
from gateway import launch as launching
from gateway.cli.app import app
from gateway.client import Client
from gateway.deadlines import Deadlines, deadlines_line, deadlines_of
from gateway.launch import launch
from gateway.models import ModelFolder
from gateway.observing.logs import JsonLines
from gateway.progress import SilentBoard
from gateway.settings import Device, GrpcSettings, HttpSettings, RingKind, ServeSettings
from stage.config import RingConfig

CONFIG = RingConfig(Path("m"), "m", ((0, 1), (1, 2)))
RAY = ServeSettings("m")
# Their names in the line, where they are not the settings' own: those that have a flag are named as it is.
RENAMED = {
    "load_s": "load_timeout_s",
    "keepalive_s": "grpc_keepalive_s",
    "keepalive_timeout_s": "grpc_keepalive_timeout_s",
}


def seconds(record: type[Any]) -> set[str]:
    named = {each.name for each in fields(record)}
    return {RENAMED.get(name, name) for name in named if name.endswith("_s")}


@pytest.mark.parametrize(
    "record", [RingConfig, SchedulerSettings, GrpcSettings, HttpSettings, ServeSettings]
)
def test_every_setting_of_seconds_is_told(record: type[Any]) -> None:
    assert seconds(record) <= seconds(Deadlines)


def test_a_ray_rings_line_names_its_values() -> None:
    settings = ServeSettings(
        "m",
        scheduler=SchedulerSettings(reply_timeout_s=11, heal_timeout_s=12, heal_attempts=3),
        grpc=GrpcSettings(drain_s=4.5),
    )
    config = replace(CONFIG, probe_s=0.5, probe_timeout_s=2.5, load_s=99.0)
    line = deadlines_line(deadlines_of(settings, config))
    assert line.startswith("deadlines: reply_timeout_s 11, heal_timeout_s 12, heal_attempts 3, ")
    for told in ("probe_s 0.5", "probe_timeout_s 2.5", "load_timeout_s 99", "drain_s 4.5"):
        assert f" {told}" in line
    assert "\n" not in line


def test_how_long_a_front_bears_with_who_does_not_read_is_told_as_it_is() -> None:
    """A tenth longer than the coordinator, which says why."""
    settings = ServeSettings("m", http=HttpSettings(unread_s=20.0))
    assert deadlines_of(settings, CONFIG).http_unread_s == pytest.approx(22.0)


def test_what_a_kind_of_ring_does_not_wait_for_is_left_out() -> None:
    threads = ServeSettings("m", RingKind.LOCAL)
    line = deadlines_line(deadlines_of(threads, CONFIG))
    assert "rest_s" in line
    assert not [name for name in ("probe_s", "place_s", "lease_s", "mirror_s") if name in line]
    assert "rest_s" not in deadlines_line(deadlines_of(ServeSettings("m", RingKind.FAKE), None))
    attached = deadlines_of(RAY, CONFIG)
    assert (attached.lease_s, attached.mirror_s) == (None, None)
    kept = deadlines_of(RAY, replace(CONFIG, detached=True, mirror=True))
    assert (kept.lease_s, kept.mirror_s) == (CONFIG.lease_s, CONFIG.mirror_s)


async def test_a_process_that_serves_knows_its_deadlines() -> None:
    scheduler = SchedulerSettings(heal_attempts=2)
    settings = ServeSettings("fake", RingKind.FAKE, lanes=1, scheduler=scheduler)
    async with launch(settings, SilentBoard()) as running:
        assert running.deadlines == deadlines_of(settings, None)
        assert running.deadlines.heal_attempts == 2


def test_in_json_they_are_one_object() -> None:
    record = logging.makeLogRecord(
        {"msg": "deadlines", "name": "x", "fields": deadlines_of(RAY, CONFIG)}
    )
    told = json.loads(JsonLines().format(record))
    assert (told["message"], told["heal_timeout_s"], told["lease_s"]) == ("deadlines", 300.0, None)


def test_the_same_default_is_meant_here_and_in_the_ring() -> None:
    assert (RAY.probe_s, RAY.probe_timeout_s) == (CONFIG.probe_s, CONFIG.probe_timeout_s)
    assert (RAY.load_timeout_s, RAY.spares) == (CONFIG.load_s, CONFIG.spares)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["probe_s", "probe_timeout_s", "load_timeout_s"])
def test_no_wait_is_without_end(name: str, value: float) -> None:
    with pytest.raises(InvalidSetting, match=name):
        ServeSettings("m", **{name: value})


def test_only_processes_can_be_spared() -> None:
    with pytest.raises(InvalidSetting, match="spare"):
        ServeSettings("m", RingKind.LOCAL, spares=1)
    with pytest.raises(InvalidSetting, match="spare"):
        ServeSettings("m", spares=-1)


@pytest.mark.parametrize(
    "flags",
    [
        ("--heal-attempts", "0"),
        ("--heal-timeout-s", "0"),
        ("--reply-timeout-s", "-1"),
        ("--probe-s", "0"),
        ("--load-timeout-s", "inf"),
        ("--spare", "1"),
    ],
)
def test_an_impossible_wait_is_bad_usage(flags: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["serve", "fake", "--ring", "fake", *flags])
    assert (result.exit_code, "Traceback" in result.output) == (2, False)
    assert f"error: {flags[0]}: " in result.output


def test_a_variable_is_as_good_as_a_flag() -> None:
    command, environment = ["serve", "fake"], {"RINGSERVE_PROBE_TIMEOUT_S": "nan"}
    result = CliRunner().invoke(app, command, env=environment)
    assert result.exit_code == 2
    assert "error: --probe-timeout-s: " in result.output


def test_what_an_operator_set_reaches_the_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = SimpleNamespace(
        check=lambda: None, splits=CONFIG.splits, max_rows=64, dtype="float32", stages=()
    )
    monkeypatch.setattr(launching, "find_model", lambda *_: ModelFolder(Path("m"), "m"))
    monkeypatch.setattr(launching, "_plan", lambda *_: plan)
    settings = ServeSettings(
        "m", device=Device.CPU, spares=2, probe_s=3, probe_timeout_s=20, load_timeout_s=7
    )
    config = launching.ring_config(settings, SilentBoard())
    assert (config.spares, config.probe_s, config.probe_timeout_s, config.load_s) == (2, 3, 20, 7)
    # A stage must not end itself while its ring still waits for its answer.
    assert config.fence_s > 2 * config.probe_timeout_s


async def test_a_client_does_not_wait_for_ever_for_a_server_that_says_nothing() -> None:
    with socket.socket() as silent:  # connections are made, and nobody reads them
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        host, port = silent.getsockname()
        async with Client(f"{host}:{port}", answer_s=0.2) as client:
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await client.rings()
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
