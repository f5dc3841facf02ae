"""A chat's or completion's server-sent events. An error comes in band and without [DONE]: nobody takes it for whole."""

from __future__ import annotations

from typing import Any

from gateway.http.openai.chat_answer import Answering
from gateway.http.openai.errors import OPENAI
from gateway.http.streaming import StreamWire, Told, data
from gateway.turns import TurnDelta, TurnFinished, TurnRecovering, TurnStarted

_DONE = b"data: [DONE]\n\n"


class ChatStream(StreamWire):
    def __init__(self, answering: Answering, *, include_usage: bool) -> None:
        self._answering = answering
        self._include_usage = include_usage
        self._done: dict[int, TurnFinished] = {}

    def said(self, told: Told) -> bytes:
        return b"".join(data(chunk) for chunk in self._chunks(told))

    def _chunks(self, told: Told) -> list[dict[str, Any]]:
        match told.event:
            case TurnStarted():
                return self._answering.opening(told.index)
            case TurnDelta():
                return self._answering.pieces(told.index, told.event)
            case TurnRecovering():
                return []
            case TurnFinished():
                self._done[told.index] = told.event
                return [self._answering.ending(told.index, told.event)]

    def failed(self, error: Exception, request_id: str) -> bytes:
        return data(OPENAI.body(error, request_id))

    def ended(self) -> bytes:
        if not self._include_usage:
            return _DONE
        done = [self._done[index] for index in sorted(self._done)]
        return data(self._answering.usage_chunk(done)) + _DONE
