"""The fuzzer: whole runs of the real scheduler with everything drawn from a seed, for as long as it is told.

    python -m fakering.fuzz --seconds 60              from a seed of its own
    python -m fakering.fuzz --seeds 20000 --first 0   so many, from this one on
    python -m fakering.fuzz --seed 4711               that run again, and only it

Decides nothing about right or wrong: simulation.py does. Exit code 1 names the seed that failed, and tells the smallest
part of its run that fails.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable

from fakering.cases import Case, random_case, shrunk
from fakering.simulation import Simulation, SimulationFailed


def run_case(seed: int) -> Simulation:
    """Raises SimulationFailed with the seed in its message."""
    return _played(random_case(seed))


def _played(case: Case) -> Simulation:
    simulation = case.simulation()
    try:
        simulation.run()
    except SimulationFailed as failed:
        raise SimulationFailed(f"seed {case.seed}: {failed}") from failed
    return simulation


def explained(seed: int) -> str:
    """What is left of a failing seed's run when all is taken away that it does not take to fail."""
    case = shrunk(random_case(seed))
    try:
        _played(case)
    except SimulationFailed as failed:
        return f"the least of it that fails:\n{case}\n{failed}"
    return "it does not fail again"


def fuzz(
    first_seed: int,
    tell: Callable[[str], None],
    *,
    seconds: float = 0.0,
    seeds: int | None = None,
) -> int:
    """Runs seed after seed until the time is over, or so many; how many ran. Raises SimulationFailed."""
    begin, seed = time.monotonic(), first_seed
    while (time.monotonic() < begin + seconds) if seeds is None else (seed < first_seed + seeds):
        run_case(seed)
        seed += 1
    took = time.monotonic() - begin
    tell(f"{seed - first_seed} runs from seed {first_seed} on in {took:.0f} s: no breach")
    return seed - first_seed


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fakering.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, help="so many, however long it takes")
    parser.add_argument("--first", type=int, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this one only")
    options = parser.parse_args()
    first, seeds = options.first, options.seeds
    if options.seed is not None:
        first, seeds = options.seed, 1
    elif first is None:
        first = random.SystemRandom().randrange(1 << 40)
    try:
        fuzz(first, _say, seconds=options.seconds, seeds=seeds)
    except SimulationFailed as failed:
        _say(str(failed))
        _say(explained(int(str(failed).split(":")[0].removeprefix("seed "))))
        raise SystemExit(1) from failed


if __name__ == "__main__":
    main()
