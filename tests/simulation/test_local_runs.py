"""Nothing is lost on a real ring either: random turns and faults over threads and a tiny model, against cold answers.

500 seeds with `-m long`, some of them in the default run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fakering.faults import Drop
from fakering.plan import PlannedJob
from stage import build
from stage.numerics import NumericsReport
from tests.simulation.local_runs import Rig, Run, rig

TWO, THREE = ((0, 2), (2, 4)), ((0, 1), (1, 3), (3, 4))
VOCABULARY = 199


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that are built anew are as exact as the first ones: to prove it each time would take most of the time."""
    monkeypatch.setattr(build, "probe_numerics", lambda *_: NumericsReport(True, 0.0))


async def played(made: Rig, seeds: range) -> list[Run]:
    return [await made.play(seed) for seed in seeds]


def check_worth(runs: list[Run]) -> None:
    """What would make the verdict hollow."""
    turns = [turn for run in runs for turn in run.turns]
    assert sum(turn.finished is not None for turn in turns) > 2 * len(runs)
    assert sum(run.reused for run in runs) > 0
    assert sum(run.epochs for run in runs) > 0
    assert sum(turn.recoveries for turn in turns) > 0
    assert sum(run.restarts for run in runs) > 0


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("proven")
async def test_random_turns_and_faults_never_change_a_token_of_a_real_ring(
    tiny_model: Path,
) -> None:
    async with rig(tiny_model, THREE, VOCABULARY) as made:
        check_worth(await played(made, range(20)))


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("proven")
async def test_recurrent_states_outlive_epochs_as_rows_do(tiny_hybrid: Path) -> None:
    async with rig(tiny_hybrid, TWO, VOCABULARY) as made:
        assert made.ring.capacity().state_rows > 0
        check_worth(await played(made, range(6)))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("proven")
@pytest.mark.parametrize("splits", [TWO, THREE])
async def test_200_runs_on_rings_of_threads(
    tiny_model: Path, splits: tuple[tuple[int, int], ...]
) -> None:
    async with rig(tiny_model, splits, VOCABULARY) as made:
        check_worth(await played(made, range(200)))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("proven")
async def test_100_runs_with_recurrent_layers(tiny_hybrid: Path) -> None:
    async with rig(tiny_hybrid, TWO, VOCABULARY) as made:
        check_worth(await played(made, range(100)))


# A lost message costs no row


@pytest.mark.usefixtures("proven")
async def test_a_lost_message_costs_no_row_that_all_stages_had(tiny_model: Path) -> None:
    """The second turn goes on behind all rows of the first, wherever a message of the first was lost."""
    plan = (
        PlannedJob(0.0, tuple(range(20, 50)), "a", max_new_tokens=6, draft=False),
        PlannedJob(0.0, (60, 61, 62), "a", follows=0, max_new_tokens=4, draft=False),
    )
    async with rig(tiny_model, THREE, VOCABULARY) as made:
        for leg, nth in itertools.product(range(4), (1, 3, 5)):
            run = await made.play_plan(plan, (Drop(leg, nth),))
            first, second = run.turns
            assert len(run.struck) == 1
            assert run.epochs >= 1
            assert first.finished is not None
            assert second.started is not None
            assert second.started.cached_prefix == 30 + len(first.tokens) - 1
