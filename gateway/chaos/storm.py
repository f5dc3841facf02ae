"""The storm's script: which fault strikes which stage, in which moment and after how long. Pure: one seed, one script.

Decides nothing of how a moment is found or a fault is carried out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from coordinator.errors import InvalidSetting


class Moment(StrEnum):
    """What a ring is at."""

    PREFILL = "prefill"
    DECODE = "decode"
    SPECULATION = "speculation"  # drafts are verified, or frames are sent on a guess
    RESTORE = "restore"  # rows come back from chain nodes
    PUBLISH = "publish"  # rows are kept as chain nodes
    LOAD = "load"  # a lost stage's replacement loads


class Act(StrEnum):
    KILL = "kill"
    STOP = "stop"
    SLOW = "slow"
    DISK = "disk"
    GATEWAY = "gateway"


class Fault(StrEnum):
    """As it is chosen on the command line and told in the table."""

    KILL_PREFILL = "kill-prefill"
    KILL_DECODE = "kill-decode"
    KILL_SPECULATION = "kill-speculation"
    KILL_RESTORE = "kill-restore"
    KILL_PUBLISH = "kill-publish"
    KILL_LOAD = "kill-load"
    STOP = "stop"
    SLOW = "slow"
    DISK = "disk"
    GATEWAY = "gateway"

    @property
    def act(self) -> Act:
        return Act(self.partition("-")[0])

    @property
    def moment(self) -> Moment | None:
        """None: any will do."""
        name = self.partition("-")[2]
        return Moment(name) if name else None


KILLS = tuple(fault for fault in Fault if fault.act is Act.KILL)
DEADLY = frozenset({*KILLS, Fault.GATEWAY})
_ANY_MOMENT = (Moment.PREFILL, Moment.DECODE, Moment.SPECULATION)
# How long a process stays stopped once its place has been given away, a link slow, a disk full.
_SHORTEST_S, _LONGEST_S = 1.0, 4.0


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault to come. `depth`: how far into the moment, from 0 to 1; `lasts_s`: where it passes by itself."""

    number: int
    fault: Fault
    moment: Moment
    stage: int
    depth: float
    lasts_s: float
    dice: int  # for what only the fault itself knows how to draw

    def __str__(self) -> str:
        return f"{self.fault} of stage {self.stage} in {self.moment}"


def storm(
    seed: int, faults: Sequence[Fault], stages: int, spell: int | None = None
) -> Iterator[Planned]:
    """Round after round; in each one every fault strikes once, in an order of its own. It never ends.

    `spell`: how many faults in a row strike one stage, before the next one's turn; None: any stage, each time.
    """
    dice = random.Random(f"storm/{seed}")
    first = 0 if spell is None else dice.randrange(stages)
    number = 0
    while True:
        for fault in dice.sample(list(faults), len(faults)):
            yield Planned(
                number=number,
                fault=fault,
                moment=fault.moment or dice.choice(_ANY_MOMENT),
                stage=dice.randrange(stages)
                if spell is None
                else (first + number // spell) % stages,
                depth=dice.random(),
                lasts_s=dice.uniform(_SHORTEST_S, _LONGEST_S),
                dice=dice.randrange(1 << 32),
            )
            number += 1


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Names with commas between them; `kill` stands for its moments, `all` for everything. Raises InvalidSetting."""
    chosen: list[Fault] = []
    for name in (part.strip() for part in text.split(",")):
        if name == "all":
            chosen.extend(Fault)
        elif name == Act.KILL:
            chosen.extend(KILLS)
        elif name in {str(fault) for fault in Fault}:
            chosen.append(Fault(name))
        else:
            known = ", ".join(["all", Act.KILL, *Fault])
            raise InvalidSetting("faults", f"{name!r} is none of {known}")
    return tuple(dict.fromkeys(chosen))
