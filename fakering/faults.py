"""Scripted faults: what goes wrong, on which leg or stage, and at which frame.

Leg i leads into stage i; the leg behind the last stage leads to the coordinator. `nth` counts the messages of
that leg (or the frames that reached that stage) from 0, over all epochs, since the network was made. This file
only says what happens; network.py and stages.py make it happen. Each fault happens once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from coordinator.frames import Frame, LoadNodes, Op, OpenLane, RefusalCode


@dataclass(frozen=True, slots=True)
class Delay:
    """The message, and those behind it on the leg, arrive later."""

    leg: int
    nth: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Drop:
    leg: int
    nth: int


@dataclass(frozen=True, slots=True)
class Duplicate:
    leg: int
    nth: int


@dataclass(frozen=True, slots=True)
class Reorder:
    """The message arrives later, and those that are sent meanwhile overtake it."""

    leg: int
    nth: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Restart:
    """The stage has lost its rows, in ledger and buffers, and still counts frames as before."""

    stage: int
    nth: int


@dataclass(frozen=True, slots=True)
class CorruptRow:
    """One of the rows that a lane is reopened with changes, at the first such reopening from `nth` on.

    With `in_ledger` the stage's ledger tells of it, as a check of the bytes would: KV-CONTENT. Without, only
    the buffer changes: nothing can notice but the text.
    """

    stage: int
    nth: int
    row: int = 0  # modulo the cached prefix
    in_ledger: bool = True


@dataclass(frozen=True, slots=True)
class LoseNode:
    """From frame `nth` on, waits for one that loads chain nodes, and has lost or finds damaged one of them."""

    stage: int
    nth: int
    which: int = 0  # modulo the nodes that the frame loads


@dataclass(frozen=True, slots=True)
class KeepNothing:
    """From frame `nth` on, waits for one that stores chain nodes, and cannot keep any of them."""

    stage: int
    nth: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The stage refuses every lane of the frame."""

    stage: int
    nth: int
    code: RefusalCode = RefusalCode.NO_STATE


@dataclass(frozen=True, slots=True)
class Stall:
    """The stage computes nothing for a while; math.inf: until the next epoch."""

    stage: int
    nth: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Lose:
    """The stage dies when the frame reaches it, and the ring with it."""

    stage: int
    nth: int


LegFault: TypeAlias = Delay | Drop | Duplicate | Reorder
StageFault: TypeAlias = Restart | CorruptRow | LoseNode | KeepNothing | Refuse | Stall | Lose
Fault: TypeAlias = LegFault | StageFault
FaultScript: TypeAlias = tuple[Fault, ...]
LEG_FAULTS = (Delay, Drop, Duplicate, Reorder)
STAGE_FAULTS = (Restart, CorruptRow, LoseNode, KeepNothing, Refuse, Stall, Lose)
ALL_FAULTS: tuple[type[Fault], ...] = LEG_FAULTS + STAGE_FAULTS
F = TypeVar("F", LegFault, StageFault)


class Pending:
    """The faults of a script that have not happened yet."""

    def __init__(self, script: FaultScript) -> None:
        self._legs = [fault for fault in script if isinstance(fault, LEG_FAULTS)]
        self._stages = [fault for fault in script if isinstance(fault, STAGE_FAULTS)]

    def of_leg(self, leg: int, nth: int) -> tuple[LegFault, ...]:
        return _take(self._legs, lambda fault: (fault.leg, fault.nth) == (leg, nth))

    def of_stage(self, stage: int, nth: int, frame: Frame) -> tuple[StageFault, ...]:
        """Some faults wait for a frame that they can happen to."""
        waits_for = {
            CorruptRow: any(reopens(op) for op in frame.ops),
            LoseNode: any(isinstance(op, LoadNodes) for op in frame.ops),
            KeepNothing: bool(frame.after),
        }

        def is_due(fault: StageFault) -> bool:
            if type(fault) in waits_for:
                return fault.stage == stage and fault.nth <= nth and waits_for[type(fault)]
            return (fault.stage, fault.nth) == (stage, nth)

        return _take(self._stages, is_due)


def _take(faults: list[F], is_due: Callable[[F], bool]) -> tuple[F, ...]:
    due = tuple(fault for fault in faults if is_due(fault))
    faults[:] = [fault for fault in faults if fault not in due]
    return due


def reopens(op: Op) -> bool:
    """Whether the op opens a lane whose first rows are to be reused."""
    return isinstance(op, OpenLane) and op.cached_prefix > 0


def random_script(
    seed: int,
    stages: int,
    frames: int,
    *,
    count: int = 3,
    kinds: tuple[type[Fault], ...] = ALL_FAULTS,
    longest_s: float = 1.0,
) -> FaultScript:
    """`count` faults of the given kinds among the first `frames` messages of each leg; same seed, same script.

    Every one of them may cost time but none may change a token, so rows are corrupted in the ledger too.
    """
    dice = random.Random(seed)
    return tuple(
        _random_fault(dice, dice.choice(kinds), stages, frames, longest_s) for _ in range(count)
    )


def _random_fault(
    dice: random.Random, kind: type[Fault], stages: int, frames: int, longest_s: float
) -> Fault:
    nth, leg, stage = dice.randrange(frames), dice.randrange(stages + 1), dice.randrange(stages)
    seconds = dice.uniform(0.0, longest_s)
    if kind is Delay or kind is Reorder:
        return kind(leg, nth, seconds)
    if kind is Drop or kind is Duplicate:
        return kind(leg, nth)
    if kind is CorruptRow:
        return kind(stage, nth, row=dice.randrange(1 << 16))
    if kind is LoseNode:
        return kind(stage, nth, which=dice.randrange(1 << 16))
    if kind is KeepNothing:
        return kind(stage, nth)
    if kind is Refuse:
        return kind(stage, nth, dice.choice((RefusalCode.NO_STATE, RefusalCode.KV_GAP)))
    if kind is Stall:
        return kind(stage, nth, seconds)
    return Restart(stage, nth) if kind is Restart else Lose(stage, nth)
