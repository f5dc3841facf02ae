"""One turn from text to text: what every front calls, whatever wire its client speaks.

Decides limits that need no ring, draws seeds, turns prompts into ids and ids into text, ends a turn at a stop string
and remembers a session's ids for its next turn. It decides nothing about lanes or reuse, and no protobuf or HTTP
enters.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from coordinator.clock import Clock
from coordinator.driver import RingStatus
from coordinator.errors import (
    BrokenInvariant,
    Cancelled,
    ContextTooLong,
    InvalidValue,
    ModelNotFound,
)
from coordinator.requests import (
    UNLIMITED,
    Finished,
    FinishReason,
    JobEvent,
    Request,
    SamplingSpec,
    SessionId,
    Started,
    Timings,
    TokenDelta,
    Usage,
)
from coordinator.ring import RingInfo
from coordinator.router import Router
from coordinator.sessions import History, splice
from gateway.answer import Answer
from gateway.chat.messages import Message
from gateway.chat.tokenizer import ChatTokenizer, RenderedPrompt
from gateway.turns import (
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    TurnDelta,
    TurnEvent,
    TurnFinished,
    TurnRequest,
    TurnStarted,
)

# A longer text cannot fit: no common vocabulary averages more characters a token. It spares tokenizing megabytes.
MAX_CHARS_PER_TOKEN = 64
# Seeds that we draw survive a client that reads JSON numbers as doubles.
_DRAWN_SEED_BITS = 53
_LONGEST_SESSION_ID = 256


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn whose prompt is ids by now."""

    prompt: RenderedPrompt
    request: Request
    submitted_s: float


class GenerationService:
    """Safe to call from many tasks of one event loop."""

    def __init__(
        self,
        name: str,
        router: Router,
        tokenizer: ChatTokenizer,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self.name = name
        self._router = router
        self._tokenizer = tokenizer
        self._clock = clock
        self._rng = rng

    def info(self) -> RingInfo:
        """Raises RingUnavailable while no ring has started."""
        return self._router.info()

    def rings(self) -> tuple[RingStatus, ...]:
        return self._router.rings()

    def close_session(self, session: SessionId) -> bool:
        """Cancels the session's turns and forgets it; False when it is unknown."""
        return self._router.close_session(session)

    async def count_tokens(self, prompt: Prompt, model: str = "") -> int:
        """How many tokens `generate` would find in the prompt. Raises RequestError and RingUnavailable."""
        self._check_model(model)
        return len((await self._read(prompt, None)).token_ids)

    async def generate(self, turn: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        """The turn's events: started, deltas, finished. Raises RequestError, BusyError and JobError.

        Close the generator to cancel the turn (contextlib.aclosing): what was generated until then is remembered.
        """
        job = await self._prepare(turn)
        answer = Answer(self._tokenizer, turn.stop, job.request.stop_tokens)
        meter = _Meter(self._clock, job.submitted_s)
        cut_short = False
        with self._remembering(job, answer):
            async with self._router.submit(job.request) as stream:
                async for event in stream:
                    meter.note(event)
                    for told in _told(event, answer, job.request.sampling.seed):
                        yield told
                    if isinstance(event, TokenDelta) and isinstance(answer.matched, str):
                        cut_short = True
                        break
        if cut_short:
            yield meter.finished(answer)

    async def _prepare(self, turn: TurnRequest) -> _Turn:
        submitted_s = self._clock.now()
        self._check_model(turn.model)
        _check_limits(turn)
        history = self._router.history(turn.session) if turn.session else None
        prompt = await self._read(turn.prompt, history)
        request = Request(
            prompt=prompt.token_ids,
            sampling=self._sampling(turn),
            max_new_tokens=UNLIMITED if turn.max_tokens is None else turn.max_tokens,
            boundaries=prompt.boundaries,
            stop_tokens=self._stop_tokens(turn),
            session=turn.session or None,
            reuse=turn.reuse,
            draft=turn.draft,
            deadline_s=None if turn.timeout_s is None else submitted_s + turn.timeout_s,
        )
        return _Turn(prompt, request, submitted_s)

    def _check_model(self, model: str) -> None:
        if model not in ("", self.name):
            raise ModelNotFound(model=model, served=self.name)

    async def _read(self, prompt: Prompt, history: History | None) -> RenderedPrompt:
        """The prompt's ids. Off the event loop: a long conversation takes tens of milliseconds."""
        rows = self.info().max_rows
        at_least = _letters(prompt) // MAX_CHARS_PER_TOKEN
        if at_least > rows:
            raise ContextTooLong(prompt_tokens=at_least, limit=rows)
        match prompt:
            case ChatPrompt(messages, tools, args):
                if not messages:
                    raise InvalidValue("messages", "is empty")
                return await asyncio.to_thread(
                    self._tokenizer.render, messages, tools, args, history
                )
            case TextPrompt(text):
                ids = await asyncio.to_thread(self._encode, text, history)
                return RenderedPrompt(text, ids)
            case TokenPrompt(ids):
                self._check_ids("token_ids", ids)
                decode = partial(self._tokenizer.decode, ids, skip_special=False)
                return RenderedPrompt(await asyncio.to_thread(decode), ids)

    def _encode(self, text: str, history: History | None) -> tuple[int, ...]:
        cold = self._tokenizer.encode_prompt(text)
        if history is None or not text.startswith(history.text):
            return cold
        warm = splice(history, text, self._tokenizer.encode, self._tokenizer.is_special)
        # Without a clean seam splice() encodes anew, and knows nothing of what encode_prompt puts in front.
        return warm if warm[: len(history.token_ids)] == history.token_ids else cold

    def _check_ids(self, field: str, ids: Iterable[int]) -> None:
        vocab_size = self.info().vocab_size
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidValue(field, f"{token} is no token id; they are 0 to {vocab_size - 1}")

    def _sampling(self, turn: TurnRequest) -> SamplingSpec:
        self._check_ids("logit_bias", (token for token, _ in turn.sampling.logit_bias))
        seed = turn.seed
        if seed is None:
            seed = self._rng.getrandbits(_DRAWN_SEED_BITS) if turn.sampling.temperature else 0
        return replace(turn.sampling, seed=seed)

    def _stop_tokens(self, turn: TurnRequest) -> frozenset[int]:
        self._check_ids("stop_token_ids", turn.stop_token_ids)
        own = frozenset() if turn.ignore_eos else self._tokenizer.stop_token_ids
        return own | frozenset(turn.stop_token_ids)

    @contextmanager
    def _remembering(self, job: _Turn, answer: Answer) -> Iterator[None]:
        """However the turn ends, its session's next one goes on from the ids that it has by then."""
        try:
            yield
        except Cancelled:
            raise  # its session was closed: remembering it would bring it back
        except BaseException:
            self._remember(job, answer)
            raise
        self._remember(job, answer)

    def _remember(self, job: _Turn, answer: Answer) -> None:
        if job.request.session is None:
            return
        ids, text = answer.history()
        history = History(job.prompt.text + text, job.request.prompt + ids)
        self._router.remember(job.request.session, history)


class _Meter:
    """Times a turn that ends at a stop string: the coordinator sees it as cancelled and reports nothing."""

    def __init__(self, clock: Clock, submitted_s: float) -> None:
        self._clock = clock
        self._submitted_s = self._started_s = self._first_s = submitted_s
        self._started: Started | None = None
        self._tokens_came = False

    def note(self, event: JobEvent) -> None:
        match event:
            case Started():
                self._started, self._started_s = event, self._clock.now()
            case TokenDelta() if not self._tokens_came:
                self._tokens_came, self._first_s = True, self._clock.now()

    def finished(self, answer: Answer) -> TurnFinished:
        if self._started is None:
            raise BrokenInvariant("a stream gave tokens before it started")
        started = self._started
        return TurnFinished(
            reason=FinishReason.STOP,
            matched_stop=answer.matched,
            usage=Usage(started.prompt_tokens, started.cached_prefix, len(answer.token_ids)),
            timings=Timings(
                queue_s=self._started_s - self._submitted_s,
                prefill_s=self._first_s - self._started_s,
                decode_s=self._clock.now() - self._first_s,
            ),
        )


def _told(event: JobEvent, answer: Answer, seed: int) -> Iterator[TurnEvent]:
    match event:
        case Started():
            yield TurnStarted(
                prompt_tokens=event.prompt_tokens,
                cached_prefix=event.cached_prefix,
                miss=event.miss,
                ring=event.ring,
                lane=event.lane,
                seed=seed,
            )
        case TokenDelta():
            yield answer.feed(event)
        case Finished():
            if rest := answer.flush():
                yield TurnDelta(text=rest)
            matched = answer.matched
            reason = event.reason if matched is None else FinishReason.STOP
            yield TurnFinished(reason, matched, event.usage, event.timings)


def _check_limits(turn: TurnRequest) -> None:
    if turn.max_tokens is not None and turn.max_tokens < 1:
        raise InvalidValue("max_tokens", f"must be at least 1, got {turn.max_tokens}")
    if turn.session is not None and len(turn.session) > _LONGEST_SESSION_ID:
        raise InvalidValue("session_id", f"has more than {_LONGEST_SESSION_ID} characters")


def _letters(prompt: Prompt) -> int:
    match prompt:
        case ChatPrompt(messages, tools, _):
            said = sum(len(message.content or "") + _call_letters(message) for message in messages)
            return said + sum(len(str(tool.parameters)) for tool in tools)
        case TextPrompt(text):
            return len(text)
        case TokenPrompt(ids):
            return len(ids) * MAX_CHARS_PER_TOKEN


def _call_letters(message: Message) -> int:
    return sum(len(str(call.arguments)) for call in message.tool_calls)
