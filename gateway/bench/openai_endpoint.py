"""The same timed turn against any OpenAI-compatible server, by streamed chat completions and the standard library.

Such a server tells no token ids and takes none, so its answers cannot be checked against a cold run. What it says of
its cache is `usage.prompt_tokens_details.cached_tokens`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from coordinator.errors import SetupError
from gateway.bench.endpoints import Answered, Ask

# Seconds without a byte before an endpoint is given up: a cold prefill of a long prompt is silent.
_TIMEOUT_S = 600.0


@dataclass(slots=True)
class _Heard:
    """What a stream has said so far."""

    text: str = ""
    pieces: list[float] = field(default_factory=list)  # when each came
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def take(self, chunk: dict[str, Any], at_s: float) -> None:
        for choice in chunk.get("choices") or ():
            piece = (choice.get("delta") or {}).get("content")
            if piece:
                self.text += piece
                self.pieces.append(at_s)
        usage = chunk.get("usage")
        if usage:
            self.prompt_tokens = usage["prompt_tokens"]
            self.generated_tokens = usage["completion_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get(
                "cached_tokens"
            ) or 0


class OpenAIEndpoint:
    """`url` is the base, such as http://127.0.0.1:8000/v1. Turns run in threads, at most `width` at once."""

    tells_tokens = False

    def __init__(self, url: str, model: str, width: int, api_key: str | None = None) -> None:
        self._url = urlsplit(url)
        self._model = model
        self._api_key = api_key
        self._threads = ThreadPoolExecutor(width, thread_name_prefix="bench-openai")

    async def play(self, ask: Ask) -> Answered:
        """Raises SetupError when the endpoint does not answer with a stream."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._play, ask)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _play(self, ask: Ask) -> Answered:
        secure = self._url.scheme == "https"
        make = HTTPSConnection if secure else HTTPConnection
        connection = make(self._url.hostname or "", self._url.port, timeout=_TIMEOUT_S)
        try:
            sent_s = time.perf_counter()
            connection.request("POST", self._path(), self._body(ask), self._headers())
            heard = _listen(connection.getresponse())
        except (OSError, ValueError, KeyError) as error:
            raise SetupError(f"{self._url.geturl()} did not answer: {error}") from error
        finally:
            connection.close()
        if not heard.pieces:
            raise SetupError(f"{self._url.geturl()} answered without text")
        return Answered(
            prompt_tokens=heard.prompt_tokens,
            cached_tokens=heard.cached_tokens,
            n_tokens=heard.generated_tokens or len(heard.pieces),
            text=heard.text,
            sent_s=sent_s,
            started_s=sent_s,
            first_s=heard.pieces[0],
            last_s=heard.pieces[-1],
        )

    def _path(self) -> str:
        return f"{self._url.path.rstrip('/')}/chat/completions"

    def _headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        return {"Content-Type": "application/json", **key}

    def _body(self, ask: Ask) -> str:
        return json.dumps(
            {
                "model": self._model,
                "messages": [{"role": each.role, "content": each.content} for each in ask.messages],
                "max_tokens": ask.max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )


def _listen(response: HTTPResponse) -> _Heard:
    if response.status != 200:
        raise ValueError(f"status {response.status}: {response.read(200).decode(errors='replace')}")
    heard = _Heard()
    for event in _events(response):
        heard.take(json.loads(event), time.perf_counter())
    return heard


def _events(response: HTTPResponse) -> Iterator[str]:
    """The data of each server-sent event; every server known to us sends one line an event."""
    while line := response.readline():
        name, _, value = line.decode().rstrip("\r\n").partition(":")
        if name != "data":
            continue
        if value.strip() == "[DONE]":
            return
        yield value
