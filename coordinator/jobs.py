"""One job's state between its admission and its last token.

Decides the next segment of a job, given how far it is, and what its sampled tokens mean. It sends
nothing and knows of no other job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from coordinator.acceptance import Acceptance, accept
from coordinator.constraints import asked_masks, forced_drafts
from coordinator.cuts import next_cut
from coordinator.drafters import Drafter
from coordinator.frames import (
    NO_ROOT,
    JobId,
    LaneId,
    LoadNodes,
    NodeId,
    Op,
    Segment,
    SegmentKind,
    SegmentReply,
    Seq,
)
from coordinator.prefixes import common_prefix
from coordinator.requests import (
    FinishReason,
    Miss,
    Request,
    Timings,
    TokenDelta,
    Usage,
)
from coordinator.speculation import DraftRate, DraftTime, Speculation


class Phase(Enum):
    WAITING = "waiting"  # in the queue
    PREFILL = "prefill"  # chunks to send, or the last one's token still out
    DECODE = "decode"  # the anchor is known, or guessed by frames in flight


@dataclass(slots=True)
class Job:
    """`context` is prompt + generated tokens; rows [0, cursor) have been sent to the ring."""

    id: JobId
    request: Request
    submitted_at: float
    max_rows: int
    drafter: Drafter
    state_rows: int = 0  # as in RingInfo
    root: NodeId = NO_ROOT  # of the chain that its rows would be: the model's and the tenant's
    context: list[int] = field(init=False)
    phase: Phase = Phase.WAITING
    lane: LaneId | None = None
    cached_prefix: int = 0
    restored_rows: int = 0  # of the cached prefix: loaded from chain nodes
    miss: Miss | None = None
    cursor: int = 0
    recall: int | None = (
        None  # the memo slot that the first token is sampled from, nothing being computed
    )
    cuts: tuple[int, ...] = ()
    restore_points: tuple[
        int, ...
    ] = ()  # row counts at which recurrent layers are to leave a checkpoint
    ops: tuple[Op, ...] = ()  # go before the next segment
    opened_seq: Seq | None = (
        None  # replies to earlier frames are of a lane opening that was refused
    )
    guess: list[int] = field(default_factory=list)  # drafts in flight, not confirmed yet
    fresh_seq: Seq = Seq(0)  # frames before it were built on a guess that failed
    in_flight: int = 0
    served: int = -1  # the last frame of this epoch with rows of its prefill
    announced: bool = False
    paused: bool = False  # its reader lags
    disturbed: bool = False  # it was paused, or its ring healed: its times say nothing of others'
    fresh: int | None = None  # tokens to be computed, as far as was known when somebody asked
    refusals: int = 0
    losses: int = 0  # epochs that ended under it since its last token
    admitted_at: float | None = None
    first_token_at: float | None = None
    drafted: int = 0
    draft_steps: int = 0  # segments with drafts in them
    accepted: int = 0
    discarded: int = 0  # frames that a failed guess made void
    drafts_right: DraftRate = field(default_factory=DraftRate)
    draft_time: DraftTime = field(default_factory=DraftTime)

    _shared: dict[JobId, int] = field(default_factory=dict)  # shared_prefix, by the other job
    # Whether its drafter knows the context. Not while it waits: an index is five times as large.
    _drafts: bool = False

    def __post_init__(self) -> None:
        self.context = list(self.request.prompt)

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

    def open(
        self,
        cached_prefix: int,
        ops: tuple[Op, ...],
        cuts: tuple[int, ...],
        recall: int | None = None,
    ) -> None:
        """Starts from `cached_prefix`; tokens generated so far are prefilled like the prompt."""
        if not self._drafts:
            self._drafts = True
            self.drafter.extend(self.context)
        self.phase = Phase.PREFILL
        self.cursor = cached_prefix
        self.recall = recall
        if not self.announced:
            self.cached_prefix = cached_prefix
            loads = [op for op in ops if isinstance(op, LoadNodes)]
            self.restored_rows = sum(op.end - op.start for op in loads)
        self.cuts, self.ops = cuts, ops
        self._forget_flight()

    @property
    def rests(self) -> bool:
        """Whether it gets no rows: its lane keeps those that it has."""
        return self.paused and self.phase is Phase.DECODE

    def requeue(self) -> None:
        self.phase, self.lane, self.ops, self.fresh = Phase.WAITING, None, (), None
        self.disturbed = True
        self.losses += 1
        self._forget_flight()

    def _forget_flight(self) -> None:
        self.opened_seq, self.fresh_seq = None, Seq(0)
        self.guess, self.in_flight, self.served = [], 0, -1

    def shared_prefix(self, other: Job) -> int:
        """How many leading tokens two jobs' prompts share; of two tenants' none."""
        if self.root != other.root:
            return 0
        known = self._shared.get(other.id)
        if known is None:
            known = self._shared[other.id] = common_prefix(
                self.request.prompt, other.request.prompt
            )
        return known

    def expects(self, seq: Seq) -> bool:
        """Whether the reply to frame `seq` counts: the frame belongs to the lane's current opening and
        was not built on a guess that failed.
        """
        return self.opened_seq is not None and max(self.opened_seq, self.fresh_seq) <= seq

    @property
    def true_rows(self) -> int:
        """Rows that hold the context's tokens once all frames in flight have run."""
        return min(self.cursor, len(self.context) - 1)

    @property
    def wants_prefill(self) -> bool:
        unsent = self.cursor < len(self.context) or self.recall is not None
        return self.phase is Phase.PREFILL and unsent

    def prefill_segment(self, row_budget: int | None) -> Segment:
        """The next chunk, cut short to the budget if there is one. The last one's last row seeds decoding.
        Raises ConstraintFailed.
        """
        if self.recall is not None:
            return self._segment(self.cursor, (), SegmentKind.RECALL, True, self._masks(()))
        end = next_cut(self.cuts, self.cursor)
        if row_budget is not None:
            end = min(end, self.cursor + row_budget)
        last = end == len(self.context)
        masks = self._masks(()) if last else ()
        tokens = self.context[self.cursor : end]
        return self._segment(end, tokens, SegmentKind.PREFILL, last, masks)

    def verify_segment(self, plan: Speculation, now: float) -> Segment | None:
        """[anchor] + drafts, or drafts alone behind frames in flight; None when there is nothing to send.

        No draft may outlive the job's limit, stand behind an end of turn or break the job's constraint. Raises
        ConstraintFailed.
        """
        if self.phase is not Phase.DECODE or self.in_flight >= plan.depth:
            return None
        anchor = () if self.in_flight else (self.context[-1],)
        width = min(plan.width, self._last_row - self.cursor)
        if self.state_rows:
            # Recurrent layers must be able to go back to any row that is not confirmed yet.
            width = min(width, self.state_rows - (self.cursor - (len(self.context) - 1)))
        drafts = self._draft(width - len(anchor), now)
        if drafts is None:
            return None
        drafts = _before_stop(drafts, self.request.stop_tokens)
        if not (anchor or drafts):
            return None
        masks = self._masks(drafts)
        tokens = (*anchor, *(drafts[: len(masks) - 1] if masks else drafts))
        if not tokens:
            return None
        end, masks = self.cursor + len(tokens), masks[-len(tokens) :]
        return self._segment(end, tokens, SegmentKind.VERIFY, True, masks)

    def _masks(self, drafts: Sequence[int]) -> tuple[bytes, ...]:
        """What may follow all that is decided or guessed, and then each of `drafts` up to one that may not stand there.
        None without a constraint.
        """
        constraint = self.request.constraint
        if constraint is None:
            return ()
        return asked_masks(constraint, self._said, drafts)

    def _forced(self, limit: int) -> tuple[int, ...]:
        constraint = self.request.constraint
        if constraint is None or not self.request.draft:
            return ()
        return forced_drafts(constraint, self._said, limit)

    @property
    def _said(self) -> list[int]:
        """What was generated, and what is guessed of it."""
        return self.context[self.prompt_tokens :] + self.guess

    def _draft(self, limit: int, now: float) -> tuple[int, ...] | None:
        if limit < 1:
            return ()
        forced = self._forced(limit)
        if forced:
            return forced
        drafts = self.drafter.draft(self.guess, limit)
        if drafts is None:
            self.draft_time.asked(now)
        else:
            self.draft_time.answered(len(drafts), now)
        return drafts

    @property
    def _last_row(self) -> int:
        """The row behind the last one that may be of use: the job's last token needs no row."""
        return len(self.context) + self.remaining - 1

    def _segment(
        self,
        end: int,
        tokens: Sequence[int],
        kind: SegmentKind,
        samples: bool,
        masks: tuple[bytes, ...],
    ) -> Segment:
        assert self.lane is not None
        sampling = self.request.sampling if samples else None
        memo = self.recall if kind is SegmentKind.RECALL else None
        place = (self.lane, self.id, self.cursor)
        return Segment(*place, tuple(tokens), kind, sampling, self.prompt_tokens, memo, masks)

    def sent(self, segment: Segment, seq: Seq) -> None:
        if self.ops:
            self.ops, self.opened_seq = (), seq
        if segment.kind is SegmentKind.VERIFY:
            drafts = segment.tokens if self.in_flight else segment.tokens[1:]
            self.guess.extend(drafts)
            self.drafted += len(drafts)
            self.draft_steps += bool(drafts)
            if not drafts:
                self.drafts_right.rest()
        else:
            self.served, self.recall = seq, None
        self.in_flight += 1
        self.cursor = segment.end

    def answer(self, reply: SegmentReply, next_seq: Seq, now: float) -> TokenDelta | None:
        """Takes the tail's answer to the oldest frame in flight; returns the tokens that it decided.

        `next_seq` is the frame to be sent next: when a guess failed, every frame before it is void.
        """
        self.in_flight -= 1
        if not reply.tokens:
            return None
        if self.first_token_at is None:
            self.first_token_at = now
        self.phase, self.losses = Phase.DECODE, 0
        verdict = accept(self.guess, reply.tokens)
        kept = verdict.tokens[: _until_stop(verdict.tokens, self.request.stop_tokens)]
        self._confirm(verdict, next_seq)
        self.context.extend(kept)
        self.drafter.extend(kept)
        if not self.in_flight:
            # The last decided token is the next anchor: it has no row yet.
            self.cursor = len(self.context) - 1
        return TokenDelta(kept, reply.logprobs[: len(kept)])

    def _confirm(self, verdict: Acceptance, next_seq: Seq) -> None:
        """Takes confirmed drafts off the guess; a wrong one voids the rest, and frames built on it."""
        self.accepted += verdict.accepted
        self.drafts_right.observe(verdict.accepted, int(verdict.failed))
        if not verdict.failed:
            self.guess = self.guess[verdict.accepted :]
            return
        self.guess = []
        if self.in_flight:
            self.discarded += self.in_flight
            self.fresh_seq, self.in_flight = next_seq, 0

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
