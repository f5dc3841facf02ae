"""What all HTTP routes share: reading a body, saying who asks, and making answers of errors. It knows no route."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.errors import InvalidApiKey, RequestTooLarge
from gateway.errors import is_internal
from gateway.http.asker import Asker
from gateway.http.errors import CLIENT_CLOSED, Dialect, error_response, request_id_headers
from gateway.http.fields import Fields, parse
from gateway.http.streaming import ClientGone
from gateway.safety.guard import OPEN, Guard
from gateway.service import GenerationService

log = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Front:
    """One service behind HTTP. `most_bytes`: of a request's body."""

    def __init__(
        self,
        service: GenerationService,
        most_bytes: int,
        guard: Guard = OPEN,
    ) -> None:
        self.service = service
        self.created = int(time.time())
        self._most_bytes = most_bytes
        self._guard = guard

    def route(
        self, method: str, path: str, handler: Handler, dialect: Dialect, *, is_open: bool = False
    ) -> Route:
        """Errors that the handler raises become answers of the dialect. `is_open`: no key is asked for."""
        checked = handler if is_open else self._checked(handler)
        return Route(path, self._guarded(checked, dialect), methods=[method])

    def asker(self, request: Request) -> Asker:
        """Who was let in. Of a route that is not open."""
        asker: Asker = request.state.asker
        return asker

    def knows(self, request: Request) -> bool:
        """Whether an open route may tell what the others would."""
        try:
            self._guard.caller(request.headers.items())
        except InvalidApiKey:
            return False
        return True

    def _checked(self, handler: Handler) -> Handler:
        """Before anything of the body is read."""

        async def checked(request: Request) -> Response:
            caller = self._guard.caller(request.headers.items())
            session = request.headers.get("x-session-id") or None
            request.state.asker = Asker(session, caller.name, caller.tenant)
            self.service.check_open()
            return await handler(request)

        return checked

    async def read(self, request: Request, read: Callable[[Fields], T]) -> T:
        """What `read` makes of the body. Raises InvalidValue, RequestTooLarge and QueueFull."""
        body = await self._body(request)
        return await self.service.converted(len(body), partial(_parsed, body, read))

    async def _body(self, request: Request) -> bytes:
        announced = request.headers.get("content-length", "")
        # Who asks first ("expect: 100-continue") need not send it.
        self._check_size(int(announced) if announced.isdecimal() else 0)
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            self._check_size(size)
            parts.append(part)
        return b"".join(parts)

    def _check_size(self, size: int) -> None:
        if size > self._most_bytes:
            raise RequestTooLarge(received_bytes=size, limit_bytes=self._most_bytes)

    def _guarded(self, handler: Handler, dialect: Dialect) -> Handler:
        """Errors become answers, and every answer says whose request it was."""

        async def guarded(request: Request) -> Response:
            given = request.headers.get("x-request-id", "")
            request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
            request.state.request_id = request_id
            try:
                response = await handler(request)
            except (ClientGone, ClientDisconnect):
                return Response(status_code=CLIENT_CLOSED)
            except Exception as error:
                if is_internal(error):
                    log.exception("request_id=%s path=%s", request_id, request.url.path)
                return error_response(error, request_id, dialect)
            response.headers.update(request_id_headers(request_id))
            return response

        return guarded


def _parsed(body: bytes, read: Callable[[Fields], T]) -> T:
    return read(parse(body))
