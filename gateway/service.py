"""One turn from text to text: what every front calls, whatever wire its client speaks.

Draws seeds, turns prompts into ids and ids into text, ends a turn at a stop string
and remembers a session's ids for its next turn. It decides nothing about lanes or reuse, and no protobuf or HTTP
enters.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from coordinator.clock import Clock
from coordinator.driver import RingStatus
from coordinator.errors import DeadlineExceeded, InvalidValue, ModelNotFound, QueueFull
from coordinator.foresight import Wish
from coordinator.frames import NodeId
from coordinator.lanes import LaneStatus
from coordinator.requests import (
    UNLIMITED,
    Finished,
    JobEvent,
    Request,
    SamplingSpec,
    SessionId,
    Started,
    TokenDelta,
)
from coordinator.ring import RingInfo
from coordinator.router import RingNode, Router
from coordinator.sessions import History, gone_on, splice
from gateway.answer import Answer
from gateway.chat.grammar import Grammars
from gateway.chat.messages import Message
from gateway.chat.tokenizer import ChatTokenizer, RenderedPrompt
from gateway.forms import answer_grammar, answer_parser
from gateway.limits import check_prompt, check_size, check_turn
from gateway.next_turn import next_wish
from gateway.observing.observers import TurnObserver, watching
from gateway.open_turns import OpenTurn, OpenTurns
from gateway.safety.metering import metered
from gateway.safety.quotas import Quotas
from gateway.turns import (
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    TurnEvent,
    TurnRequest,
    TurnStarted,
)
from gateway.why_not import as_sent, excerpt
from gateway.workers import Workers

# Seeds that we draw survive a client that reads JSON numbers as doubles.
_DRAWN_SEED_BITS = 53
# Converted in less than a millisecond or so.
_SMALL_BYTES = 64 * 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn whose prompt is ids by now."""

    source: Prompt
    prompt: RenderedPrompt
    request: Request


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """How many tokens stay from now on, and where."""

    tokens: int
    rings: tuple[str, ...]


class GenerationService:
    """Safe to call from many tasks of one event loop."""

    def __init__(
        self,
        name: str,
        router: Router,
        tokenizer: ChatTokenizer,
        clock: Clock,
        rng: random.Random,
        observers: Sequence[TurnObserver] = (),
        quotas: Quotas | None = None,
    ) -> None:
        self.name = name
        self._router = router
        self._tokenizer = tokenizer
        self._clock = clock
        self._rng = rng
        self._observers = tuple(observers)
        self._quotas = quotas
        self._workers = Workers()
        self._grammars = Grammars(tokenizer)
        self._turns = OpenTurns()

    def info(self) -> RingInfo:
        """Raises RingUnavailable while no ring has started."""
        return self._router.info()

    def rings(self) -> tuple[RingStatus, ...]:
        return self._router.rings()

    def lanes(self, ring: str, most: int) -> tuple[LaneStatus, ...]:
        """A ring's lanes; where there are more than `most`, those used last."""
        return self._router.lanes(ring, most)

    @property
    def open_turns(self) -> int:
        """Turns that are being read, wait or run."""
        return len(self._turns)

    def close_session(self, session: SessionId) -> bool:
        """Cancels the session's turns and forgets it; False when it is unknown."""
        had_turns = self._turns.close(session)
        return self._router.close_session(session) or had_turns

    async def count_tokens(self, prompt: Prompt, model: str = "") -> int:
        """How many tokens `generate` would find in the prompt. Raises RequestError and BusyError."""
        self._check_model(model)
        check_prompt(prompt, self.info().max_rows)
        return await self._workers.run(partial(self._count, prompt))

    async def tokenize(self, prompt: Prompt, model: str = "") -> tuple[int, ...]:
        """The ids that `generate` would find in the prompt. Raises RequestError and BusyError."""
        self._check_model(model)
        check_prompt(prompt, self.info().max_rows)
        read = await self._workers.run(partial(self._reading, prompt, None))
        return read.token_ids

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        """Raises RequestError and BusyError."""
        self._check_ids("tokens", ids)
        return await self._workers.run(partial(self._tokenizer.decode, ids, skip_special=False))

    def token_text(self, token: int) -> str:
        """One token's own text; what is half of a character is shown as a replacement character."""
        return self._tokenizer.decode((token,), skip_special=False)

    def _count(self, prompt: Prompt) -> int:
        match prompt:
            case ChatPrompt(messages, tools, args, begun):
                only = self._tokenizer.render(
                    messages, tools, args, with_boundaries=False, begun=begun
                )
                return len(only.token_ids)
            case TextPrompt(text):
                return len(self._tokenizer.encode_prompt(text))
            case TokenPrompt(ids):
                self._check_ids("token_ids", ids)
                return len(ids)

    def nodes(self, ring: str | None = None) -> Iterator[RingNode]:
        """What the rings, or the one of that name, keep in host memory. In no order."""
        return self._router.nodes(ring)

    def drop_node(self, node: NodeId) -> bool:
        """Drops it, and what goes on from it, on every ring; False when none has it."""
        return self._router.drop_node(node)

    async def pin_prefix(self, prompt: Prompt, model: str = "", tenant: str = "") -> PinnedPrefix:
        """Keeps the rows of what prompts begin with until they are dropped. Raises RequestError and BusyError."""
        self._check_model(model)
        check_size(prompt, self.info().max_rows)
        ids = await self._workers.run(partial(self._prefix, prompt))
        if not ids:
            raise InvalidValue("prompt", "has no tokens that all such prompts begin with")
        return PinnedPrefix(len(ids), self._router.pin(ids, tenant))

    def _prefix(self, prompt: Prompt) -> tuple[int, ...]:
        match prompt:
            case ChatPrompt((), ()):
                raise InvalidValue("messages", "is empty")
            case ChatPrompt(messages, tools, args):
                return self._tokenizer.prefix(messages, tools, args)
            case TextPrompt(text):
                return self._tokenizer.encode_prompt(text)
            case TokenPrompt(ids):
                self._check_ids("token_ids", ids)
                return ids

    async def converted(self, nbytes: int, work: Callable[[], T]) -> T:
        """Converts a request of so many bytes: beside the event loop, where prompts are read as well, when it is big,
        since 16 MB of small messages take a while. Raises QueueFull.
        """
        return work() if nbytes <= _SMALL_BYTES else await self._workers.run(work)

    async def generate(self, turn: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        """The turn's events: started, deltas, finished. Raises RequestError, BusyError and JobError.

        Close the generator to cancel the turn (contextlib.aclosing): what was generated until then is remembered.
        """
        now = self._clock.now
        with watching(self._observers, turn, now) as watch, metered(self._quotas, turn) as meter:
            async with aclosing(self._generated(turn)) as events:
                async for event in events:
                    meter.told(event)
                    watch.told(event, now())
                    yield event

    async def _generated(self, turn: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        last: tuple[TurnEvent, ...] = ()
        with self._turns.opened(turn.session) as open_turn:
            job = await self._prepared(turn, open_turn)
            parser = answer_parser(self._tokenizer.answers, turn, job.prompt, self._rng)
            answer = Answer(self._tokenizer, turn.stop, job.request.stop_tokens, parser)
            async with self._router.submit(job.request) as stream:
                with self._remembering(job, answer, open_turn):
                    async for event in stream:
                        open_turn.started = True
                        told = tuple(self._told(event, answer, job))
                        if isinstance(event, Finished):
                            last = told  # once it is remembered: the next turn may come at once
                            break
                        for each in told:
                            yield each
                        if isinstance(answer.matched, str):
                            last = _stopped(stream.finish_now(), answer)
                            break
            for each in last:
                yield each

    async def _prepared(self, turn: TurnRequest, open_turn: OpenTurn) -> _Turn:
        try:
            async with asyncio.timeout(turn.timeout_s):
                return await self._prepare(turn, open_turn)
        except TimeoutError:
            raise DeadlineExceeded from None

    async def _prepare(self, turn: TurnRequest, open_turn: OpenTurn) -> _Turn:
        submitted_s = self._clock.now()
        self._check_model(turn.model)
        check_turn(turn)
        history = self._router.history(turn.session) if turn.session else None
        prompt = await self._read(turn.prompt, history, open_turn)
        constraint = None
        grammar = answer_grammar(self._tokenizer.answers, turn, prompt)
        if grammar is not None:
            compiling = partial(self._grammars.constraint, grammar)
            constraint = await open_turn.read(self._workers.run(compiling))
        request = Request(
            prompt=prompt.token_ids,
            sampling=self._sampling(turn),
            max_new_tokens=UNLIMITED if turn.max_tokens is None else turn.max_tokens,
            boundaries=prompt.boundaries,
            anchor=prompt.anchor,
            stop_tokens=self._stop_tokens(turn),
            session=turn.session or None,
            reuse=turn.reuse,
            draft=turn.draft,
            priority=turn.priority,
            constraint=constraint,
            tenant=turn.tenant,
            deadline_s=None if turn.timeout_s is None else submitted_s + turn.timeout_s,
        )
        return _Turn(turn.prompt, prompt, request)

    def _check_model(self, model: str) -> None:
        if model not in ("", self.name):
            raise ModelNotFound(model=model, served=self.name)

    async def _read(
        self, prompt: Prompt, history: History | None, open_turn: OpenTurn
    ) -> RenderedPrompt:
        """The prompt's ids. Off the event loop: a long conversation takes tens of milliseconds."""
        check_prompt(prompt, self.info().max_rows)
        if isinstance(prompt, TokenPrompt):
            self._check_ids("token_ids", prompt.token_ids)
        return await open_turn.read(self._workers.run(partial(self._reading, prompt, history)))

    def _reading(self, prompt: Prompt, history: History | None) -> RenderedPrompt:
        match prompt:
            case ChatPrompt(messages, tools, args, begun):
                return self._tokenizer.render(messages, tools, args, history, begun=begun)
            case TextPrompt(text):
                return RenderedPrompt(text, self._encode(text, history))
            case TokenPrompt(ids):
                return RenderedPrompt(self._tokenizer.decode(ids, skip_special=False), ids)

    def _encode(self, text: str, history: History | None) -> tuple[int, ...]:
        cold = self._tokenizer.encode_prompt(text)
        begun = gone_on(history, text)
        if begun is None:
            return cold
        warm = splice(history, text, self._tokenizer.encode, self._tokenizer.is_special)
        # Without a clean seam splice() encodes anew, and knows nothing of what encode_prompt puts in front.
        return warm if warm[: len(begun.token_ids)] == begun.token_ids else cold

    def _check_ids(self, field: str, ids: Iterable[int]) -> None:
        vocab_size = self.info().vocab_size
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidValue(field, f"{token} is no token id; they are 0 to {vocab_size - 1}")

    def _sampling(self, turn: TurnRequest) -> SamplingSpec:
        self._check_ids("logit_bias", (token for token, _ in turn.sampling.logit_bias))
        seed = turn.given_seed
        if seed is None:
            seed = self._rng.getrandbits(_DRAWN_SEED_BITS) if turn.sampling.temperature else 0
        return replace(turn.sampling, seed=seed)

    def _stop_tokens(self, turn: TurnRequest) -> frozenset[int]:
        self._check_ids("stop_token_ids", turn.stop_token_ids)
        own = frozenset() if turn.ignore_eos else self._tokenizer.stop_token_ids
        return own | frozenset(turn.stop_token_ids)

    def _told(self, event: JobEvent, answer: Answer, job: _Turn) -> Iterator[TurnEvent]:
        match event:
            case Started():
                yield self._started(event, job)
            case TokenDelta():
                yield answer.feed(event)
            case Finished():
                if rest := answer.flush():
                    yield rest
                yield answer.finished(event)

    def _started(self, event: Started, job: _Turn) -> TurnStarted:
        miss = None if event.miss is None else as_sent(event.miss, job.prompt.origins)
        at = None if miss is None else miss.token_index
        return TurnStarted(
            prompt_tokens=event.prompt_tokens,
            cached_prefix=event.cached_prefix,
            miss=miss,
            ring=event.ring,
            lane=event.lane,
            seed=job.request.sampling.seed,
            excerpt=None if at is None else excerpt(self._tokenizer, job.request.prompt, at),
        )

    @contextmanager
    def _remembering(self, job: _Turn, answer: Answer, open_turn: OpenTurn) -> Iterator[None]:
        """However a turn ends that had its lane, its session's next one goes on from the ids that it has by then."""
        try:
            yield
        finally:
            # A closed session must not come back, and a turn that never began leaves the last one's history.
            if open_turn.started and not open_turn.closed:
                self._remember(job, answer)

    def _remember(self, job: _Turn, answer: Answer) -> None:
        if job.request.session is None:
            return
        ids, text = answer.history()
        history = History(job.prompt.text + text, job.request.prompt + ids)
        self._router.remember(job.request.session, history)
        if answer.is_shown_whole:
            self._foresee(job, answer.message, history)

    def _foresee(self, job: _Turn, said: Message, history: History) -> None:
        """Off the event loop; what cannot be known in time is computed when it is asked for."""
        session, source = job.request.session, job.source
        if session is None or not isinstance(source, ChatPrompt):
            return
        with suppress(QueueFull):
            asking = partial(
                next_wish,
                self._tokenizer,
                session,
                source,
                said,
                history,
                remade=self._router.remakes_rows(session),
                tenant=job.request.tenant,
            )
            self._workers.run(asking).add_done_callback(self._foreseen)

    def _foreseen(self, asked: asyncio.Future[Wish | None]) -> None:
        if asked.cancelled() or asked.exception() is not None:
            return
        wish = asked.result()
        if wish is not None:
            self._router.foresee(wish)


def _stopped(done: Finished, answer: Answer) -> tuple[TurnEvent, ...]:
    """The end at a stop string; the coordinator may have decided on tokens behind it."""
    rest = answer.flush()
    usage = replace(done.usage, generated_tokens=len(answer.token_ids))
    finished = answer.finished(replace(done, usage=usage))
    return (finished,) if rest is None else (rest, finished)
