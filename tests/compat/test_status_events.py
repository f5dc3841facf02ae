"""The status page's routes over a socket: who may load it, what it may load, and viewers that come, lag and go."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from gateway.http.server import serve_http
from gateway.safety.guard import Caller, Guard
from gateway.settings import HttpSettings
from tests.compat.http_client import Http

if TYPE_CHECKING:
    from collections.abc import Callable

Making = Any
PARTS = {
    "/": "text/html",
    "/status/status.css": "text/css",
    "/status/status.js": "text/javascript",
    "/status/view.js": "text/javascript",
}


async def test_the_page_is_served_to_everyone_and_may_load_only_its_own_parts(http: Making) -> None:
    async with http() as (client, _):
        for path, kind in PARTS.items():
            # As curl and health checks ask, which accept anything, or do not say.
            for method, more in (
                ("GET", {}),
                ("GET", {"accept": "application/json"}),
                ("HEAD", {}),
            ):
                status, headers, body = await client.ask(method, path, **more)
                assert status == 200
                assert headers["content-type"].startswith(kind)
                assert int(headers["content-length"]) > 500
                assert bool(body) is (method == "GET")
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy


async def test_nothing_on_the_page_is_inline_or_from_elsewhere(http: Making) -> None:
    async with http() as (client, _):
        for path in PARTS:
            text = (await client.ask("GET", path))[2].decode()
            said = text.replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in said.replace("`http://", ""), path
            assert "https://" not in said
        html = (await client.ask("GET", "/"))[2].decode()
        assert "style=" not in html
        assert "<style" not in html
        assert "onclick" not in html
        assert html.count("<script") == 1


async def _look(client: Http) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await client.opened("GET", "/status/events")
    status, headers = await client.head(reader)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    return reader, writer


async def _snapshot(reader: asyncio.StreamReader) -> Any:
    async for line in reader:
        if line.startswith(b"data: "):
            return json.loads(line[6:])
    return None


async def test_snapshots_follow_one_another_and_scripts_get_the_same(http: Making) -> None:
    async with http(host_rows=256) as (client, _):
        reader, writer = await _look(client)
        first, second = await _snapshot(reader), await _snapshot(reader)
        assert first["at"] < second["at"]
        assert [ring["name"] for ring in second["rings"]] == ["ring-0"]
        status, headers, raw = await client.ask("GET", "/status.json")
        assert (status, headers["content-type"]) == (200, "application/json")
        once = json.loads(raw)
        assert once.keys() == second.keys()
        assert once["rings"][0]["lane_count"] == len(once["rings"][0]["lanes"]) == 4
        writer.close()
        assert (await client.ask("HEAD", "/status/events"))[0] == 200


async def test_one_viewer_too_many_is_told_to_come_again_and_a_place_becomes_free(
    http: Making,
) -> None:
    async with http() as (client, _):
        viewers = [await _look(client) for _ in range(32)]
        status, headers, raw = await client.ask("GET", "/status/events")
        assert (status, json.loads(raw)["error"]["code"]) == (503, "too_many_viewers")
        assert int(headers["retry-after"]) > 0
        _, leaves = viewers.pop()
        leaves.transport.abort()
        reader, writer = await _until_let_in(client)
        assert await _snapshot(reader)
        for _, each in (*viewers, (reader, writer)):
            each.close()


async def _until_let_in(client: Http) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    for _ in range(200):
        reader, writer = await client.opened("GET", "/status/events")
        if (await client.head(reader))[0] == 200:
            return reader, writer
        writer.close()
    raise AssertionError("no place became free")


async def test_viewers_do_not_keep_a_server_from_ending(
    site: Callable[..., Any],
) -> None:
    async with site() as fake:
        async with asyncio.timeout(10):
            async with serve_http(fake.service, HttpSettings(drain_s=60.0)) as address:
                reader, writer = await _look(Http(address))
                assert await _snapshot(reader)
            while await _snapshot(reader):
                pass
        assert reader.at_eof()
        writer.close()


class OneKey:
    def find(self, key: str) -> Caller | None:
        return Caller("ops") if key == "right" else None


async def test_figures_need_a_key_where_the_server_has_keys_and_the_page_does_not(
    site: Callable[..., Any],
) -> None:
    async with (
        site() as fake,
        serve_http(fake.service, HttpSettings(drain_s=1.0), guard=Guard(OneKey())) as address,
    ):
        client = Http(address)
        for path in PARTS:
            assert (await client.ask("GET", path))[0] == 200
        for path in ("/status.json", "/status/events"):
            assert (await client.ask("GET", path))[0] == 401
            assert (await client.ask("GET", path, authorization="Bearer wrong"))[0] == 401
            assert (await client.ask("HEAD", path, authorization="Bearer right"))[0] == 200
