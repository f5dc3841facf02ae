"""The fuzzer: whole runs of the real scheduler with everything drawn from a seed, for as long as it is told.

    python -m fakering.fuzz --seconds 60          from a seed of its own
    python -m fakering.fuzz --seed 4711           that run again, and only it

Decides nothing about right or wrong: simulation.py does. Exit code 1 names the seed that failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable

from coordinator.config import SchedulerSettings
from coordinator.errors import RingserveError, StageLost
from fakering.faults import ALL_FAULTS, random_script
from fakering.model import FakeModel
from fakering.simulation import Simulation, SimulationFailed, random_plan

_VOCABULARY = 60
_END_TOKEN = _VOCABULARY - 1


def random_case(seed: int) -> Simulation:
    """Eight jobs over a ring of odd sizes, most times with faults; the same seed is the same run."""
    dice = random.Random(seed)
    stages = dice.randint(1, 4)
    faults = random_script(
        seed,
        stages,
        frames=dice.choice((10, 40, 80)),
        count=dice.choice((0, 1, 2, 4)),
        kinds=ALL_FAULTS,
        longest_s=8.0,
    )
    tenants = random.Random(f"tenants/{seed}").choice((("",), ("a", "b"), ("", "a")))
    head = dice.choice((0, 4, 20, 40))
    return Simulation(
        random_plan(seed, jobs=8, vocab_size=_END_TOKEN, head=head, tenants=tenants),
        FakeModel(
            _VOCABULARY,
            seed=seed,
            quoting=dice.choice((0.0, 0.5, 0.9, 1.0)),
            end_token=_END_TOKEN,
            end_one_in=dice.choice((8, 40, 400)),
        ),
        stages=stages,
        lanes=dice.choice((1, 2, 3, 8)),
        max_rows=dice.choice((24, 64, 160)),
        exact=dice.random() < 0.75,
        host_rows=dice.choice((0, 8, 60, 1000)),
        state_rows=dice.choice((0, 0, 4, 16)),
        checkpoints=dice.choice((0, 1, 3, 50)),
        settings=_random_settings(dice),
        faults=faults,
        end_tokens=frozenset({_END_TOKEN}),
    )


def _random_settings(dice: random.Random) -> SchedulerSettings:
    chunk_rows = dice.choice((1, 4, 10, 64))
    return SchedulerSettings(
        frame_rows=chunk_rows * dice.choice((1, 2, 5)),
        chunk_rows=chunk_rows,
        min_chunk_rows=dice.choice((1, 3)),
        min_copy_rows=dice.choice((1, 3, 16)),
        node_rows=dice.choice((1, 4, 16)),
        max_drafts=dice.choice((0, 1, 3, 15)),
        max_stretch=dice.choice((1.0, 2.5, 10.0)),
        queue_limit=dice.choice((1, 4, 64)),
        reply_timeout_s=5.0,
    )


def run_case(seed: int) -> Simulation:
    """Raises SimulationFailed with the seed in its message."""
    simulation = random_case(seed)
    try:
        simulation.run()
    except SimulationFailed as failed:
        raise SimulationFailed(f"seed {seed}: {failed}") from failed
    except RingserveError as error:
        raise SimulationFailed(f"seed {seed}: {type(error).__name__}: {error}") from error
    for number, job in simulation.jobs.items():
        if isinstance(job.error, StageLost):
            raise SimulationFailed(f"seed {seed}: job {number} lost its ring: {job.error}")
    return simulation


def fuzz(seconds: float, first_seed: int, tell: Callable[[str], None]) -> int:
    """Runs seed after seed until the time is over; how many ran. Raises SimulationFailed."""
    end, seed = time.monotonic() + seconds, first_seed
    while time.monotonic() < end:
        run_case(seed)
        seed += 1
    tell(f"{seed - first_seed} runs from seed {first_seed} on: no breach")
    return seed - first_seed


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fakering.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="run this one only")
    options = parser.parse_args()
    try:
        if options.seed is not None:
            run_case(options.seed)
            _say(f"seed {options.seed}: no breach")
        else:
            fuzz(options.seconds, random.SystemRandom().randrange(1 << 40), _say)
    except SimulationFailed as failed:
        _say(str(failed))
        raise SystemExit(1) from failed


if __name__ == "__main__":
    main()
