"""What is watched of requests over real sockets: metrics as Prometheus scrapes them, and what ties a turn to its
request on every front.
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics

from gateway.http.server import serve_http
from gateway.observing.sights import Sights
from gateway.pb import generation_pb2 as pb
from gateway.pb.generation_pb2_grpc import GenerationServiceStub
from gateway.rpc.server import serve_grpc
from gateway.settings import GrpcSettings, HttpSettings
from tests.compat.http_client import Http
from tests.unit.watched_service import PREFIX, Figures, watched

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateway.observing.observers import TurnWatch
    from gateway.turns import TurnEvent, TurnRequest
    from tests.unit.watched_service import Watched

HELLO = [{"role": "user", "content": "Hello"}]
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
# As Prometheus 3 asks.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,*/*;q=0.2"
)


class Seen:
    """A TurnObserver that keeps what was asked for."""

    def __init__(self) -> None:
        self.turns: list[TurnRequest] = []

    def opened(self, turn: TurnRequest, at_s: float) -> TurnWatch:
        self.turns.append(turn)
        return self

    def told(self, event: TurnEvent, at_s: float) -> None: ...

    def ended(self, error: BaseException | None, at_s: float) -> None: ...


@asynccontextmanager
async def served(*also: Any) -> AsyncIterator[tuple[Watched, Http]]:
    async with watched(also=also, host_rows=500) as it:
        sights = Sights(metrics=it.metrics)
        async with serve_http(it.service, HttpSettings(drain_s=0.0), sights) as address:
            yield it, Http(address)


async def test_prometheus_reads_what_it_scrapes() -> None:
    async with served() as (_, http):
        body = {"model": "fake", "messages": HELLO, "max_tokens": 7, "temperature": 0, "n": 2}
        status, _, answer = await http.post("/v1/chat/completions", body)
        assert status == 200
        status, headers, raw = await http.ask("GET", "/metrics")
        assert (status, headers["content-type"].split(";")[0]) == (200, "text/plain")
        seen = Figures(raw.decode())
        _, modern, open_raw = await http.ask("GET", "/metrics", accept=PROMETHEUS)
    assert modern["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {each.name for each in openmetrics.text_string_to_metric_families(open_raw.decode())}
    usage = answer["usage"]
    assert seen["generation_tokens_total"] == usage["completion_tokens"] == 14
    assert seen["request_success_total", "length"] == 2, "a turn for each choice"
    assert seen["prompt_tokens_total"] == 2 * usage["prompt_tokens"]
    assert {name for name in families if not name.startswith(PREFIX)} == {
        each for each in families if each.startswith("process_")
    }
    plain = {each.name for each in parser.text_string_to_metric_families(raw.decode())}
    assert {name for name in plain if not name.endswith("_created")} <= families


async def test_the_cached_tokens_that_clients_are_told_are_those_that_are_counted() -> None:
    async with served() as (it, http):
        cached = 0
        for _ in range(3):
            body = {"model": "fake", "messages": HELLO, "max_tokens": 4, "temperature": 0}
            _, _, answer = await http.post("/v1/chat/completions", body, x_session_id="s")
            cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        seen = it.figures()
    assert cached > 0
    assert seen["prompt_tokens_cached_total"] == cached


async def test_a_scrape_while_rings_load_says_so() -> None:
    async with served() as (it, http):
        it.rings.announce(1)
        _, _, raw = await http.ask("GET", "/metrics")
        seen = Figures(raw.decode())
        assert seen["ring_state", "ring-1", "loading"] == 1
        assert seen["ring_state", "ring-0", "ready"] == 1
        with pytest.raises(AssertionError, match="0 series"):
            seen["lane_state", "ring-1", "empty"]


async def test_without_metrics_there_is_no_page_of_them() -> None:
    async with (
        watched() as it,
        serve_http(it.service, HttpSettings(drain_s=0.0), Sights()) as address,
    ):
        status, _, _ = await Http(address).ask("GET", "/metrics")
    assert status == 404


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 3}),
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 3}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 3}),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 16}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_turn_carries_its_requests_id_and_its_clients_span(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    seen = Seen()
    async with served(seen) as (_, http):
        given = {"x_request_id": "mine-1", "traceparent": PARENT}
        full = {"model": "fake", "stream": stream, **body}
        status, headers, raw = await http.ask("POST", path, full, **given)
        assert status == 200, raw
        _, unnamed, _ = await http.ask("POST", path, full)
    first, second = seen.turns
    assert (first.request_id, first.traceparent) == ("mine-1", PARENT)
    assert headers["x-request-id"] == "mine-1"
    assert (second.request_id, second.traceparent) == (unnamed["x-request-id"], "")


async def test_a_grpc_call_carries_the_same() -> None:
    seen = Seen()
    async with (
        watched(also=(seen,)) as it,
        serve_grpc(it.service, GrpcSettings(drain_s=0.0)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        generate = GenerationServiceStub(channel).Generate  # type: ignore[no-untyped-call]
        message = pb.GenerateRequest(text="Hello", max_tokens=2, request_id="mine-2")
        _ = [event async for event in generate(message, metadata=(("traceparent", PARENT),))]
        by_metadata = pb.GenerateRequest(text="Hello", max_tokens=2)
        _ = [event async for event in generate(by_metadata, metadata=(("x-request-id", "mine-3"),))]
        unnamed = generate(pb.GenerateRequest(text="Hello", max_tokens=2))
        _ = [event async for event in unnamed]
        given = dict(await unnamed.initial_metadata())["x-request-id"]
    assert [turn.request_id for turn in seen.turns] == ["mine-2", "mine-3", given]
    assert [turn.traceparent for turn in seen.turns] == [PARENT, "", ""]


async def test_nothing_that_a_client_says_becomes_a_series() -> None:
    async with served() as (_, http):
        for number in range(20):
            mark = f"person-{number}"
            body = {"model": "fake", "messages": HELLO, "max_tokens": 2, "user": mark}
            await http.post(
                "/v1/chat/completions", body, x_session_id=mark, x_request_id=f"id-{mark}"
            )
            await http.post("/v1/chat/completions", {**body, "model": mark})
        _, _, raw = await http.ask("GET", "/metrics")
    assert b"person-" not in raw
    assert len(json.dumps(raw.decode())) < 100_000
