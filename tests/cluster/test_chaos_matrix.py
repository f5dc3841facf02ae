"""Sixty kills in random moments: of two and three stages, under one, four and eight streams, with a warm spare or none.

`make matrix`. Every stream ends with the tokens that an undisturbed ring gives, nothing is left over, and rings that
were not struck notice nothing. At its end it tells the medians of the pause.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.chaos.faults import Patience
from gateway.chaos.options import StormOptions
from gateway.chaos.report import ChaosReport
from gateway.chaos.run import run_chaos
from gateway.chaos.storm import parse_faults
from gateway.chaos.traffic import Shape
from gateway.progress import SilentBoard
from gateway.settings import ServeSettings

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

KILLS = 5
MOMENTS = parse_faults("kill-prefill,kill-speculation,kill-restore,kill-publish")


@dataclass(frozen=True, slots=True)
class Case:
    stages: int
    streams: int
    spares: int

    def __str__(self) -> str:
        return f"{self.stages}-stages-{self.streams}-streams-{self.spares}-spares"

    @property
    def rings(self) -> int:
        """Another ring beside the one that is struck, where a small cluster has room for it."""
        return 2 if (self.stages, self.spares) == (2, 0) else 1


CASES = [
    Case(stages, streams, spares) for spares in (0, 1) for stages in (2, 3) for streams in (1, 4, 8)
]


@pytest.fixture(scope="module")
def model(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a layer for each of three stages."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    folder = tmp_path_factory.mktemp("matrix")
    shutil.copytree(small_model, folder, dirs_exist_ok=True)
    set_seed(13)
    config = AutoConfig.from_pretrained(small_model, num_hidden_layers=3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def found() -> list[tuple[Case, ChaosReport]]:
    """What the cases have found so far."""
    return []


@pytest.mark.parametrize("case", CASES, ids=Case.__str__)
async def test_no_stream_is_wrong_or_lost_whichever_stage_is_killed_in_whatever_moment(
    case: Case, model: Path, found: list[tuple[Case, ChaosReport]]
) -> None:
    settings = ServeSettings(
        model=str(model),
        stages=case.stages,
        rings=case.rings,
        spares=case.spares,
        lanes=case.streams,
        max_rows=2048,
    )
    options = StormOptions(
        seed=CASES.index(case),
        faults=MOMENTS,
        streams=case.streams * case.rings,
        kills=KILLS,
        every_s=0.1,
        shape=Shape(pool=4, turns=4, answer_tokens=32),
        patience=Patience(heal_s=120.0),
    )
    told = await run_chaos(settings, options, SilentBoard())
    found.append((case, told))
    assert told.is_clean, told
    assert told.kills >= KILLS
    assert sum(kind.streams_hit for kind in told.faults) >= KILLS // 2


async def test_a_gateway_is_killed_twice_and_its_streams_go_on_over_the_same_stages(
    model: Path,
) -> None:
    settings = ServeSettings(model=str(model), lanes=4, max_rows=2048)
    options = StormOptions(
        seed=3,
        faults=parse_faults("gateway"),
        kills=2,
        shape=Shape(pool=4, turns=4, answer_tokens=32),
    )
    told = await run_chaos(settings, options, SilentBoard())
    assert told.is_clean, told
    assert (told.kills, told.faults[0].fault) == (2, "gateway")
    assert told.asked_again >= 2
    assert told.reused_share is not None
    assert told.reused_share > 0.5


def test_all_of_the_kills_were_made_and_a_warm_spare_shortens_the_pause(
    found: list[tuple[Case, ChaosReport]], capsys: pytest.CaptureFixture[str]
) -> None:
    cold, warm = (
        statistics.median(t.pause_s_p50 for c, t in found if c.spares == n and t.pause_s_p50)
        for n in (0, 1)
    )
    with capsys.disabled():
        sys.stdout.write("\n")
        for case, told in found:
            hit = sum(kind.in_moment for kind in told.faults)
            pause = f"pause p50 {told.pause_s_p50} s, p95 {told.pause_s_p95} s"
            kills = f"{told.kills} kills, {hit} of them in the moment"
            sys.stdout.write(f"{case}: {kills}; {told.streams} streams, {pause}\n")
        sys.stdout.write(f"median pause: {cold:.2f} s, and {warm:.2f} s with a warm spare\n")
    assert sum(told.kills for _, told in found) >= 50
    assert warm < cold
