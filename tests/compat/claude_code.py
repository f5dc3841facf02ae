"""Talks as Claude Code does, in the shapes that its requests have: for tests of what a server reuses.

A head of tools and a long system prompt, whose first block names another checksum in each request; reminders as system
messages in the middle; side calls of the same session (is there quota, what is this about); tools' results.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import count
from typing import Any

SESSION = "5f0c8e0a-93c1-4d6e-9b43-0a5f3f1d2c7b"
USER = f"user_{'0123456789abcdef' * 4}_account__session_{SESSION}"
EPHEMERAL = {"type": "ephemeral"}


@dataclass(frozen=True)
class Main:
    """One main turn, as its usage tells it."""

    cached: int
    prompt: int
    generated: int
    content: list[Any]

    @property
    def length(self) -> int:
        return self.prompt + self.generated


@dataclass
class ClaudeCode:
    """One session of it. `tools` and `rules` say how long the head is; `most` how long an answer may be."""

    client: Any  # an AsyncAnthropic: its types are narrower than its wire
    model: str
    rules: int = 40
    tools: int = 8
    most: int = 24
    messages: list[Any] = field(default_factory=list)
    _requests: Any = field(default_factory=lambda: count(1))

    def user(self, *blocks: Any) -> None:
        said = [
            {"type": "text", "text": each} if isinstance(each, str) else each for each in blocks
        ]
        self.messages.append({"role": "user", "content": said})

    def remind(self, text: str) -> None:
        self.messages.append({"role": "system", "content": [{"type": "text", "text": text}]})

    def used_tool(self, name: str, result: Any, **more: Any) -> None:
        """The last answer thought, and called a tool as well; this came of it."""
        content = self.messages[-1]["content"]
        content.insert(0, {"type": "thinking", "thinking": "", "signature": "EqQBCgIYAhIM"})
        call = f"toolu_{len(self.messages):04d}"
        use = {"type": "tool_use", "id": call, "name": name, "input": {"path": "/src/main.py"}}
        content.append(use)
        self.user({"type": "tool_result", "tool_use_id": call, "content": result, **more})

    def ran_tools(self, result: str) -> None:
        """What came of the calls in the last answer."""
        calls = [b for b in self.messages[-1]["content"] if b["type"] == "tool_use"]
        assert calls
        results = (
            {"type": "tool_result", "tool_use_id": b["id"], "content": result} for b in calls
        )
        self.user(*results)

    async def main(self, **more: Any) -> Main:
        """Streams the next turn of the conversation itself, and keeps the answer."""
        shown = json.loads(json.dumps(self.messages))
        shown[-1]["content"][-1]["cache_control"] = EPHEMERAL  # it wanders with the last message
        async with self.client.beta.messages.stream(
            model=self.model,
            max_tokens=self.most,
            system=self._system(),
            messages=shown,
            tools=self._tools(),
            thinking={"type": "adaptive"},
            betas=["claude-code-20250219", "interleaved-thinking-2025-05-14"],
            **self._common(),
            **more,
        ) as stream:
            answer = await stream.get_final_message()
        content = [
            block.model_dump(exclude_none=True, exclude={"parsed_output"})
            for block in answer.content
        ]
        self.messages.append({"role": "assistant", "content": content})
        used = answer.usage
        cached = used.cache_read_input_tokens or 0
        return Main(cached, used.input_tokens + cached, used.output_tokens, content)

    async def counted(self) -> int:
        answer = await self.client.beta.messages.count_tokens(
            model=self.model, messages=self.messages, system=self._system(), tools=self._tools()
        )
        return answer.input_tokens

    async def quota_probe(self) -> None:
        await self.client.beta.messages.create(
            model="claude-haiku-4-5",
            max_tokens=1,
            messages=[{"role": "user", "content": "quota"}],
            **self._common(),
        )

    async def title(self) -> None:
        """What the conversation is about, asked of the small model, with a system prompt of its own."""
        text = "Analyze if this message indicates a new conversation topic, and give it a title of three words."
        await self.client.beta.messages.create(
            model="claude-haiku-4-5",
            max_tokens=8,
            system=[self._billing(), {"type": "text", "text": text}],
            messages=[{"role": "user", "content": "Where does the parser drop what it has read?"}],
            thinking={"type": "disabled"},
            **self._common(),
        )

    def _common(self) -> dict[str, Any]:
        return {"metadata": {"user_id": USER}, "extra_body": {"temperature": 0}}

    def _system(self) -> list[Any]:
        rules = "\n".join(
            f"- Rule {n}: leave file {n * 7} as it is unless asked." for n in range(self.rules)
        )
        who = {
            "type": "text",
            "text": "You are Claude Code, a command line tool.",
            "cache_control": EPHEMERAL,
        }
        return [self._billing(), who, {"type": "text", "text": rules, "cache_control": EPHEMERAL}]

    def _billing(self) -> dict[str, Any]:
        number = next(self._requests)
        line = f"x-anthropic-billing-header: cc_version=2.1.160.a1; cc_entrypoint=cli; cch={number:05x};"
        return {"type": "text", "text": line}

    def _tools(self) -> list[Any]:
        names = ("Read", "Edit", "Write", "Bash", "Grep", "Glob", "Task", "WebFetch")[: self.tools]
        schema = {
            "type": "object",
            "properties": {"path": {"type": "string", "maxLength": 12}},
            "required": ["path"],
            "additionalProperties": False,
        }
        search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
        return [
            *({"name": n, "description": f"{n}s a file.", "input_schema": schema} for n in names),
            search,
        ]
