"""The published OpenAPI document against a live server: what it says of routes, statuses and shapes is so."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.http import server
from gateway.http.document import openapi_document

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.applications import Starlette

Making = Any
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
DOCUMENT = openapi_document()
OPERATIONS = [(m.upper(), path) for path, each in DOCUMENT["paths"].items() for m in each]
# What browsers and scrapers read is no JSON interface.
UNWRITTEN = ("/status/", "/openapi.json")


@pytest.fixture
def base(http: Making) -> Iterator[str]:
    """A server in a thread of its own: the tests are clients that block."""
    started, stop, address = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        async with http() as (client, _):
            address.append(f"http://{client.host}:{client.port}")
            started.set()
            await stop.wait()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(10)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        (method, path, mode)
        for method, path in OPERATIONS
        for mode in schemathesis.GenerationMode
        if method == "POST" or mode is schemathesis.GenerationMode.POSITIVE
    ],
)
def test_whatever_is_asked_is_answered_as_the_document_says(
    base: str, method: str, path: str, mode: schemathesis.GenerationMode
) -> None:
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    schema.config.update(base_url=base)

    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    def answered(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS, timeout=60)

    answered()


async def test_every_route_is_in_the_document(
    http: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make = server.make_app

    def kept(*args: Any) -> Starlette:
        made.append(make(*args))
        return made[0]

    monkeypatch.setattr(server, "make_app", kept)
    async with http() as (client, _):
        _, _, told = await client.ask("GET", "/openapi.json")
    assert json.loads(told) == DOCUMENT
    (app,) = made
    paths = {route.path.replace(":path}", "}") for route in app.routes} - {"/"}
    written = {path for path in paths if not path.startswith(UNWRITTEN)}
    assert written == DOCUMENT["paths"].keys()
