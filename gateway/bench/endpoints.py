"""One turn against a server, timed where a client stands: what is asked, what came back and when.

Decides nothing about reuse or correctness. Times hold the wire, the queue and the gateway, but not the rendering of
the chat template, which is done here so that the prompt's token ids are known to whoever checks the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from coordinator.requests import GREEDY, SessionId
from coordinator.sessions import History
from gateway.chat.messages import Message
from gateway.chat.tokenizer import ChatTokenizer, RenderedPrompt
from gateway.client import Client
from gateway.turns import TokenPrompt, TurnDelta, TurnFinished, TurnRequest, TurnStarted


@dataclass(frozen=True, slots=True)
class Ask:
    """A greedy turn, by its messages or, where `prompt` is set, by exact token ids."""

    max_tokens: int
    messages: tuple[Message, ...] = ()
    prompt: tuple[int, ...] = ()
    session: SessionId | None = None
    reuse: bool = True
    draft: bool = True
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Arrival:
    """A piece of an answer as it reached the client."""

    at_s: float
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """`prompt` and `tokens` are empty where the endpoint tells no ids; `n_tokens` counts all the same."""

    prompt_tokens: int
    cached_tokens: int
    n_tokens: int
    text: str
    sent_s: float
    started_s: float  # when the server said that prefill begins
    first_s: float
    last_s: float
    ring: str = ""
    prompt: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    arrivals: tuple[Arrival, ...] = ()

    @property
    def ttft_ms(self) -> float:
        return (self.first_s - self.sent_s) * 1e3

    @property
    def token_ms(self) -> float | None:
        """Milliseconds a token behind the first; None for a single one."""
        return (
            (self.last_s - self.first_s) * 1e3 / (self.n_tokens - 1) if self.n_tokens > 1 else None
        )

    @property
    def decode_tps(self) -> float | None:
        return 1e3 / self.token_ms if self.token_ms else None


class Endpoint(Protocol):
    """Two implementations: our gRPC, and any OpenAI-compatible server."""

    @property
    def tells_tokens(self) -> bool:
        """Whether it takes and tells token ids, and so a turn can be repeated without reuse."""
        ...

    async def play(self, ask: Ask) -> Answered: ...


class GrpcEndpoint:
    """Our own wire. The tokenizer must be the served model's."""

    tells_tokens = True

    def __init__(self, client: Client, tokenizer: ChatTokenizer) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._histories: dict[SessionId, History] = {}

    async def play(self, ask: Ask, note: Callable[[Arrival], None] = lambda _: None) -> Answered:
        """`note` hears of arrivals as they come, for who watches a stream that does not end."""
        rendered = self._rendered(ask)
        arrivals: list[Arrival] = []
        sent_s = time.perf_counter()
        started_s, started, finished, text = sent_s, None, None, ""
        async with self._client.generate(_request(ask, rendered.token_ids)) as stream:
            async for event in stream:
                match event:
                    case TurnStarted():
                        started, started_s = event, time.perf_counter()
                    case TurnDelta():
                        if event.token_ids:
                            arrivals.append(Arrival(time.perf_counter(), event.token_ids))
                            note(arrivals[-1])
                        text += event.text
                    case TurnFinished():
                        finished = event
        assert started is not None
        assert finished is not None
        tokens = tuple(_tokens(arrivals))
        self._remember(ask.session, rendered, tokens)
        return Answered(
            prompt_tokens=started.prompt_tokens,
            cached_tokens=finished.usage.cached_prefix,
            n_tokens=len(tokens),
            text=text,
            sent_s=sent_s,
            started_s=started_s,
            first_s=arrivals[0].at_s,
            last_s=arrivals[-1].at_s,
            ring=started.ring,
            prompt=rendered.token_ids,
            tokens=tokens,
            arrivals=tuple(arrivals),
        )

    def _rendered(self, ask: Ask) -> RenderedPrompt:
        if ask.prompt:
            return RenderedPrompt("", ask.prompt)
        history = self._histories.get(ask.session) if ask.session else None
        return self._tokenizer.render(ask.messages, (), {}, history)

    def _remember(
        self, session: SessionId | None, rendered: RenderedPrompt, tokens: tuple[int, ...]
    ) -> None:
        if session is not None and rendered.text:
            said = self._tokenizer.decode(tokens, skip_special=False)
            self._histories[session] = History(rendered.text + said, rendered.token_ids + tokens)


def _request(ask: Ask, prompt: tuple[int, ...]) -> TurnRequest:
    return TurnRequest(
        TokenPrompt(prompt),
        session=ask.session,
        sampling=GREEDY,
        max_tokens=ask.max_tokens,
        ignore_eos=ask.ignore_eos,
        reuse=ask.reuse,
        draft=ask.draft,
    )


def _tokens(arrivals: list[Arrival]) -> Iterator[int]:
    for arrival in arrivals:
        yield from arrival.tokens
