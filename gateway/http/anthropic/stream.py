"""A message's server-sent events, each with its name. An error comes in band and without message_stop."""

from __future__ import annotations

from gateway.http.anthropic.answer import Answering, Event
from gateway.http.anthropic.errors import ANTHROPIC
from gateway.http.streaming import StreamWire, Told, data
from gateway.turns import TurnDelta, TurnFinished, TurnRecovering, TurnStarted

_PING: Event = {"type": "ping"}


class MessageStream(StreamWire):
    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def said(self, told: Told) -> bytes:
        return b"".join(map(_sent, self._events(told)))

    def _events(self, told: Told) -> list[Event]:
        match told.event:
            case TurnStarted():
                return [self._answering.opening(told.event), _PING]
            case TurnDelta():
                return self._answering.blocks(told.event.parts)
            case TurnRecovering():
                return []
            case TurnFinished():
                return self._answering.ending(told.event)

    def silent(self) -> bytes:
        return _sent(_PING)

    def failed(self, error: Exception, request_id: str) -> bytes:
        return _sent(ANTHROPIC.body(error, request_id))

    def ended(self) -> bytes:
        return _sent({"type": "message_stop"})


def _sent(event: Event) -> bytes:
    return data(event, event["type"])
