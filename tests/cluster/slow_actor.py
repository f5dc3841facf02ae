"""A stage's actor whose tail takes its time: a little for every frame, and as long as a frame asks for.

A frame asks with the tokens NAP, n: n tenths of a second.
"""

from __future__ import annotations

import time

from coordinator.held import Holding
from stage.actor import StageActor
from stage.messages import FrameMessage, Garbled, ReplyMessage
from stage.stage import Stage, Waited
from stage.transport import Endpoint

NAP = 198
FRAME_S = 0.03


class SlowStageActor(StageActor):
    def connect(
        self, turn: int, previous: bytes | None, following: Endpoint, state_rows: int
    ) -> Holding:
        held = super().connect(turn, previous, following, state_rows)
        stage = self._ready()
        stage.process = _Slow(stage)  # type: ignore[method-assign]
        return held


class _Slow:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __call__(
        self, message: FrameMessage | Garbled, waited: Waited
    ) -> FrameMessage | ReplyMessage | None:
        if isinstance(message, FrameMessage) and self._stage.model.decoder.is_tail:
            time.sleep(FRAME_S + sum(_naps(segment.tokens) for segment in message.frame.segments))
        return Stage.process(self._stage, message, waited)


def _naps(tokens: tuple[int, ...]) -> float:
    pairs = zip(tokens, tokens[1:], strict=False)
    return sum(length / 10 for token, length in pairs if token == NAP)
