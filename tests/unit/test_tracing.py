"""Spans of turns, as an exporter gets them: names, parents, ends, and nothing that was said."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from coordinator.errors import InvalidSetting, ModelNotFound
from coordinator.requests import SamplingSpec
from gateway.observing import genai
from gateway.observing.tracing import TurnTraces, endpoint_of, open_traces
from gateway.turns import ChatPrompt, TextPrompt, TurnDelta, TurnRequest
from tests.unit.watched_service import turn, watched

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import ReadableSpan

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SECRET = "the launch code is 0000"


class Spans:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.observer = TurnTraces(self._provider.get_tracer("test"), "fake")

    def all(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def close(self) -> None:
        self._provider.shutdown()


@pytest.fixture
def spans() -> Iterator[Spans]:
    made = Spans()
    yield made
    made.close()


async def test_a_turn_is_a_server_span_under_its_clients(spans: Spans) -> None:
    async with watched(also=(spans.observer,)) as it:
        asked = replace(turn(SECRET, 5, "s"), request_id="r-1", traceparent=PARENT)
        await it.run(asked)
    (span,) = spans.all()
    assert (span.name, span.kind) == ("text_completion fake", SpanKind.SERVER)
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" == PARENT[3:-3]
    told = dict(span.attributes or {})
    assert told[genai.OPERATION] == "text_completion"
    assert told[genai.PROVIDER] == "ringserve"
    assert (told[genai.REQUEST_MODEL], told[genai.RESPONSE_MODEL]) == ("fake", "fake")
    assert (told[genai.REQUEST_MAX_TOKENS], told[genai.REQUEST_TEMPERATURE]) == (5, 0.0)
    assert told[genai.INPUT_TOKENS] == len(SECRET)
    assert (told[genai.CACHED_TOKENS], told[genai.OUTPUT_TOKENS]) == (0, 5)
    assert (told[genai.FINISH_REASONS], told[genai.RESPONSE_ID]) == (("length",), "r-1")
    assert (told[genai.RING], told[genai.MISS]) == ("ring-0", "new_session")
    assert [event.name for event in span.events] == [genai.FIRST_TOKEN]
    assert 0 < told[genai.TIME_TO_FIRST_CHUNK] < 60
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    "parent", ["", "junk", "00-zz-00f067aa0ba902b7-01", PARENT[:-3], "00-" * 9]
)
async def test_a_parent_that_is_none_makes_a_root(spans: Spans, parent: str) -> None:
    async with watched(also=(spans.observer,)) as it:
        await it.run(replace(turn("x", 1), traceparent=parent))
    assert [span.parent for span in spans.all()] == [None]


async def test_an_error_is_told_by_its_code_and_a_client_that_left_is_none(spans: Spans) -> None:
    async with watched(also=(spans.observer,)) as it:
        with pytest.raises(ModelNotFound):
            await it.run(TurnRequest(ChatPrompt(()), model="other"))
        async with aclosing(it.service.generate(turn("x", 400))) as events:
            async for event in events:
                if isinstance(event, TurnDelta):
                    break
    failed, left = spans.all()
    assert failed.name == "chat fake"
    assert failed.status.status_code is StatusCode.ERROR
    assert dict(failed.attributes or {})[genai.ERROR_TYPE] == "model_not_found"
    assert left.status.status_code is StatusCode.UNSET
    assert dict(left.attributes or {})[genai.FINISH_REASONS] == ("abort",)


async def test_no_word_of_prompt_or_answer_is_in_a_span(spans: Spans) -> None:
    async with watched(also=(spans.observer,)) as it:
        asked = TurnRequest(TextPrompt(SECRET), sampling=SamplingSpec(seed=2**64 - 1), max_tokens=9)
        events = await it.run(asked)
    said = "".join(event.text for event in events if isinstance(event, TurnDelta))
    (span,) = spans.all()
    shown = span.to_json()
    assert SECRET not in shown
    assert said not in shown
    assert "launch" not in shown


def test_the_names_are_those_of_the_conventions() -> None:
    attributes = pytest.importorskip(
        "opentelemetry.semconv._incubating.attributes.gen_ai_attributes"
    )
    known = {value for name, value in vars(attributes).items() if name.startswith("GEN_AI_")}
    ours = {value for name, value in vars(genai).items() if name.isupper()}
    named = {name for name in ours if name.startswith("gen_ai.")}
    assert named - known == set()
    assert len(named) > 15


def test_opentelemetrys_own_variables_say_where_traces_go() -> None:
    both = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"}
    assert endpoint_of({}) is None
    assert endpoint_of({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) is None
    assert endpoint_of(both) == "http://a:1"
    assert endpoint_of({**both, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b:2"}) == "http://b:2"


async def test_nobody_pays_for_traces_that_nobody_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    async with open_traces(None, "fake") as observers:
        assert observers == ()


async def test_traces_without_the_extra_are_refused_or_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidSetting, match=r"ringserve\[otel\]"):
        async with open_traces("http://127.0.0.1:4317", "fake"):
            pass
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    async with open_traces(None, "fake") as observers:
        assert observers == ()
    assert "ringserve[otel]" in caplog.text


class Collector(TraceServiceServicer):
    def __init__(self) -> None:
        self.got: list[ExportTraceServiceRequest] = []

    def Export(self, request: ExportTraceServiceRequest, context: object) -> Any:
        self.got.append(request)
        return ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[str, Collector]]:
    made, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(made, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", made
    server.stop(None).wait()


async def test_a_collector_has_the_last_spans_when_the_process_ends(
    collector: tuple[str, Collector], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, made = collector
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    async with open_traces(address, "fake") as observers, watched(also=observers) as it:
        await it.run(turn("x", 2))
    (sent,) = (spans for request in made.got for spans in request.resource_spans)
    named = {each.key: each.value.string_value for each in sent.resource.attributes}
    assert named["service.name"] == "ringserve"
    (span,) = (span for scope in sent.scope_spans for span in scope.spans)
    assert span.name == "text_completion fake"


async def test_a_collector_that_is_away_keeps_nobody_from_leaving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.observing.tracing._LAST_SPANS_S", 0.05)
    began = time.monotonic()
    async with open_traces("http://127.0.0.1:1", "fake") as observers:
        async with watched(also=observers) as it:
            await it.run(turn("x", 2))
    assert time.monotonic() - began < 2.0
    for thread in threading.enumerate():
        if thread.name == "last-spans":
            thread.join(timeout=5.0)
            assert not thread.is_alive(), "nothing tries on behind the end"
