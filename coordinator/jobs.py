"""One job's state between its admission and its last token.

Decides the next segment of a job, given how far it is, and what its sampled tokens mean. It sends
nothing and knows of no other job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from coordinator.acceptance import accept
from coordinator.cuts import next_cut
from coordinator.drafters import Drafter
from coordinator.drafters.ngram import NgramDrafter
from coordinator.drafters.none import NoDrafter
from coordinator.frames import JobId, LaneId, Op, Segment, SegmentKind, SegmentReply, Seq
from coordinator.requests import (
    FinishReason,
    Miss,
    Request,
    RowLogprobs,
    Timings,
    TokenDelta,
    Usage,
)


class Phase(Enum):
    WAITING = "waiting"  # in the queue
    PREFILL = "prefill"  # chunks to send, or the last one's token still out
    DECODE = "decode"  # the anchor is known; at most one verify frame is in flight


@dataclass(slots=True)
class Job:
    """`context` is prompt + generated tokens; rows [0, cursor) have been sent to the ring."""

    id: JobId
    request: Request
    submitted_at: float
    max_rows: int
    context: list[int] = field(init=False)
    drafter: Drafter = field(init=False)
    phase: Phase = Phase.WAITING
    lane: LaneId | None = None
    cached_prefix: int = 0
    miss: Miss | None = None
    cursor: int = 0
    cuts: tuple[int, ...] = ()
    ops: tuple[Op, ...] = ()  # go before the next segment
    opened_seq: Seq | None = (
        None  # replies to earlier frames are of a lane opening that was refused
    )
    in_flight: int = 0
    announced: bool = False
    refusals: int = 0
    admitted_at: float | None = None
    first_token_at: float | None = None
    drafted: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        self.context = list(self.request.prompt)
        self.drafter = NgramDrafter() if self.request.draft else NoDrafter()
        self.drafter.extend(self.context)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        return len(self.context) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated, by the limit asked for and by the lane's rows."""
        wanted = self.request.max_new_tokens - self.generated
        return min(wanted, self.max_rows - len(self.context))

    def open(self, cached_prefix: int, ops: tuple[Op, ...], cuts: tuple[int, ...]) -> None:
        """Starts from `cached_prefix`; tokens generated so far are prefilled like the prompt."""
        self.phase = Phase.PREFILL
        self.cursor = cached_prefix
        if not self.announced:
            self.cached_prefix = cached_prefix
        self.cuts, self.ops = cuts, ops
        self.opened_seq, self.in_flight = None, 0

    def requeue(self) -> None:
        self.phase, self.lane, self.ops = Phase.WAITING, None, ()
        self.opened_seq, self.in_flight = None, 0

    def expects(self, seq: Seq) -> bool:
        """Whether frame `seq` belongs to the lane's current opening; replies to earlier ones are
        stale.
        """
        return self.opened_seq is not None and self.opened_seq <= seq

    @property
    def true_rows(self) -> int:
        """Rows that hold the context's tokens once all frames in flight have run."""
        return min(self.cursor, len(self.context) - 1)

    @property
    def wants_prefill(self) -> bool:
        return self.phase is Phase.PREFILL and self.cursor < len(self.context)

    @property
    def wants_verify(self) -> bool:
        return self.phase is Phase.DECODE and self.in_flight == 0

    def prefill_segment(self, row_budget: int) -> Segment:
        """The next chunk, cut short where the frame has less room. Its last row seeds decoding."""
        end = min(next_cut(self.cuts, self.cursor), self.cursor + row_budget)
        last = end == len(self.context)
        return self._segment(end, self.context[self.cursor : end], SegmentKind.PREFILL, last)

    def verify_segment(self, max_drafts: int) -> Segment:
        """[anchor] + drafts. No draft may outlive the job's limit, and none stands behind an end of
        turn.
        """
        drafts = self.drafter.draft(min(max_drafts, self.remaining - 1))
        drafts = _before_stop(drafts, self.request.stop_tokens)
        tokens = (self.context[-1], *drafts)
        return self._segment(self.cursor + len(tokens), tokens, SegmentKind.VERIFY, True)

    def _segment(
        self, end: int, tokens: Sequence[int], kind: SegmentKind, samples: bool
    ) -> Segment:
        assert self.lane is not None
        sampling = self.request.sampling if samples else None
        return Segment(
            self.lane, self.id, self.cursor, tuple(tokens), kind, sampling, self.prompt_tokens
        )

    def sent(self, segment: Segment, seq: Seq) -> None:
        if self.ops:
            self.ops, self.opened_seq = (), seq
        self.in_flight += 1
        if segment.kind is SegmentKind.PREFILL:
            self.cursor = segment.end

    def answer(self, segment: Segment, reply: SegmentReply, now: float) -> TokenDelta | None:
        """Takes the tail's answer to a segment; returns the tokens that it decided, if any."""
        self.in_flight -= 1
        if not reply.tokens:
            return None
        drafts = segment.tokens[1:] if segment.kind is SegmentKind.VERIFY else ()
        decided = accept(drafts, reply.tokens)
        self.drafted += len(drafts)
        self.accepted += decided.accepted
        return self._decide(decided.tokens, reply.logprobs, now)

    def _decide(
        self, tokens: tuple[int, ...], logprobs: tuple[RowLogprobs, ...], now: float
    ) -> TokenDelta:
        kept = tokens[: _until_stop(tokens, self.request.stop_tokens)]
        if self.first_token_at is None:
            self.first_token_at = now
        self.phase = Phase.DECODE
        # The last decided token is the next anchor: it has no row yet.
        self.cursor = len(self.context) + len(kept) - 1
        self.context.extend(kept)
        self.drafter.extend(kept)
        return TokenDelta(kept, logprobs[: len(kept)])

    @property
    def finish_reason(self) -> FinishReason | None:
        if self.generated and self.context[-1] in self.request.stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.remaining <= 0 else None

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.cached_prefix, self.generated)

    def timings(self, now: float) -> Timings:
        admitted = self.admitted_at if self.admitted_at is not None else now
        first = self.first_token_at if self.first_token_at is not None else now
        return Timings(
            queue_s=admitted - self.submitted_at,
            prefill_s=first - admitted,
            decode_s=now - first,
            drafted=self.drafted,
            accepted=self.accepted,
        )


def _before_stop(tokens: tuple[int, ...], stops: frozenset[int]) -> tuple[int, ...]:
    for place, token in enumerate(tokens):
        if token in stops:
            return tokens[:place]
    return tokens


def _until_stop(tokens: tuple[int, ...], stops: frozenset[int]) -> int:
    return min(len(_before_stop(tokens, stops)) + 1, len(tokens))
