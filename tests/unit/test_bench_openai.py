"""The bench against an OpenAI-compatible server: a small fake one, which streams events over loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from coordinator.errors import SetupError
from gateway.bench.endpoints import Ask
from gateway.bench.multiturn import measure
from gateway.bench.multiturn_report import report
from gateway.bench.openai_endpoint import OpenAIEndpoint
from gateway.bench.workload import Load
from gateway.chat.messages import Message


class FakeServer(ThreadingHTTPServer):
    """Says "one two three", and that it had cached 7 tokens of 9."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers["Authorization"], body))
        self.send_response(self.server.status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._chunk(": a comment, and an event of another name\n\nevent: ping\n\n")
        self._event({"choices": [{"delta": {"role": "assistant"}}]})
        for word in ("one", " two", " three"):
            self._event({"choices": [{"delta": {"content": word}}], "usage": None})
        usage = {"prompt_tokens": 9, "completion_tokens": 4}
        self._event(
            {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 7}}}
        )
        self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(event)}\n\n")

    def _chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        return None


@contextmanager
def fake_server(status: int = 200) -> Iterator[FakeServer]:
    server = FakeServer(status)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def test_a_turn_is_streamed_timed_and_counted() -> None:
    ask = Ask(5, (Message("system", "Be brief."), Message("user", "Count.")))
    with fake_server() as server:
        endpoint = OpenAIEndpoint(server.url, "some-model", 1, "secret")
        answer = await endpoint.play(ask)
        endpoint.close()
        (path, key, body) = server.asked[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert (body["model"], body["stream"], body["max_tokens"]) == ("some-model", True, 5)
    assert body["messages"][1] == {"role": "user", "content": "Count."}
    assert (answer.text, answer.n_tokens) == ("one two three", 4)
    assert (answer.prompt_tokens, answer.cached_tokens) == (9, 7)
    assert 0 < answer.ttft_ms <= (answer.last_s - answer.sent_s) * 1e3


async def test_a_bench_of_such_a_server_says_what_it_cannot_know() -> None:
    with fake_server() as server:
        endpoint = OpenAIEndpoint(server.url, "some-model", 2)
        measured = await measure(endpoint, Load(2, 3, 5), lanes=2, tell=lambda _: None)
        endpoint.close()
        bodies = [body for _, _, body in server.asked]
    told = report(measured, None)
    assert (told.wrong_turns, told.reusable_tokens, told.cold_ttft_ms_p50) == (None, None, None)
    assert (told.reused_tokens, told.prompt_tokens) == (6 * 7, 6 * 9)
    assert [turn.turn for turn in told.turns] == [1, 2, 3]
    assert told.tokens_per_s > 0
    # The history grows by the answer and the next question.
    assert max(len(body["messages"]) for body in bodies) == 6
    assert "one two three" in {
        body["messages"][2]["content"] for body in bodies if len(body["messages"]) > 3
    }


@pytest.mark.parametrize("status", [404, 500])
async def test_a_server_that_refuses_is_one_clear_line(status: int) -> None:
    with fake_server(status) as server:
        endpoint = OpenAIEndpoint(server.url, "m", 1)
        with pytest.raises(SetupError, match=f"status {status}"):
            await endpoint.play(Ask(1, (Message("user", "x"),)))
        endpoint.close()
    with pytest.raises(SetupError, match="did not answer"):
        await OpenAIEndpoint(server.url, "m", 1).play(Ask(1, (Message("user", "x"),)))
