"""Talks as Codex does, in the shapes that its requests have: for tests of what a server reuses, and of what it tells.

Instructions and tools at the head, then what the developer and the environment say, then the user; tools' results come
back beside the calls; thoughts come back without their plain text; nothing is stored, and one key names the session.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.compat.http_client import Http

KEY = "019a2f6e-7f0b-7c41-9d1e-5b1d1c6f2a10"
PATCH_GRAMMAR = 'start: begin hunk+ end\nbegin: "*** Begin Patch" LF\nend: "*** End Patch" LF?'


class StreamLost(Exception):
    """The stream failed, or ended without response.completed, as Codex sees it. Its first word is the error's code."""


@dataclass(frozen=True)
class Turn:
    """One request, as its usage tells it."""

    cached: int
    prompt: int
    generated: int
    items: list[Any]

    @property
    def length(self) -> int:
        return self.prompt + self.generated


@dataclass
class Codex:
    """One session of it. `rules` says how long the head is; `more` goes into each body beside what Codex sends: Codex
    sets no limit, and takes an answer that was cut at one for lost.
    """

    http: Http
    model: str
    rules: int = 40
    more: dict[str, Any] = field(default_factory=dict)
    input: list[Any] = field(default_factory=list)

    def begin(self) -> None:
        self._message(
            "developer",
            "<permissions instructions>\nsandbox_mode: workspace-write\n</permissions instructions>",
        )
        self._message(
            "user",
            "<environment_context>\n  <cwd>/src/app</cwd>\n  <shell>bash</shell>\n</environment_context>",
        )

    def ask(self, text: str) -> None:
        self._message("user", text)

    def _message(self, role: str, text: str) -> None:
        self.input.append(
            {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
        )

    def result(self, call: dict[str, Any], output: Any) -> None:
        self.input.append(
            {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": output}
        )

    async def turn(self, **more: Any) -> Turn:
        """One request; what was answered becomes input of the next. Raises StreamLost."""
        events = await self.sent(**more)
        items = [
            _kept(event["item"]) for event in events if event["type"] == "response.output_item.done"
        ]
        last = events[-1]
        cut = last["type"] == "response.incomplete" and "max_output_tokens" in self.more
        if last["type"] != "response.completed" and not cut:
            raise StreamLost(*_reason(last))
        self.input += items
        used = last["response"]["usage"]
        cached = used["input_tokens_details"]["cached_tokens"]
        return Turn(cached, used["input_tokens"], used["output_tokens"], items)

    async def sent(self, **more: Any) -> list[Any]:
        """The events of one request, as they came."""
        status, headers, raw = await self.http.ask(
            "POST",
            "/v1/responses",
            {**self._body(), **more},
            accept="text/event-stream",
            originator="codex_cli_rs",
            user_agent="codex_cli_rs/0.142.0 (Debian 13.0.0; x86_64) xterm",
            **{"x_codex_turn_metadata": "{}"},
        )
        assert status == 200, raw
        assert headers["content-type"].startswith("text/event-stream")
        blocks = raw.decode().split("\n\n")
        return [
            json.loads(line[6:])
            for block in blocks
            for line in block.split("\n")
            if line.startswith("data: ")
        ]

    def _body(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "instructions": self._instructions(),
            "input": self.input,
            "tools": self._tools(),
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": KEY,
            "text": {"verbosity": "low"},
            "client_metadata": {"x-codex-installation-id": "0"},
            **self.more,
        }

    def _instructions(self) -> str:
        rules = "\n".join(
            f"- Rule {n}: leave file {n * 7} as it is unless asked." for n in range(self.rules)
        )
        return f"You are a coding agent running in the Codex CLI, a terminal-based coding assistant.\n{rules}"

    def _tools(self) -> list[Any]:
        return [
            _function("shell_command", command="The command line.", workdir="Where it runs."),
            _function("update_plan", explanation="Why it changed.", plan="The steps."),
            {
                "type": "custom",
                "name": "apply_patch",
                "description": "Edits files. This is a FREEFORM tool, so do not wrap the patch in JSON.",
                "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
            },
            {"type": "web_search", "external_web_access": False},
            _function("view_image", path="A local file."),
        ]


def _function(name: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(parameters)[:1],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "name": name,
        "description": f"Runs {name}.",
        "strict": False,
        "parameters": schema,
    }


def _kept(item: dict[str, Any]) -> dict[str, Any]:
    """What Codex keeps of an item and sends back: it knows it by its type's own fields."""
    match item["type"]:
        case "message":
            content = [{"type": "output_text", "text": part["text"]} for part in item["content"]]
            return {"type": "message", "role": item["role"], "content": content}
        case "reasoning":
            sealed = {"encrypted_content": item["encrypted_content"]}
            return {"type": "reasoning", "summary": item["summary"], **sealed}
        case "function_call":
            names = ("type", "name", "arguments", "call_id")
        case "custom_tool_call":
            names = ("type", "status", "call_id", "name", "input")
    return {name: item[name] for name in names}


def _reason(event: dict[str, Any]) -> tuple[str, str]:
    response = event.get("response", {})
    error = response.get("error") or {}
    return error.get("code", event["type"]), error.get("message", "")
