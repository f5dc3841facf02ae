"""What every front asks of the service and is told: typed turns with text in them, and no wire.

Nothing is checked here: what a value means is decided in gateway/service.py and coordinator/requests.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from coordinator.requests import (
    FinishReason,
    Miss,
    RowLogprobs,
    SamplingSpec,
    SessionId,
    Timings,
    Usage,
)
from gateway.chat.messages import Message, Tool
from gateway.chat.parts import AnswerForm, AnswerPart


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    template_args: Mapping[str, object] = field(default_factory=dict)
    begun: str = ""  # what the answer begins with already: the model goes on from there


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"  # any object; the text is not looked at
    REGEX = "regex"  # in Rust's syntax
    LARK = "lark"  # in llguidance's dialect; may name the model's special tokens


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the whole answer must look like. It ends with one of the model's own end tokens."""

    kind: GrammarKind
    text: str = ""
    field: str = ""  # of the request, where it came from; empty: named like the kind


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn as a client asks for it."""

    prompt: Prompt
    model: str = ""  # empty: the one that is served
    session: SessionId | None = None
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    seed: int | None = None  # goes before sampling.seed; neither: drawn when it matters
    max_tokens: int | None = None  # None: what the lane still holds
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    reuse: bool = True
    draft: bool = True
    timeout_s: float | None = None
    priority: int = 0  # a step up is twice the share of the queue
    grammar: GrammarSpec | None = None
    form: AnswerForm | None = None  # None: the answer stays the text that was generated
    caller: str = ""  # the name of the key that was shown; empty: none was asked for
    tenant: str = ""  # as in coordinator.requests.Request; Caller.tenant where keys are isolated
    request_id: str = ""  # for whoever watches: the client's or one that its front made
    traceparent: str = ""  # W3C's: the client's span

    @property
    def given_seed(self) -> int | None:
        """The caller's seed, wherever it was put; None: one is drawn."""
        return self.seed if self.seed is not None else self.sampling.seed or None


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The request's own text on both sides of a token; `after` begins with the token itself."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """The turn has its lane; prefill begins at `cached_prefix`. `excerpt`: where the prompt diverged."""

    prompt_tokens: int
    cached_prefix: int
    miss: Miss | None
    ring: str
    lane: int
    seed: int
    excerpt: Excerpt | None = None


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """Token ids as they are decided, and what may be shown by now: `text`, or `parts` where a form was asked for."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[RowLogprobs, ...] = ()
    parts: tuple[AnswerPart, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnFinished:
    """`matched_stop`: the stop string or the stop token that ended the turn; None at a limit."""

    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings
    calls: int = 0  # tool calls that came to their end
    thought_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TurnRecovering:
    """Its ring lost something and heals: after a pause the answer goes on behind what was told, token for token."""

    reason: str


TurnEvent = TurnStarted | TurnDelta | TurnRecovering | TurnFinished
