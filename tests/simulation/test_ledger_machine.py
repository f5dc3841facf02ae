"""The ledger against a naive model: lists in a dict, compared after every step.

The model is told what happened in plain words; it knows no frames, digests, guards or arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.applied import Applied, Standing
from coordinator.frames import (
    CopyRows,
    Epoch,
    Frame,
    JobId,
    LaneId,
    OpenLane,
    Refusal,
    RefusalCode,
    Segment,
    SegmentKind,
    Seq,
)
from coordinator.ledger import Ledger
from coordinator.prefixes import digest_of
from coordinator.requests import GREEDY

LANES, MAX_ROWS = 3, 8

lanes = st.integers(0, LANES - 1)
tokens = st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple)
fractions = st.integers(0, MAX_ROWS + 2)


@dataclass
class NaiveLane:
    rows: list[int] = field(default_factory=list)
    job: int | None = None
    blocked: bool = False


class LedgerMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.ledger = Ledger(LANES, MAX_ROWS, stage=1)
        self.model = {lane: NaiveLane() for lane in range(LANES)}
        self.epoch, self.seq, self.jobs = 0, 0, 0
        self.last: Frame | None = None

    def feed(self, ops: tuple = (), segments: tuple = (), before: tuple = ()) -> Applied:
        self.last = Frame(Epoch(self.epoch), Seq(self.seq), ops, segments)
        applied = self.ledger.apply(self.last, before)
        assert applied.standing is Standing.NEW
        self.seq += 1
        return applied

    def expect(self, applied: Applied, lane: int, code: RefusalCode | None) -> None:
        """The lane was refused for this reason, and the model blocks it too; None: it was served."""
        found = [refusal.code for refusal in applied.refusals if refusal.lane == lane]
        assert found == ([] if code is None else [code])
        if code is not None:
            self.model[lane].blocked = True

    def opening(self, lane: int, prefix: list[int]) -> OpenLane:
        self.jobs += 1
        return OpenLane(LaneId(lane), JobId(self.jobs), len(prefix), digest_of(prefix))

    def segment(self, lane: int, start: int, ids: tuple[int, ...], job: int) -> Segment:
        return Segment(LaneId(lane), JobId(job), start, ids, SegmentKind.VERIFY, GREEDY)

    # A turn begins

    @rule(lane=lanes, keep=fractions)
    def open_with_a_true_claim(self, lane: int, keep: int) -> None:
        """Also a rewind, and also a cancelled job's successor: nothing else is done about either."""
        naive = self.model[lane]
        prefix = naive.rows[:keep]
        self.expect(self.feed((self.opening(lane, prefix),)), lane, None)
        self.model[lane] = NaiveLane(prefix, self.jobs)

    @rule(lane=lanes, more=tokens)
    def open_past_the_frontier(self, lane: int, more: tuple[int, ...]) -> None:
        opening = self.opening(lane, self.model[lane].rows + list(more))
        self.expect(self.feed((opening,)), lane, RefusalCode.KV_GAP)

    @precondition(lambda self: any(naive.rows for naive in self.model.values()))
    @rule(data=st.data())
    def open_with_a_false_claim(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from([n for n in self.model if self.model[n].rows]))
        claim = list(self.model[lane].rows)
        claim[data.draw(st.integers(0, len(claim) - 1))] += 1
        self.expect(self.feed((self.opening(lane, claim),)), lane, RefusalCode.KV_CONTENT)

    @rule(source=lanes, step=st.integers(1, LANES - 1), rows=st.integers(1, MAX_ROWS + 1))
    def copy_and_open(self, source: int, step: int, rows: int) -> None:
        target = (source + step) % LANES
        have = self.model[source].rows
        copy = CopyRows(LaneId(source), LaneId(target), rows)
        if rows > len(have):
            self.expect(self.feed((copy,)), target, RefusalCode.KV_GAP)
            self.model[target] = NaiveLane(blocked=True)
            return
        applied = self.feed((copy, self.opening(target, have[:rows])))
        assert applied.moves == (copy,)
        self.expect(applied, target, None)
        self.model[target] = NaiveLane(have[:rows], self.jobs)

    # A turn goes on

    def running(self) -> list[int]:
        return [n for n in self.model if self.model[n].job and not self.model[n].blocked]

    @rule(lane=lanes, keep=fractions, ids=tokens)
    def open_and_prefill(self, lane: int, keep: int, ids: tuple[int, ...]) -> None:
        prefix = self.model[lane].rows[:keep]
        opening = self.opening(lane, prefix)
        self.model[lane] = NaiveLane(prefix, self.jobs)
        self.write(lane, len(prefix), ids, (opening,))

    @precondition(lambda self: self.running())
    @rule(data=st.data(), ids=tokens)
    def all_drafts_were_accepted(self, data: st.DataObject, ids: tuple[int, ...]) -> None:
        lane = data.draw(st.sampled_from(self.running()))
        self.write(lane, len(self.model[lane].rows), ids)

    @rule(lane=lanes, keep=fractions, ids=tokens, rejected=tokens, wrong=st.integers(1, 5))
    def drafts_were_rejected(
        self, lane: int, keep: int, ids: tuple[int, ...], rejected: tuple[int, ...], wrong: int
    ) -> None:
        """A turn with one verify frame; the next one starts at its first wrong row."""
        self.open_and_prefill(lane, keep, ids)
        if lane in self.running():
            self.write(lane, len(self.model[lane].rows), rejected)
        if lane in self.running():
            self.write(lane, max(0, len(self.model[lane].rows) - wrong), ids[:1])

    def write(self, lane: int, start: int, ids: tuple[int, ...], ops: tuple = ()) -> None:
        naive = self.model[lane]
        segment = self.segment(lane, start, ids, naive.job)
        applied = self.feed(ops, (segment,))
        if start + len(ids) > MAX_ROWS:
            self.expect(applied, lane, RefusalCode.ROW_LIMIT)
            return
        self.expect(applied, lane, None)
        assert applied.segments == (segment,)
        naive.rows = naive.rows[:start] + list(ids)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), gap=st.integers(1, 3), ids=tokens)
    def write_past_the_frontier(self, data: st.DataObject, gap: int, ids: tuple[int, ...]) -> None:
        lane = data.draw(st.sampled_from(self.running()))
        naive = self.model[lane]
        segment = self.segment(lane, len(naive.rows) + gap, ids, naive.job)
        self.expect(self.feed((), (segment,)), lane, RefusalCode.KV_GAP)

    @rule(lane=lanes, ids=tokens, of_this_job=st.booleans())
    def write_to_a_lane_that_refuses(
        self, lane: int, ids: tuple[int, ...], of_this_job: bool
    ) -> None:
        """It is blocked, or the segment is of a job that is over."""
        naive = self.model[lane]
        if of_this_job and not naive.blocked:
            return
        job = naive.job if of_this_job and naive.job else 10_000_000
        applied = self.feed((), (self.segment(lane, 0, ids, job),))
        assert applied.segments == ()
        (refusal,) = applied.refusals
        assert refusal.lane == lane
        if not naive.blocked:
            self.expect(applied, lane, RefusalCode.BAD_FRAME)

    @rule(lane=lanes, ids=tokens)
    def an_earlier_stage_refuses(self, lane: int, ids: tuple[int, ...]) -> None:
        before = (Refusal(RefusalCode.NO_STATE, 0, LaneId(lane), "elsewhere"),)
        opening = self.opening(lane, [])
        applied = self.feed((opening,), (self.segment(lane, 0, ids, self.jobs),), before)
        assert (applied.refusals, applied.segments) == ((), ())
        self.model[lane].blocked = True

    # What the network and the stages may do

    @precondition(lambda self: self.last is not None)
    @rule(back=st.integers(1, 3), ids=tokens, lane=lanes)
    def a_duplicate_comes(self, back: int, ids: tuple[int, ...], lane: int) -> None:
        seq = Seq(max(0, self.seq - back))
        stale = self.segment(lane, 0, ids, self.model[lane].job or 1)
        for frame in (self.last, Frame(Epoch(self.epoch), seq, (), (stale,))):
            assert self.ledger.apply(frame) == Applied(Standing.APPLIED)

    @rule(ahead=st.integers(0, 3), other=st.integers(0, 5), lane=lanes)
    def a_frame_comes_out_of_turn(self, ahead: int, other: int, lane: int) -> None:
        """Of another epoch, or too early."""
        if other == self.epoch and ahead == 0:
            return
        frame = Frame(Epoch(other), Seq(self.seq + ahead), (self.opening(lane, []),))
        applied = self.ledger.apply(frame)
        code = RefusalCode.FRAME_ORDER if other == self.epoch else RefusalCode.STALE_EPOCH
        assert [(refusal.code, refusal.lane) for refusal in applied.refusals] == [(code, None)]

    @rule(lane=lanes, rows=fractions)
    def rows_are_lost(self, lane: int, rows: int) -> None:
        self.ledger.truncate(LaneId(lane), rows)
        self.model[lane].rows = self.model[lane].rows[:rows]

    @rule()
    def a_new_epoch_opens(self) -> None:
        self.epoch, self.seq, self.last = self.epoch + 1, 0, None
        self.ledger.reset(Epoch(self.epoch))
        self.model = {lane: NaiveLane() for lane in range(LANES)}

    # What must hold

    @invariant()
    def both_hold_the_same(self) -> None:
        assert (self.ledger.epoch, self.ledger.next_seq) == (self.epoch, self.seq)
        for lane, naive in self.model.items():
            assert self.ledger.tokens(LaneId(lane)) == tuple(naive.rows)
            assert self.ledger.valid_rows(LaneId(lane)) == len(naive.rows) <= MAX_ROWS
            assert self.ledger.is_blocked(LaneId(lane)) == naive.blocked

    @invariant()
    def usable_prefixes_are_those_of_a_plain_count(self) -> None:
        prompt = self.model[0].rows + [1]
        for lane, naive in self.model.items():
            count = 0
            for row, token in zip(naive.rows, prompt, strict=False):
                if row != token:
                    break
                count += 1
            assert self.ledger.usable_prefix(LaneId(lane), prompt) == count


LedgerMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
TestLedgerAgainstListsInADict = LedgerMachine.TestCase
