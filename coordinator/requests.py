"""What a caller asks of the coordinator and what it is told: one turn in, typed events out.

These records say nothing of text: the gateway turns text into token ids and back. Values are
checked here once, when they are made; behind this line nobody checks them again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from coordinator.constraints import Constraint
from coordinator.errors import InvalidValue

SessionId = NewType("SessionId", str)

# An unset limit: as many tokens as the lane has rows for.
UNLIMITED = 1 << 31

MAX_PRIORITY = 8  # 256 times the share: more would starve the others

MAX_LOGPROBS = 20  # alternatives a row; the bound that OpenAI's API documents for top_logprobs


def _finite(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidValue(name, f"must be between {low:g} and {high:g}, got {value}")


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How the tail turns a row's logits into a token. A pure function of logits, history, seed and
    position.

    Raises InvalidValue. Penalties count tokens as OpenAI (presence, frequency: generated tokens)
    and CTRL (repetition, Keskar et al. 2019: all tokens of the context) define them.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None  # None: none; n: the chosen token's and those of the n most likely

    def __post_init__(self) -> None:
        _finite("temperature", self.temperature, 0.0, 100.0)
        _finite("top_p", self.top_p, 0.0, 1.0)
        _finite("min_p", self.min_p, 0.0, 1.0)
        _finite("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _finite("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _finite("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if self.top_p == 0.0:
            raise InvalidValue("top_p", "must be greater than 0")
        if self.top_k < 0:
            raise InvalidValue("top_k", f"must not be negative, got {self.top_k}")
        if not 0 <= self.seed < 1 << 64:
            raise InvalidValue("seed", "must fit in 64 bits, unsigned")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidValue("logprobs", f"must be between 0 and {MAX_LOGPROBS}")
        for _, bias in self.logit_bias:
            _finite("logit_bias", bias, -1000.0, 1000.0)


GREEDY = SamplingSpec(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Request:
    """One turn. Token ids are those of the served model; raises InvalidValue."""

    prompt: tuple[int, ...]
    sampling: SamplingSpec = GREEDY
    max_new_tokens: int = UNLIMITED
    boundaries: tuple[int, ...] = ()  # rising token indices at which a chat message begins
    anchor: int = 0  # the token index at which tools and system prompt end; 0: unknown
    stop_tokens: frozenset[int] = frozenset()
    session: SessionId | None = None
    reuse: bool = (
        True  # False: compute every row of the prompt, for measuring and for proving reuse right
    )
    draft: bool = True  # False: plain decoding
    deadline_s: float | None = None  # on the driver's clock
    priority: int = 0  # a step up is twice the share of the queue
    moved: bool = False  # the session's rows lie on a ring that it had to leave
    constraint: Constraint | None = None  # what the generated tokens obey
    tenant: str = (
        ""  # no tenant's rows are ever reused for another's. Empty: one more, who has no name
    )

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidValue("prompt", "has no tokens")
        if not 0 <= self.anchor <= len(self.prompt):
            raise InvalidValue("anchor", f"must be between 0 and {len(self.prompt)}")
        if self.max_new_tokens < 1:
            raise InvalidValue("max_new_tokens", f"must be at least 1, got {self.max_new_tokens}")
        if abs(self.priority) > MAX_PRIORITY:
            raise InvalidValue("priority", f"must be between {-MAX_PRIORITY} and {MAX_PRIORITY}")


class MissKind(StrEnum):
    """Why a turn reused less than its session's last length."""

    NEW_SESSION = "new_session"
    DIVERGED = "diverged"
    EVICTED = "evicted"
    RING_LOST = "ring_lost"
    NO_CHECKPOINT = "no_checkpoint"
    MODEL_CHANGED = "model_changed"


@dataclass(frozen=True, slots=True)
class Miss:
    """The reason, and for DIVERGED where: the first differing token and the message it lies in."""

    kind: MissKind
    token_index: int | None = None
    message_index: int | None = None


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Natural-log probabilities at one sampled row, before any truncation: the chosen token and the
    most likely.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_prefix: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds on one clock, and what speculation did."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    drafted: int = 0
    accepted: int = 0


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token was sampled; it is the last of the tokens
    LENGTH = "length"  # max_new_tokens or the lane's last row


@dataclass(frozen=True, slots=True)
class Started:
    """The job has its lane; prefill begins at `cached_prefix`."""

    ring: str
    lane: int
    prompt_tokens: int
    cached_prefix: int
    miss: Miss | None


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Newly decided tokens, in order; `logprobs`: one a token when asked for, else none."""

    tokens: tuple[int, ...]
    logprobs: tuple[RowLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    usage: Usage
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True, slots=True)
class Recovering:
    """The job's ring lost something and heals; the tokens go on behind those that were told."""

    reason: str


JobEvent = Started | TokenDelta | Recovering | Finished
