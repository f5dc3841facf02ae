"""The ring port: what the coordinator needs of a chain of stages, and nothing more.

Three rings stand behind it (fakering, stage/local_ring, stage/ray_ring) and pass one contract
suite. A ring moves frames and reports losses; it decides nothing: it neither retries, nor reorders,
nor reads a ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from coordinator.frames import Epoch, Frame, Reply
from coordinator.held import NOTHING, Holding


@dataclass(frozen=True, slots=True)
class RingInfo:
    """What a ring can do, known once it has started."""

    protocol_version: int
    model: str
    model_fingerprint: str  # of config and weights: rows of another fingerprint are never reused
    stages: int
    lanes: int
    max_rows: int
    vocab_size: int
    numerics: str  # the probe's verdict in words
    exact: bool  # rows are bit-identical however a prompt is cut
    devices: tuple[str, ...]  # one a stage
    host_rows: int = 0  # rows that every stage's host store has room for; 0: no store
    held: Holding = NOTHING  # what every stage has from before
    epoch: Epoch = Epoch(0)  # whose frames are taken first
    state_rows: int = (
        0  # rows that recurrent layers can go back without a checkpoint; 0: it has none
    )
    memos: int = 0  # prompts whose last row's logits the tail has room for
    checkpoints: int = 0  # recurrent states that every stage's host store has room for
    lends_cores: bool = (
        False  # a frame that is alone in the ring is computed by more cores than a stage's own
    )


@dataclass(frozen=True, slots=True)
class StageProgress:
    """Bytes of weights that a stage has loaded; `note` says in a word or two what it does now, and `steps` goes up as
    long as it gets on with that: slow is not hung.
    """

    stage: int
    bytes_done: int
    bytes_total: int
    note: str = ""
    steps: int = 0


@dataclass(frozen=True, slots=True)
class RingHealth:
    ready: bool
    reason: str = ""  # why not
    spares: int = 0  # loaded processes that wait to take a lost stage's place
    replaced: int = 0  # stages, since the ring started


ProgressSink = Callable[[StageProgress], None]


class Ring(Protocol):
    """Life: start, then frames of RingInfo.epoch; open_epoch replaces what is lost and begins a new one; stop ends
    everything.

    Frames are answered in the order of their seq, one reply each; a frame that the stages had
    already applied is not answered. `submit` and `next_reply` raise RingLost once a stage is lost,
    until an epoch is opened or the ring is stopped. Cancelling `next_reply` loses no reply. Once the
    ring is somebody else's, all of them, and `open_epoch`, raise RingTaken, a RingLost for good.
    """

    async def start(self, progress: ProgressSink) -> RingInfo:
        """Loads every stage. Raises SetupError and leaves nothing behind."""
        ...

    def capacity(self) -> RingInfo: ...

    async def open_epoch(self, epoch: Epoch) -> Holding:
        """Replaces lost stages, and only those; frames and replies of earlier epochs are dropped. Returns what every
        stage still holds, and from then on no stage holds more. Raises RingLost where a stage cannot be replaced;
        whether raised, cancelled or neither, it may be called again with a later epoch.
        """
        ...

    def submit(self, frame: Frame) -> None:
        """Sends a frame and returns at once."""
        ...

    async def next_reply(self) -> Reply: ...

    def health(self) -> RingHealth: ...

    async def stop(self) -> None:
        """Ends what the ring started, and only that. Safe to call twice."""
        ...
