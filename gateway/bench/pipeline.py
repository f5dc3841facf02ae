"""`ringserve bench pipeline`: what a second stage, more lanes and drafts are worth, as ratios within one run.

Two rings are up, one of one stage and one of two; only one of them works at a time, in turns, so that a noisy
neighbour meets both. Every answer is compared with every other answer to the same prompt.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.bench.endpoints import Answered, Arrival, Ask, GrpcEndpoint
from gateway.bench.figures import p95
from gateway.bench.plots import Phase

Tell = Callable[[str], None]
Prompt = tuple[int, ...]

# Gaps of a running stream before a long prompt comes: enough for a median.
_UNDISTURBED = 48
# A stream that is to outlast a long prefill.
_ENDLESS = 1 << 20


@dataclass(frozen=True, slots=True)
class PipelinePrompts:
    """Token ids of the served model."""

    lanes: tuple[Prompt, ...]  # one a lane
    long: Prompt
    quoting: Prompt
    fixed: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class PipelineSizes:
    decode_tokens: int = 96
    quote_tokens: int = 160
    fixed_tokens: int = 48
    repeats: int = 3
    # A prompt whose ratio lies below this is measured this many times as often before it is believed.
    doubtful: float = 0.98
    insist: int = 3


@dataclass(slots=True)
class Book:
    """The first answer to each prompt, and how many tokens of later ones differ from it."""

    wrong_tokens: int = 0
    _first: dict[Prompt, tuple[int, ...]] = field(default_factory=dict)

    def check(self, prompt: Prompt, tokens: tuple[int, ...]) -> None:
        first = self._first.get(prompt, ())
        self.wrong_tokens += sum(a != b for a, b in zip(first, tokens, strict=False))
        if len(tokens) > len(first):
            self._first[prompt] = tokens


@dataclass(frozen=True, slots=True)
class Decoding:
    """Tokens per second, and the spans in which all lanes of the ring decoded."""

    one_tps: float
    ring_tps: float
    spans: tuple[Phase, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Medians of the same thing done in two ways."""

    plain: float
    other: float

    @property
    def ratio(self) -> float:
        return self.other / self.plain


@dataclass(frozen=True, slots=True)
class Stretch:
    """Milliseconds between the tokens of a stream: alone, and while a long prompt was prefilled beside it."""

    alone_p50_ms: float
    beside_p95_ms: float

    @property
    def ratio(self) -> float:
        return self.beside_p95_ms / self.alone_p50_ms


class Pipeline:
    """`one` has one stage, `ring` two and a lane for each of `prompts.lanes`."""

    def __init__(
        self, one: GrpcEndpoint, ring: GrpcEndpoint, prompts: PipelinePrompts, sizes: PipelineSizes
    ) -> None:
        self._one = one
        self._ring = ring
        self._prompts = prompts
        self._sizes = sizes
        self.book = Book()

    async def warm_up(self) -> None:
        """Neither ring's first call is measured."""
        for endpoint in (self._one, self._ring):
            await endpoint.play(self._plain(self._prompts.long[:128], 4, reuse=False))

    async def decoding(self) -> Decoding:
        """One lane of one stage, then all lanes of the ring, in turns."""
        n_tokens, prompts = self._sizes.decode_tokens, self._prompts.lanes
        ones: list[float] = []
        rings: list[float] = []
        spans: list[Phase] = []
        for repeat in range(self._sizes.repeats):
            alone = await self._play(
                self._one, self._plain(prompts[repeat % len(prompts)], n_tokens)
            )
            ones.append(alone.decode_tps or 0.0)
            asks = [self._plain(prompt, n_tokens) for prompt in prompts]
            answers = await asyncio.gather(*(self._play(self._ring, ask) for ask in asks))
            span = Phase("decode", max(a.first_s for a in answers), min(a.last_s for a in answers))
            rings.append(_tokens_within(answers, span) / (span.end_s - span.begin_s))
            spans.append(span)
        return Decoding(statistics.median(ones), statistics.median(rings), tuple(spans))

    async def prefilling(self) -> Pair:
        """Seconds to the first token of a long prompt, on one stage and on the ring: the less the better."""
        ask = self._plain(self._prompts.long, 1, reuse=False)
        ones, rings = [], []
        for _ in range(max(2, self._sizes.repeats - 1)):
            ones.append((await self._play(self._one, ask)).ttft_ms / 1e3)
            rings.append((await self._play(self._ring, ask)).ttft_ms / 1e3)
        return Pair(statistics.median(ones), statistics.median(rings))

    async def quoting(self) -> Pair:
        """Tokens per second of a quoting stream, without and with drafts."""
        speeds = _Speeds()
        await self._compare(
            self._prompts.quoting, self._sizes.quote_tokens, self._sizes.repeats, speeds
        )
        return speeds.pair

    async def fixed(self, tell: Tell) -> list[Pair]:
        """The same for each fixed prompt; one that looks slow is measured more often, and all its times count."""
        pairs = []
        for number, prompt in enumerate(self._prompts.fixed):
            speeds = _Speeds()
            await self._compare(prompt, self._sizes.fixed_tokens, self._sizes.repeats, speeds)
            if speeds.pair.ratio < self._sizes.doubtful:
                more = self._sizes.repeats * (self._sizes.insist - 1)
                await self._compare(prompt, self._sizes.fixed_tokens, more, speeds)
            pairs.append(speeds.pair)
            tell(f"  prompt {number + 1}: {speeds.pair.ratio:.3f}")
        return pairs

    async def _compare(self, prompt: Prompt, n_tokens: int, repeats: int, speeds: _Speeds) -> None:
        plain = self._plain(prompt, n_tokens)
        drafted = Ask(n_tokens, prompt=prompt, ignore_eos=True)
        for repeat in range(repeats):
            # Who goes first changes, so that a drift of the machine favours neither.
            for ask in (plain, drafted) if repeat % 2 else (drafted, plain):
                speeds.note(ask.draft, await self._play(self._ring, ask))

    async def stretch(self) -> Stretch:
        """A stream without drafts, and a long cold prompt that comes while it runs."""
        prompt = self._prompts.lanes[0]
        live: list[Arrival] = []
        enough = asyncio.Event()

        def note(arrival: Arrival) -> None:
            live.append(arrival)
            if len(live) > _UNDISTURBED:
                enough.set()

        endless = Ask(_ENDLESS, prompt=prompt, draft=False, ignore_eos=True)
        stream = asyncio.create_task(self._ring.play(endless, note))
        stream.add_done_callback(lambda _: enough.set())
        try:
            await enough.wait()
            alone = _gaps_ms(live)
            long = await self._play(self._ring, self._plain(self._prompts.long, 1, reuse=False))
        finally:
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
        self.book.check(prompt, tuple(token for arrival in live for token in arrival.tokens))
        beside = _gaps_ms([each for each in live if long.sent_s <= each.at_s <= long.first_s])
        return Stretch(statistics.median(alone), p95(beside) or 0.0)

    def _plain(self, prompt: Prompt, n_tokens: int, *, reuse: bool = True) -> Ask:
        return Ask(n_tokens, prompt=prompt, reuse=reuse, draft=False, ignore_eos=True)

    async def _play(self, endpoint: GrpcEndpoint, ask: Ask) -> Answered:
        answer = await endpoint.play(ask)
        self.book.check(answer.prompt, answer.tokens)
        return answer


class _Speeds:
    """Tokens per second without and with drafts."""

    def __init__(self) -> None:
        self._without: list[float] = []
        self._with: list[float] = []

    def note(self, drafted: bool, answer: Answered) -> None:
        (self._with if drafted else self._without).append(answer.decode_tps or 0.0)

    @property
    def pair(self) -> Pair:
        return Pair(statistics.median(self._without), statistics.median(self._with))


def _tokens_within(answers: Sequence[Answered], span: Phase) -> int:
    return sum(
        len(arrival.tokens)
        for answer in answers
        for arrival in answer.arrivals
        if span.begin_s < arrival.at_s <= span.end_s
    )


def _gaps_ms(arrivals: Sequence[Arrival]) -> list[float]:
    """A gap before several tokens counts once: its reader waited that long."""
    pairs = zip(arrivals, arrivals[1:], strict=False)
    return [(after.at_s - before.at_s) * 1e3 for before, after in pairs]
