"""What `ringserve chaos` prints and how it exits, whatever the storm found; and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.errors import InvalidSetting
from gateway.chaos import run
from gateway.chaos.options import StormOptions
from gateway.chaos.report import ChaosReport
from gateway.chaos.storm import Fault
from gateway.cli.app import app

CLEAN = ChaosReport(
    kills=1,
    streams=9,
    wrong_streams=0,
    lost_streams=0,
    pause_s_p50=0.5,
    pause_s_p95=0.75,
    faults=(),
    problems=(),
    asked_again=0,
    reused_share=0.5,
    elsewhere_pause_s_p95=None,
)
WRONG = {"wrong_streams": 1, "problems": ("a stream differs",)}
PROMISED = {"kills", "streams", "wrong_streams", "lost_streams", "pause_s_p50", "pause_s_p95"}


def found(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    async def storm(*_: object) -> ChaosReport:
        print("(raylet) a worker died, as Ray tells it")  # noqa: T201
        return replace(CLEAN, **changes)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "run_chaos", storm)


@pytest.mark.parametrize(
    ("changes", "code"),
    [({}, 0), (WRONG, 1), ({"lost_streams": 1}, 1), ({"problems": ("a process is left over",)}, 1)],
)
def test_json_is_all_that_stands_on_standard_output_and_the_exit_code_tells_the_rest(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], code: int
) -> None:
    found(monkeypatch, **changes)
    result = CliRunner().invoke(app, ["chaos", "fake", "--ring", "fake", "--json"])
    assert result.exit_code == code, result.output
    told = json.loads(result.stdout)
    assert set(told) >= PROMISED
    assert {name: told[name] for name in ("kills", "streams", "pause_s_p95")} == {
        "kills": 1,
        "streams": 9,
        "pause_s_p95": 0.75,
    }
    for problem in told["problems"]:
        assert f"PROBLEM: {problem}" in result.stderr


def test_without_json_what_was_found_stands_on_standard_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found(monkeypatch, **WRONG)
    result = CliRunner().invoke(app, ["chaos", "fake", "--ring", "fake"])
    assert result.exit_code == 1
    assert "1 kills, 9 streams: 1 wrong, 0 lost" in result.stdout
    assert "PROBLEM: a stream differs" in result.stdout


def test_a_number_of_kills_that_no_fault_can_reach_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="kills: none of the faults kills"):
        StormOptions(faults=(Fault.SLOW, Fault.DISK), kills=3)
    assert StormOptions(faults=(Fault.SLOW, Fault.GATEWAY), kills=3).kills == 3


def test_a_place_for_the_soak_that_cannot_be_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found(monkeypatch)
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "soak.json")
    result = CliRunner().invoke(app, ["chaos", "fake", "--ring", "fake", "--soak", place])
    assert result.exit_code == 1
    assert "soak.json cannot be written" in result.stderr
    assert "raylet" not in result.output
