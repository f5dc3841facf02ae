"""OpenTelemetry spans of turns: one of kind SERVER for each, under the span that the client named in `traceparent`.

The names are genai.py's. No text of a prompt or an answer is ever in a span. OpenTelemetry is an extra, and imported
only where traces are wanted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from coordinator.errors import InvalidSetting
from gateway.observing import genai
from gateway.observing.observers import ABORT, TurnWatch, outcome
from gateway.turns import (
    ChatPrompt,
    TurnDelta,
    TurnEvent,
    TurnFinished,
    TurnRecovering,
    TurnRequest,
    TurnStarted,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger(__name__)

_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
# What the last spans get to reach a collector when the process ends.
_LAST_SPANS_S = 2.0


def endpoint_of(environment: Mapping[str, str]) -> str | None:
    """Where OpenTelemetry's own variables send traces; the SDK reads the others itself."""
    return environment.get(_TRACES_ENDPOINT) or environment.get(_ENDPOINT) or None


@asynccontextmanager
async def open_traces(endpoint: str | None, model: str) -> AsyncIterator[tuple[TurnTraces, ...]]:
    """The observer of turns, or none where no traces are wanted. Raises InvalidSetting."""
    wanted = endpoint or endpoint_of(os.environ)
    if wanted is None:
        yield ()
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        told = "traces need OpenTelemetry: pip install 'ringserve[otel]'"
        if endpoint is not None:
            raise InvalidSetting("otlp_endpoint", told) from error
        log.warning("%s is set; %s", _ENDPOINT, told)
        yield ()
        return
    named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "ringserve"}
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=wanted)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield (TurnTraces(provider.get_tracer("ringserve", version("ringserve")), model),)
    finally:
        await _end(provider, exporter)


async def _end(provider: TracerProvider, exporter: SpanExporter) -> None:
    """Sends what is left, but not for long: a collector that is away must not keep the process."""
    loop, sent = asyncio.get_running_loop(), asyncio.Event()

    def send() -> None:
        provider.shutdown()
        with suppress(RuntimeError):  # nobody waits any more
            loop.call_soon_threadsafe(sent.set)

    # The loop's own threads would be waited for at its end, and the SDK's time-outs do not hold while it retries.
    threading.Thread(target=send, name="last-spans", daemon=True).start()
    try:
        async with asyncio.timeout(_LAST_SPANS_S):
            await sent.wait()
    except TimeoutError:
        exporter.shutdown()  # or it goes on trying for a minute


class TurnTraces:
    """A TurnObserver. `model`: the name that is served."""

    def __init__(self, tracer: Tracer, model: str) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._model = model
        self._server = SpanKind.SERVER
        self._propagator = TraceContextTextMapPropagator()

    def opened(self, turn: TurnRequest, at_s: float) -> TurnWatch:
        asked = asked_of(turn, self._model)
        span = self._tracer.start_span(
            f"{asked[genai.OPERATION]} {self._model}",
            # A client's span, or none that reads as one: then this one is a root.
            context=self._propagator.extract({"traceparent": turn.traceparent}),
            kind=self._server,
            attributes=asked,
        )
        return _TracedTurn(span, at_s)


def asked_of(turn: TurnRequest, served: str) -> dict[str, Any]:
    """What a client asked for, as far as it may be told."""
    sampling = turn.sampling
    asked: dict[str, Any] = {
        genai.OPERATION: genai.CHAT
        if isinstance(turn.prompt, ChatPrompt)
        else genai.TEXT_COMPLETION,
        genai.PROVIDER: "ringserve",
        genai.REQUEST_MODEL: turn.model or served,
        genai.RESPONSE_MODEL: served,
        genai.REQUEST_TEMPERATURE: sampling.temperature,
        genai.REQUEST_TOP_P: sampling.top_p,
        genai.REQUEST_TOP_K: sampling.top_k or None,
        genai.REQUEST_PRESENCE_PENALTY: sampling.presence_penalty or None,
        genai.REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty or None,
        genai.REQUEST_MAX_TOKENS: turn.max_tokens,
        genai.RESPONSE_ID: turn.request_id or None,
    }
    return {name: value for name, value in asked.items() if value is not None}


class _TracedTurn:
    def __init__(self, span: Span, opened_s: float) -> None:
        self._span = span
        self._opened_s = opened_s
        self._finished: TurnFinished | None = None
        self._tokens = 0

    def told(self, event: TurnEvent, at_s: float) -> None:
        match event:
            case TurnDelta():
                if event.token_ids and not self._tokens:
                    self._span.add_event(genai.FIRST_TOKEN)
                    self._span.set_attribute(genai.TIME_TO_FIRST_CHUNK, at_s - self._opened_s)
                self._tokens += len(event.token_ids)
            case TurnStarted():
                self._span.set_attributes(_started(event))
            case TurnRecovering():
                self._span.add_event(genai.RECOVERING)
            case TurnFinished():
                self._finished = event

    def ended(self, error: BaseException | None, at_s: float) -> None:
        from opentelemetry.trace import StatusCode

        end = outcome(self._finished, error)
        self._span.set_attribute(genai.OUTPUT_TOKENS, self._tokens)
        if self._finished is not None:
            self._span.set_attributes(_finished(self._finished))
        elif end != ABORT:
            self._span.set_attribute(genai.ERROR_TYPE, end)
            self._span.set_status(StatusCode.ERROR, end)
        if self._finished is not None or end == ABORT:
            self._span.set_attribute(genai.FINISH_REASONS, (end,))
        self._span.end()


def _started(event: TurnStarted) -> dict[str, Any]:
    told: dict[str, Any] = {
        genai.INPUT_TOKENS: event.prompt_tokens,
        genai.CACHED_TOKENS: event.cached_prefix,
        genai.RING: event.ring,
        genai.LANE: event.lane,
    }
    # 64 bits without a sign do not fit into an attribute.
    seed = {genai.REQUEST_SEED: event.seed} if event.seed < 1 << 63 else {}
    miss = {} if event.miss is None else {genai.MISS: event.miss.kind.value}
    return {**told, **seed, **miss}


def _finished(event: TurnFinished) -> dict[str, Any]:
    took = event.timings
    thought = {genai.REASONING_TOKENS: event.thought_tokens} if event.thought_tokens else {}
    return {
        **thought,
        genai.QUEUE_S: took.queue_s,
        genai.PREFILL_S: took.prefill_s,
        genai.DECODE_S: took.decode_s,
        genai.DRAFTED: took.drafted,
        genai.ACCEPTED: took.accepted,
    }
