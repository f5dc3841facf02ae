"""The routes of the status page. The page and its parts are the same for everyone; figures are at the events only.

It decides what a browser may do with the page: load these parts, ask this server, and nothing else.
"""

from __future__ import annotations

from functools import partial
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.http.front import Front
from gateway.http.openai.errors import OPENAI
from gateway.http.status.feed import Feed, FeedResponse

# The icon is written into the page.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
# Path, file, media type.
_PARTS = (
    ("/", "index.html", "text/html"),
    ("/status/status.css", "status.css", "text/css"),
    ("/status/status.js", "status.js", "text/javascript"),
    ("/status/view.js", "view.js", "text/javascript"),
)


class StatusPage:
    def __init__(self, front: Front, feed: Feed) -> None:
        self._front = front
        self._feed = feed

    def routes(self) -> list[Route]:
        route, folder = self._front.route, files("gateway.http.status")
        parts = [
            route(
                "GET",
                path,
                partial(_part, (folder / name).read_bytes(), kind),
                OPENAI,
                is_open=True,
            )
            for path, name, kind in _PARTS
        ]
        return [
            *parts,
            route("GET", "/status/events", self.events, OPENAI),
            route("GET", "/status.json", self.once, OPENAI),
        ]

    async def events(self, request: Request) -> Response:
        self._feed.check_room()
        # A HEAD would look on for ever and see nothing.
        return Response() if request.method == "HEAD" else FeedResponse(self._feed)

    async def once(self, request: Request) -> Response:
        headers = {"cache-control": "no-store"}
        return Response(self._feed.current(), media_type="application/json", headers=headers)


async def _part(content: bytes, kind: str, _: Request) -> Response:
    return Response(content, media_type=kind, headers=_HEADERS)
