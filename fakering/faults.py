"""Scripted faults: what goes wrong, on which leg or stage, and at which frame, opening or time.

Leg i leads into stage i; the leg behind the last stage leads to the coordinator. `nth` counts the messages of
that leg, the frames that reached that stage or the epochs that were to be opened, from 0, over all epochs, since the
network was made. This file only says what happens; network.py and stages.py make it happen. Each fault happens once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, TypeVar

from coordinator.frames import CopyRows, DropNodes, Frame, LoadNodes, Op, OpenLane, RefusalCode


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
    """The stage takes so much longer for the frame; math.inf: until it is replaced. One that does not rest in time
    when the next epoch opens is replaced, and what it says behind that comes all the same, if it ever does.
    """

    stage: int
    nth: int
    seconds: float
    keeps: float = 0.0  # as in Lose


class Deed(StrEnum):
    """What a frame does, beside computing."""

    ANY = "any"
    LOAD = "load"
    STORE = "store"
    COPY = "copy"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Lose:
    """The stage dies of the first frame from `nth` on that does this, before it has taken it or when it has passed it
    on, and so many seconds later the ring knows. `keeps`: the part of its nodes that its successor finds, on a disk or
    at a neighbour.
    """

    stage: int
    nth: int
    deed: Deed = Deed.ANY
    passes_on: bool = False
    noticed_s: float = 0.0
    keeps: float = 0.0


@dataclass(frozen=True, slots=True)
class LoseAt:
    """The stages die then, whatever they are at, and a probe finds it out so many seconds later."""

    at_s: float
    stages: tuple[int, ...]
    noticed_s: float = 0.0
    keeps: float = 0.0  # as in Lose


@dataclass(frozen=True, slots=True)
class FailHeal:
    """An epoch does not open: when so many stages have opened it, a stage dies, or what was to be done takes too long.
    None: no lost stage was replaced even.
    """

    nth: int
    opened: int | None = None
    dies: int | None = None


@dataclass(frozen=True, slots=True)
class Linger:
    """What is on its way when the epoch opens arrives all the same."""

    nth: int


@dataclass(frozen=True, slots=True)
class TakeAt:
    """Another coordinator drives the ring from then on, or it is ended by hand."""

    at_s: float


@dataclass(frozen=True, slots=True)
class GatewayRestart:
    """The coordinator is gone then, and a new one takes the ring over. The network knows nothing of it."""

    at_s: float


LegFault: TypeAlias = Delay | Drop | Duplicate | Reorder
StageFault: TypeAlias = Restart | CorruptRow | LoseNode | KeepNothing | Refuse | Stall | Lose
RingFault: TypeAlias = LoseAt | FailHeal | Linger
Fault: TypeAlias = LegFault | StageFault | RingFault | TakeAt | GatewayRestart
FaultScript: TypeAlias = tuple[Fault, ...]
LEG_FAULTS = (Delay, Drop, Duplicate, Reorder)
STAGE_FAULTS = (Restart, CorruptRow, LoseNode, KeepNothing, Refuse, Stall, Lose)
RING_FAULTS = (LoseAt, FailHeal, Linger)
# Those of the network that a ring heals from.
ALL_FAULTS: tuple[type[LegFault | StageFault | RingFault], ...] = (
    LEG_FAULTS + STAGE_FAULTS + RING_FAULTS
)
F = TypeVar("F", LegFault, StageFault, FailHeal | Linger)


class Pending:
    """The faults of a script that have not happened yet; those that have are in `struck`."""

    def __init__(self, script: FaultScript) -> None:
        self._legs = [fault for fault in script if isinstance(fault, LEG_FAULTS)]
        self._stages = [fault for fault in script if isinstance(fault, STAGE_FAULTS)]
        self._openings = [fault for fault in script if isinstance(fault, FailHeal | Linger)]
        timed = (fault for fault in script if isinstance(fault, LoseAt | TakeAt))
        self._timed = sorted(timed, key=lambda fault: fault.at_s)
        self.struck: list[Fault] = []

    def of_leg(self, leg: int, nth: int) -> tuple[LegFault, ...]:
        return self._take(self._legs, lambda fault: (fault.leg, fault.nth) == (leg, nth))

    def of_stage(self, stage: int, nth: int, frame: Frame) -> tuple[StageFault, ...]:
        """Some faults wait for a frame that they can happen to."""

        def is_due(fault: StageFault) -> bool:
            if fault.stage != stage:
                return False
            if _waits(fault):
                return fault.nth <= nth and _can_happen(fault, frame)
            return fault.nth == nth

        return self._take(self._stages, is_due)

    def of_opening(self, nth: int) -> tuple[FailHeal | Linger, ...]:
        return self._take(self._openings, lambda fault: fault.nth == nth)

    @property
    def next_at(self) -> float | None:
        """When a fault comes by itself."""
        return self._timed[0].at_s if self._timed else None

    def pop_timed(self) -> LoseAt | TakeAt:
        self.struck.append(self._timed[0])
        return self._timed.pop(0)

    def _take(self, faults: list[F], is_due: Callable[[F], bool]) -> tuple[F, ...]:
        due = tuple(fault for fault in faults if is_due(fault))
        if due:
            faults[:] = [fault for fault in faults if fault not in due]
            self.struck.extend(due)
        return due


def _waits(fault: StageFault) -> bool:
    if isinstance(fault, Lose):
        return fault.deed is not Deed.ANY
    return isinstance(fault, CorruptRow | LoseNode | KeepNothing)


def _can_happen(fault: StageFault, frame: Frame) -> bool:
    if isinstance(fault, CorruptRow):
        return any(reopens(op) for op in frame.ops)
    if isinstance(fault, KeepNothing):
        return bool(frame.after)
    return does(frame, fault.deed if isinstance(fault, Lose) else Deed.LOAD)


def does(frame: Frame, deed: Deed) -> bool:
    match deed:
        case Deed.LOAD:
            return any(isinstance(op, LoadNodes) for op in frame.ops)
        case Deed.COPY:
            return any(isinstance(op, CopyRows) for op in frame.ops)
        case Deed.STORE:
            return bool(frame.after)
        case Deed.DROP:
            return any(isinstance(op, DropNodes) for op in frame.ops)
    return True


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
    """`count` faults of the given kinds among the first `frames` messages of each leg, or the first `longest_s`
    seconds; same seed, same script.

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
    if kind is Refuse:
        return kind(stage, nth, dice.choice((RefusalCode.NO_STATE, RefusalCode.KV_GAP)))
    if kind is Restart or kind is KeepNothing:
        return kind(stage, nth)
    return _random_loss(dice, kind, stages, nth, seconds)


def _random_loss(
    dice: random.Random, kind: type[Fault], stages: int, nth: int, seconds: float
) -> Fault:
    stage, keeps = dice.randrange(stages), dice.choice((0.0, 0.0, 0.5, 1.0))
    noticed_s = dice.choice((0.0, 0.0, 0.05, 1.0))
    if kind is Stall:
        return Stall(stage, nth, dice.choice((seconds, math.inf)), keeps)
    if kind is LoseAt:
        lost = dice.sample(range(stages), dice.randint(1, min(2, stages)))
        return LoseAt(seconds, tuple(lost), noticed_s, keeps)
    if kind is Linger:
        return Linger(dice.randrange(4))
    if kind is FailHeal:
        opened = dice.choice((None, dice.randint(0, stages)))
        return FailHeal(dice.randrange(4), opened, dice.choice((None, stage)))
    deed = dice.choice((Deed.ANY, *Deed))
    return Lose(stage, nth, deed, dice.random() < 0.5, noticed_s, keeps)
