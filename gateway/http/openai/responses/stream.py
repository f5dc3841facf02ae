"""A response's server-sent events, each with its name and its number. One that fails ends with response.failed.

Silence is told by an event as well: Codex counts its patience from event to event, and comments are none.
"""

from __future__ import annotations

from typing import Any

from gateway.http.openai.responses.answer import Answering, status_of
from gateway.http.openai.responses.items import Event, Output
from gateway.http.streaming import StreamWire, Told, data
from gateway.turns import TurnDelta, TurnFinished, TurnRecovering, TurnStarted


class ResponseStream(StreamWire):
    def __init__(self, answering: Answering, output: Output) -> None:
        self._answering = answering
        self._output = output
        self._sent = 0
        self._finished: TurnFinished | None = None

    def said(self, told: Told) -> bytes:
        match told.event:
            case TurnStarted():
                return self._opening()
            case TurnDelta(parts=parts):
                return self._all([event for part in parts for event in self._output.take(part)])
            case TurnRecovering():
                return b""
            case TurnFinished() as done:
                self._finished = done
                return self._all(self._output.end(status_of(done)))

    def silent(self) -> bytes:
        return self._opening() or self._lifecycle("in_progress", self._running())

    def failed(self, error: Exception, request_id: str) -> bytes:
        output = self._output.snapshot("incomplete")
        response = self._answering.failed(output, error)
        return self._opening() + self._lifecycle("failed", response)

    def ended(self) -> bytes:
        assert self._finished is not None
        response = self._answering.finished(self._output.items, self._finished)
        return self._lifecycle(response["status"], response)

    def _opening(self) -> bytes:
        """Once, before all others."""
        if self._sent:
            return b""
        response = self._running()
        return self._lifecycle("created", response) + self._lifecycle("in_progress", response)

    def _running(self) -> dict[str, Any]:
        return self._answering.running([])

    def _lifecycle(self, kind: str, response: dict[str, Any]) -> bytes:
        return self._all([{"type": f"response.{kind}", "response": response}])

    def _all(self, events: list[Event]) -> bytes:
        return b"".join(self._numbered(event) for event in events)

    def _numbered(self, event: Event) -> bytes:
        number, self._sent = self._sent, self._sent + 1
        return data({**event, "sequence_number": number}, event["type"])
