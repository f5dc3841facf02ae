"""A turn on its way in: its prompt becomes ids, its grammar is compiled, its values are checked.

It decides what a request means, and nothing about lanes or reuse. What takes long runs beside the event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from coordinator.clock import Clock
from coordinator.errors import DeadlineExceeded, InvalidValue, ModelNotFound
from coordinator.held import HeldLane
from coordinator.requests import UNLIMITED, Request, SamplingSpec
from coordinator.router import Router
from coordinator.sessions import History, gone_on, splice
from gateway.chat.grammar import Grammars
from gateway.chat.seams import as_far_as
from gateway.chat.tokenizer import ChatTokenizer, RenderedPrompt
from gateway.forms import answer_grammar
from gateway.inherited import Inherited
from gateway.limits import check_prompt, check_size, check_turn
from gateway.open_turns import OpenTurn
from gateway.turns import ChatPrompt, Prompt, TextPrompt, TokenPrompt, TurnRequest
from gateway.workers import Workers

# Seeds that we draw survive a client that reads JSON numbers as doubles.
_DRAWN_SEED_BITS = 53


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """A turn whose prompt is ids by now."""

    source: Prompt
    prompt: RenderedPrompt
    request: Request


class Preparation:
    """For one served model. Its methods raise RequestError and BusyError."""

    def __init__(
        self,
        name: str,
        router: Router,
        tokenizer: ChatTokenizer,
        workers: Workers,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._name = name
        self._router = router
        self._tokenizer = tokenizer
        self._workers = workers
        self._clock = clock
        self._rng = rng
        self._inherited = Inherited(router, tokenizer)
        self._grammars = Grammars(tokenizer)

    def warm(self) -> None:
        """What would hold up the first who asks. Beside the event loop."""
        self._workers.run(self._grammars.warm)

    # Prompts by themselves

    async def count(self, prompt: Prompt, model: str) -> int:
        """How many tokens a turn would find in the prompt."""
        self._check(prompt, model)
        return await self._workers.run(partial(self._counted, prompt))

    async def ids(self, prompt: Prompt, model: str) -> tuple[int, ...]:
        """The ids that a turn would find in the prompt."""
        self._check(prompt, model)
        read = await self._workers.run(partial(self._reading, prompt, None))
        return read.token_ids

    async def prefix(self, prompt: Prompt, model: str) -> tuple[int, ...]:
        """The ids of what prompts begin with that begin so."""
        self._check_model(model)
        check_size(prompt, self._router.info().max_rows)
        ids = await self._workers.run(partial(self._prefixed, prompt))
        if not ids:
            raise InvalidValue("prompt", "has no tokens that all such prompts begin with")
        return ids

    def check_ids(self, field: str, ids: Iterable[int]) -> None:
        vocab_size = self._router.info().vocab_size
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidValue(field, f"{token} is no token id; they are 0 to {vocab_size - 1}")

    def _check(self, prompt: Prompt, model: str) -> None:
        self._check_model(model)
        check_prompt(prompt, self._router.info().max_rows)

    def _check_model(self, model: str) -> None:
        if model not in ("", self._name):
            raise ModelNotFound(model=model, served=self._name)

    def _counted(self, prompt: Prompt) -> int:
        match prompt:
            case ChatPrompt(messages, tools, args, begun):
                only = self._tokenizer.render(
                    messages, tools, args, with_boundaries=False, begun=begun
                )
                return len(only.token_ids)
            case TextPrompt(text):
                return len(self._tokenizer.encode_prompt(text))
            case TokenPrompt(ids):
                self.check_ids("token_ids", ids)
                return len(ids)

    def _prefixed(self, prompt: Prompt) -> tuple[int, ...]:
        match prompt:
            case ChatPrompt((), ()):
                raise InvalidValue("messages", "is empty")
            case ChatPrompt(messages, tools, args):
                return self._tokenizer.prefix(messages, tools, args)
            case TextPrompt(text):
                return self._tokenizer.encode_prompt(text)
            case TokenPrompt(ids):
                self.check_ids("token_ids", ids)
                return ids

    # Turns

    async def turn(self, turn: TurnRequest, open_turn: OpenTurn) -> PreparedTurn:
        try:
            async with asyncio.timeout(turn.timeout_s):
                return await self._prepare(turn, open_turn)
        except TimeoutError:
            raise DeadlineExceeded from None

    async def _prepare(self, turn: TurnRequest, open_turn: OpenTurn) -> PreparedTurn:
        submitted_s = self._clock.now()
        self._check_model(turn.model)
        check_turn(turn)
        history = self._router.history(turn.session) if turn.session else None
        is_new = bool(turn.session) and history is None
        lanes = self._inherited.lanes(turn.tenant) if is_new else ()
        prompt = await self._read(turn.prompt, history, lanes, open_turn)
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
        return PreparedTurn(turn.prompt, prompt, request)

    async def _read(
        self,
        prompt: Prompt,
        history: History | None,
        lanes: tuple[HeldLane, ...],
        open_turn: OpenTurn,
    ) -> RenderedPrompt:
        """The prompt's ids. Off the event loop: a long conversation takes tens of milliseconds."""
        check_prompt(prompt, self._router.info().max_rows)
        if isinstance(prompt, TokenPrompt):
            self.check_ids("token_ids", prompt.token_ids)
        reading = partial(self._reading, prompt, history, lanes)
        return await open_turn.read(self._workers.run(reading))

    def _reading(
        self, prompt: Prompt, history: History | None, lanes: tuple[HeldLane, ...] = ()
    ) -> RenderedPrompt:
        history = history or self._inherited.history(lanes)
        match prompt:
            case ChatPrompt(messages, tools, args, begun):
                return self._tokenizer.render(messages, tools, args, history, begun=begun)
            case TextPrompt(text):
                return RenderedPrompt(text, self._encode(text, history))
            case TokenPrompt(ids):
                return RenderedPrompt(self._tokenizer.decode(ids, skip_special=False), ids)

    def _encode(self, text: str, history: History | None) -> tuple[int, ...]:
        history = as_far_as(history, text)
        cold = self._tokenizer.encode_prompt(text)
        begun = gone_on(history, text)
        if begun is None:
            return cold
        warm = splice(history, text, self._tokenizer.encode, self._tokenizer.is_special)
        # Without a clean seam splice() encodes anew, and knows nothing of what encode_prompt puts in front.
        return warm if warm[: len(begun.token_ids)] == begun.token_ids else cold

    def _sampling(self, turn: TurnRequest) -> SamplingSpec:
        self.check_ids("logit_bias", (token for token, _ in turn.sampling.logit_bias))
        seed = turn.given_seed
        if seed is None:
            seed = self._rng.getrandbits(_DRAWN_SEED_BITS) if turn.sampling.temperature else 0
        return replace(turn.sampling, seed=seed)

    def _stop_tokens(self, turn: TurnRequest) -> frozenset[int]:
        self.check_ids("stop_token_ids", turn.stop_token_ids)
        own = frozenset() if turn.ignore_eos else self._tokenizer.stop_token_ids
        return own | frozenset(turn.stop_token_ids)
