"""A whole storm over fake rings: it finds nothing where all is well, and whatever is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.errors import InvalidSetting, RingLost
from coordinator.frames import Epoch
from coordinator.held import Holding
from fakering.faults import CorruptRow
from fakering.ring import FakeRing
from gateway.chaos.faults import Patience
from gateway.chaos.options import StormOptions
from gateway.chaos.report import ChaosReport
from gateway.chaos.run import run_chaos
from gateway.chaos.storm import Fault, Moment, parse_faults
from gateway.chaos.traffic import Shape
from gateway.cli.app import app
from gateway.progress import SilentBoard
from gateway.settings import RingKind, ServeSettings

pytestmark = pytest.mark.long

SETTINGS = ServeSettings(model="fake", ring=RingKind.FAKE, lanes=3, max_rows=4096, stages=3)
OPTIONS = StormOptions(
    seed=7,
    faults=parse_faults("kill-prefill,kill-decode,kill-speculation,kill-restore,kill-publish"),
    streams=3,
    every_s=0.1,
    shape=Shape(pool=3, turns=3, answer_tokens=24),
    patience=Patience(heal_s=10.0, calm_s=0.1, rest_s=5.0),
)


async def storm(options: StormOptions = OPTIONS, settings: ServeSettings = SETTINGS) -> ChaosReport:
    return await run_chaos(settings, options, SilentBoard())


async def test_a_storm_over_a_sound_ring_finds_nothing_and_strikes_in_the_midst() -> None:
    told = await storm(settings=replace(SETTINGS, rings=2))
    assert told.problems == ()
    assert told.is_clean
    assert told.kills == 5
    assert [(kind.fault, kind.count) for kind in told.faults] == [
        (str(f), 1) for f in OPTIONS.faults
    ]
    assert sum(kind.in_moment for kind in told.faults) >= 1
    assert sum(kind.streams_hit for kind in told.faults) >= 5
    assert told.elsewhere_pause_s_p95 is not None
    assert told.streams > 20


async def test_a_slow_stage_is_no_loss() -> None:
    told = await storm(replace(OPTIONS, faults=(Fault.SLOW,)))
    assert told.is_clean
    (slow,) = told.faults
    assert (slow.count, slow.answers_again_s_p50) == (1, None)


async def test_it_ends_after_so_many_kills_or_minutes() -> None:
    told = await storm(replace(OPTIONS, faults=(Fault.KILL_DECODE,), kills=3))
    assert (told.kills, told.faults[0].count) == (3, 3)
    told = await storm(replace(OPTIONS, faults=(Fault.SLOW, Fault.GATEWAY), kills=3))
    assert (told.kills, [kind.fault for kind in told.faults]) == (0, ["slow"])
    told = await storm(replace(OPTIONS, minutes=0.01))
    assert 1 <= told.kills < 20


def sabotaged(monkeypatch: pytest.MonkeyPatch, change: Callable[[FakeRing], None]) -> None:
    start = FakeRing.start

    async def changed(ring: FakeRing, progress: object) -> object:
        info = await start(ring, progress)  # type: ignore[arg-type]
        change(ring)
        return info

    monkeypatch.setattr(FakeRing, "start", changed)


async def test_rows_that_are_wrong_behind_a_fault_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def corrupt(ring: FakeRing) -> None:
        faults = [CorruptRow(1, 10 * n, row=3 + n, in_ledger=False) for n in range(40)]
        ring.network._faults._stages += faults

    sabotaged(monkeypatch, corrupt)
    told = await storm(replace(OPTIONS, kills=2))
    assert told.wrong_streams > 0
    assert any("differ from their cold answer" in problem for problem in told.problems)
    assert not told.is_clean


async def test_a_ring_that_does_not_heal_loses_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(ring: FakeRing, epoch: Epoch) -> Holding:
        raise RingLost(0, "no room for it")

    monkeypatch.setattr(FakeRing, "open_epoch", refuses)
    patience = Patience(heal_s=2.0, calm_s=0.1, rest_s=0.5)
    scheduler = replace(SETTINGS.scheduler, heal_attempts=2, heal_backoff_s=0.1)
    options = replace(OPTIONS, kills=1, patience=patience)
    told = await storm(options, replace(SETTINGS, scheduler=scheduler))
    assert told.lost_streams >= OPTIONS.streams
    (kind,) = told.faults
    assert "did not answer within 2 s: RingLost: stage 0: no room for it" in kind.problems[0]


@pytest.mark.parametrize(
    ("loses", "told_of_it"),
    [
        (lambda held: replace(held, lanes=()), "has 0 rows"),
        (lambda held: replace(held, nodes=()), "stages keep 0 nodes that nobody knows, and lack"),
    ],
)
async def test_stages_that_hold_something_else_than_is_believed_are_found(
    monkeypatch: pytest.MonkeyPatch, loses: Callable[[Holding], Holding], told_of_it: str
) -> None:
    opens = FakeRing.open_epoch

    async def lossy(ring: FakeRing, epoch: Epoch) -> Holding:
        return loses(await opens(ring, epoch))

    monkeypatch.setattr(FakeRing, "open_epoch", lossy)
    told = await storm(replace(OPTIONS, kills=1))
    assert any(told_of_it in problem for problem in told.problems)


async def test_another_ring_that_is_disturbed_is_found() -> None:
    def fall(ring: FakeRing) -> None:
        if not fallen:
            fallen.append(ring)  # ring-0 starts first, and is struck anyway
        else:
            ring.hold_up(0, 0.0)
            ring.network.kill(0, ring._clock.now() + 0.5)

    fallen: list[FakeRing] = []
    with pytest.MonkeyPatch.context() as patch:
        sabotaged(patch, fall)
        told = await storm(replace(OPTIONS, kills=1), replace(SETTINGS, rings=2))
    assert any(problem.startswith("ring-1 was not struck, and lost") for problem in told.problems)


async def test_what_is_not_possible_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(InvalidSetting, match="none of them can be done to this kind of ring"):
        await storm(replace(OPTIONS, faults=(Fault.STOP,)))
    with pytest.raises(InvalidSetting, match="none of them can be done to this kind of ring"):
        await storm(replace(OPTIONS, faults=(Fault.GATEWAY,)))
    for name in ("streams", "kills", "minutes", "every_s"):
        with pytest.raises(InvalidSetting, match=f"{name}: must be greater than 0"):
            replace(OPTIONS, **{name: 0})


def test_the_command_prints_the_figures_and_its_exit_code_tells_whether_all_was_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soak = tmp_path / "soak.json"
    command = ["chaos", "fake", "--ring", "fake", "--faults", "kill-decode", "--every", "0.1"]
    command += ["--streams", "2", "--soak", str(soak), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["kills"], told["wrong_streams"], told["lost_streams"]) == (1, 0, 0)
    looks = json.loads(soak.read_text(encoding="utf-8"))
    assert {each["role"] for each in looks["processes"]} == {"gateway"}
    assert looks["rings"][0]["ring"] == "ring-0"
    result = CliRunner().invoke(app, [*command[:4], "--faults", "fire"])
    assert result.exit_code != 0
    assert "'fire' is none of" in result.output


def test_every_moment_has_a_kill() -> None:
    assert {fault.moment for fault in Fault if fault.moment} == set(Moment)
