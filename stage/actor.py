"""The Ray actor around one stage.

Decides nothing of its own: it loads a stage, owns its sockets and runs its loop in the thread that Ray gives to `run`.
Other methods come in other threads. Ray carries these calls only, never a frame.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import ray

from coordinator.errors import RingLost, SetupError
from coordinator.frames import Epoch
from coordinator.ring import StageProgress
from stage.build import StageReport, build_stage
from stage.config import RingConfig
from stage.loop import run_stage
from stage.stage import Stage
from stage.transport import Endpoint, Link, Listener

# load, run, open_epoch or stop, and a progress call beside them.
CONCURRENT_CALLS = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor runs."""

    node: str
    host: str  # the address that other hosts reach it by
    pid: int


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A SetupError as a value: an exception would arrive wrapped in one of Ray's."""

    error: type[SetupError]
    message: str


@dataclass(frozen=True, slots=True)
class LoopEnd:
    """How a stage's loop ended; without a reason it was told to stop."""

    stage: int | None = None
    reason: str | None = None


class StageActor:
    """Life: bind and load, connect, then run until stop. `run` must be called for frames to be taken."""

    def __init__(self, config: RingConfig, index: int) -> None:
        self._config = config
        self._index = index
        self._progress = StageProgress(index, 0, 0, "starting")
        self._link = Link()
        self._listener: Listener | None = None
        self._next: Endpoint | None = None
        self._stage: Stage | None = None

    def place(self) -> Place:
        node = ray.get_runtime_context().get_node_id()
        return Place(node, ray.util.get_node_ip_address(), os.getpid())

    def bind(self, where: Path | str) -> Endpoint:
        """Where frames are to be sent."""
        self._listener = self._link.listen(where)
        return self._listener.endpoint

    def load(self, stages_here: int) -> StageReport | LoadFailure:
        """`stages_here`: the ring's stages on this node, this one included."""
        # Ray shows a process its own GPU only.
        device = "cuda:0" if self._config.device == "cuda" else "cpu"
        try:
            self._stage, report = build_stage(
                self._config, self._index, device, self._note, stages_here
            )
        except SetupError as error:
            return LoadFailure(type(error), str(error))
        return report

    def progress(self) -> StageProgress:
        return self._progress

    def connect(self, previous: bytes | None, following: Endpoint, state_rows: int) -> None:
        """Who sends frames here, by its public key, where they go on to, and what holds for the whole ring."""
        assert self._stage is not None
        self._stage.join(state_rows)
        self._link.admit(previous)
        self._next = following

    def run(self) -> LoopEnd:
        """Serves until `stop`. The caller keeps the reference: it also tells of this process's death."""
        assert self._stage is not None
        assert self._listener is not None
        assert self._next is not None
        sender = self._link.connect(self._next)
        try:
            run_stage(self._stage, self._listener, sender)
        except RingLost as error:
            return LoopEnd(error.stage, error.reason)
        finally:
            self._stage.close()
            # ZeroMQ's sockets belong to the thread that uses them.
            sender.close()
            self._listener.close()
        return LoopEnd()

    def open_epoch(self, epoch: Epoch) -> None:
        assert self._stage is not None
        self._stage.open_epoch(epoch)

    def stop(self) -> None:
        self._link.close()

    def _note(self, progress: StageProgress) -> None:
        self._progress = progress
