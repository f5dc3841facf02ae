"""A stage's actor that fails on demand: certain tokens make it raise in computing, or never end."""

from __future__ import annotations

import threading

from coordinator.held import Holding
from stage.actor import StageActor
from stage.messages import FrameMessage, Garbled, ReplyMessage
from stage.stage import Stage, Waited
from stage.transport import Endpoint

BREAKS = 198
NEVER_ENDS = 197


class StageActorWithFaults(StageActor):
    def connect(
        self, turn: int, previous: bytes | None, following: Endpoint, state_rows: int
    ) -> Holding:
        held = super().connect(turn, previous, following, state_rows)
        stage = self._ready()
        stage.process = _Faulty(stage)  # type: ignore[method-assign]
        return held


class _Faulty:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __call__(
        self, message: FrameMessage | Garbled, waited: Waited
    ) -> FrameMessage | ReplyMessage | None:
        if isinstance(message, FrameMessage) and self._stage.model.decoder.is_tail:
            tokens = [token for segment in message.frame.segments for token in segment.tokens]
            if BREAKS in tokens:
                raise ValueError("no such row")
            if NEVER_ENDS in tokens:
                threading.Event().wait()
        return Stage.process(self._stage, message, waited)
