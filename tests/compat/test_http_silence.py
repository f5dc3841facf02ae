"""A stream that has nothing to show says so, by the clock: its client must not take it for dead."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.http import streaming

TOOLS = [{"type": "function", "function": {"name": "f"}}]
# Arguments as a string of JSON are told when they are whole: nothing can be shown of them until then.
WITHHELD = '<tool_call>{"arguments": "' + "x" * 120 + '", "name": "f"}</tool_call>'


async def test_comments_are_sent_while_a_call_is_withheld(
    http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """antirez/ds4#151, 1jehuang/jcode#976: tokens come all the while, and no byte of them."""
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    async with http(says={"Call": WITHHELD}, step_s=0.005) as (client, _):
        body = {
            "model": "fake",
            "messages": [{"role": "user", "content": "Call"}],
            "tools": TOOLS,
            "stream": True,
            "temperature": 0,
            "max_tokens": 400,
        }
        _, _, raw = await client.ask("POST", "/v1/chat/completions", body)
        events = raw.decode().split("\n\n")
        opened = next(n for n, event in enumerate(events) if '"name":"f"' in event)
        assert events[1:opened].count(": keep-alive") >= 3
        assert set(events[1:opened]) == {": keep-alive"}
        assert '"finish_reason":"tool_calls"' in raw.decode()


async def test_a_stream_that_shows_something_needs_no_comments(
    http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 30.0)
    async with http(endless=True) as (client, _):
        body = {"prompt": "abc", "stream": True, "temperature": 0, "max_tokens": 30}
        _, _, raw = await client.ask("POST", "/v1/completions", body)
        assert b": keep-alive" not in raw
