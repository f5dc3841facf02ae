"""One turn from text to text: what every front calls, whatever wire its client speaks.

Has turns prepared, turns ids into text, ends a turn at a stop string and remembers a session's ids for its next turn.
It decides nothing about lanes or reuse, and no protobuf or HTTP enters.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from coordinator.clock import Clock
from coordinator.errors import QueueFull, RingserveError, RingUnavailable
from coordinator.foresight import Wish
from coordinator.frames import NodeId
from coordinator.lanes import LaneStatus
from coordinator.requests import (
    Finished,
    JobEvent,
    Recovering,
    SessionId,
    Started,
    TokenDelta,
)
from coordinator.ring import RingInfo
from coordinator.router import RingNode, Router
from coordinator.sessions import History
from coordinator.status import RingStatus
from gateway.answer import Answer
from gateway.chat.messages import Message
from gateway.chat.tokenizer import ChatTokenizer
from gateway.forms import answer_parser
from gateway.intake import Intake
from gateway.next_turn import next_wish
from gateway.observing.observers import TurnObserver, watching
from gateway.open_turns import OpenTurn, OpenTurns
from gateway.preparing import Preparation, PreparedTurn
from gateway.safety.metering import metered
from gateway.safety.quotas import Quotas
from gateway.turns import (
    ChatPrompt,
    Prompt,
    TurnEvent,
    TurnRecovering,
    TurnRequest,
    TurnStarted,
)
from gateway.why_not import as_sent, excerpt
from gateway.workers import Workers

# Converted in less than a millisecond or so.
_SMALL_BYTES = 64 * 1024

T = TypeVar("T")


def _left() -> None:
    """Who closes a turn early has left."""


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
        intake: Intake | None = None,
    ) -> None:
        self.name = name
        self.intake = intake or Intake(clock)
        self._router = router
        self._tokenizer = tokenizer
        self._clock = clock
        self._rng = rng
        self._observers = tuple(observers)
        self._quotas = quotas
        self._workers = Workers()
        self._prepare = Preparation(name, router, tokenizer, self._workers, clock, rng)
        self._turns = OpenTurns()
        self.draining = False  # it takes no more turns

    def warm(self) -> None:
        """To be called while the rings load: begins what would hold up the first who asks."""
        self._prepare.warm()

    def info(self) -> RingInfo:
        """Raises RingUnavailable while no ring has started."""
        return self._router.info()

    def rings(self) -> tuple[RingStatus, ...]:
        return self._router.rings()

    @property
    def back_s(self) -> float:
        """Until a ring may take turns again, where none takes any."""
        return self._router.back_s

    def lanes(self, ring: str, most: int) -> tuple[LaneStatus, ...]:
        """A ring's lanes; where there are more than `most`, those used last."""
        return self._router.lanes(ring, most)

    @property
    def open_turns(self) -> int:
        """Turns that are being read, wait or run."""
        return len(self._turns)

    async def idle(self) -> None:
        """Returns when there is no open turn."""
        await self._turns.idle()

    async def drain(self, within_s: float) -> float:
        """From now on it takes no more turns. Returns once there is none, and what is left of the time; turns that
        take longer, or are there when it is cancelled, are ended.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + within_s
        self.draining = True
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self.idle()
        finally:
            self.end_turns()
        return max(0.0, until - clock())

    def check_open(self) -> None:
        """Raises RingUnavailable once it drains."""
        if self.draining:
            raise RingUnavailable("the server is draining")

    def end_turns(self) -> None:
        """At once, and for good: who reads them is told that the server has ended."""
        self.draining = True
        self._turns.end()

    @property
    def most_turns(self) -> int | None:
        """That one caller may have at once; None: as many as there is room for."""
        return None if self._quotas is None else self._quotas.most_jobs

    @property
    def room(self) -> int:
        """Turns that all rings together can ever have at once, running and waiting."""
        return sum(ring.most_jobs for ring in self._router.rings())

    def close_session(self, session: SessionId) -> bool:
        """Cancels the session's turns and forgets it; False when it is unknown."""
        had_turns = self._turns.close(session)
        return self._router.close_session(session) or had_turns

    async def count_tokens(self, prompt: Prompt, model: str = "") -> int:
        """How many tokens `generate` would find in the prompt. Raises RequestError and BusyError."""
        with self._shedding():
            return await self._prepare.count(prompt, model)

    async def tokenize(self, prompt: Prompt, model: str = "") -> tuple[int, ...]:
        """The ids that `generate` would find in the prompt. Raises RequestError and BusyError."""
        with self._shedding():
            return await self._prepare.ids(prompt, model)

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        """Raises RequestError and BusyError."""
        self._prepare.check_ids("tokens", ids)
        with self._shedding():
            return await self._workers.run(partial(self._tokenizer.decode, ids, skip_special=False))

    def token_text(self, token: int) -> str:
        """One token's own text; what is half of a character is shown as a replacement character."""
        return self._tokenizer.decode((token,), skip_special=False)

    def nodes(self, ring: str | None = None) -> Iterator[RingNode]:
        """What the rings, or the one of that name, keep in host memory. In no order."""
        return self._router.nodes(ring)

    def drop_node(self, node: NodeId) -> bool:
        """Drops it, and what goes on from it, on every ring; False when none has it."""
        return self._router.drop_node(node)

    async def pin_prefix(self, prompt: Prompt, model: str = "", tenant: str = "") -> PinnedPrefix:
        """Keeps the rows of what prompts begin with until they are dropped. Raises RequestError and BusyError."""
        with self._shedding():
            ids = await self._prepare.prefix(prompt, model)
        return PinnedPrefix(len(ids), self._router.pin(ids, tenant))

    async def converted(self, nbytes: int, work: Callable[[], T]) -> T:
        """Converts a request of so many bytes: beside the event loop, where prompts are read as well, when it is big,
        since 16 MB of small messages take a while. Raises QueueFull.
        """
        with self._shedding():
            return work() if nbytes <= _SMALL_BYTES else await self._workers.run(work)

    @contextmanager
    def _shedding(self) -> Iterator[None]:
        """Around what is turned away without being a turn, of which nobody else would tell."""
        try:
            yield
        except QueueFull as full:
            self.intake.told(full.reason)
            raise

    async def generate(
        self, turn: TurnRequest, gone: Callable[[], RingserveError | None] = _left
    ) -> AsyncGenerator[TurnEvent, None]:
        """The turn's events: started, deltas, finished, and recovering wherever its ring heals. Raises RequestError,
        BusyError and JobError.

        Close the generator to cancel the turn (contextlib.aclosing): what was generated until then is remembered.
        `gone`: why it is closed, where it is not that the client left.
        """
        now = self._clock.now
        with (
            self._turns.opened(turn.session) as open_turn,
            watching(
                self._observers, turn, now, lambda error: gone() or open_turn.why(error)
            ) as watch,
            metered(self._quotas, turn) as meter,
        ):
            self.check_open()
            async with aclosing(self._generated(turn, open_turn)) as events:
                async for event in events:
                    meter.told(event)
                    watch.told(event, now())
                    yield event

    async def _generated(
        self, turn: TurnRequest, open_turn: OpenTurn
    ) -> AsyncGenerator[TurnEvent, None]:
        last: tuple[TurnEvent, ...] = ()
        job = await self._prepare.turn(turn, open_turn)
        parser = answer_parser(self._tokenizer.answers, turn, job.prompt, self._rng)
        answer = Answer(self._tokenizer, turn.stop, job.request.stop_tokens, parser)
        async with self._router.submit(job.request) as stream:
            open_turn.stream = stream
            with self._remembering(job, answer, open_turn):
                async for event in stream:
                    # It may have to wait again before it has begun.
                    open_turn.started |= not isinstance(event, Recovering)
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

    def _told(self, event: JobEvent, answer: Answer, job: PreparedTurn) -> Iterator[TurnEvent]:
        match event:
            case Started():
                yield self._started(event, job)
            case TokenDelta():
                yield answer.feed(event)
            case Recovering(reason):
                yield TurnRecovering(reason)
            case Finished():
                if rest := answer.flush():
                    yield rest
                yield answer.finished(event)

    def _started(self, event: Started, job: PreparedTurn) -> TurnStarted:
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
    def _remembering(
        self, job: PreparedTurn, answer: Answer, open_turn: OpenTurn
    ) -> Iterator[None]:
        """However a turn ends that had its lane, its session's next one goes on from the ids that it has by then."""
        try:
            yield
        finally:
            # A closed session must not come back, and a turn that never began leaves the last one's history.
            if open_turn.started and not open_turn.closed:
                self._remember(job, answer)

    def _remember(self, job: PreparedTurn, answer: Answer) -> None:
        if job.request.session is None:
            return
        ids, text = answer.history()
        history = History(job.prompt.text + text, job.request.prompt + ids)
        self._router.remember(job.request.session, history)
        if answer.is_shown_whole:
            self._foresee(job, answer.message, history)

    def _foresee(self, job: PreparedTurn, said: Message, history: History) -> None:
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
