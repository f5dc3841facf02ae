"""One stage after the other, by hand: what each takes, refuses, computes and says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coordinator.frames import (
    CopyRows,
    Epoch,
    Frame,
    JobId,
    LaneId,
    LaneRows,
    Op,
    OpenLane,
    RefusalCode,
    Reply,
    Segment,
    SegmentKind,
    Seq,
)
from coordinator.ledger import Ledger
from coordinator.prefixes import digest_of
from coordinator.requests import GREEDY, SamplingSpec
from stage.build import build_stage
from stage.config import RingConfig
from stage.messages import FrameMessage, Garbled, ReplyMessage
from stage.stage import Stage

JOB = JobId(1)
PROMPT = (5, 17, 101, 42, 9, 77)
OTHER = (8, 150, 3)


def config(model: Path, *splits: tuple[int, int], **rest) -> RingConfig:
    return RingConfig(model, "tiny", splits or ((0, 2), (2, 4)), lanes=3, max_rows=64, **rest)


class Chain:
    """Stages in a row, without threads: each frame is taken by hand from one to the next."""

    def __init__(self, config: RingConfig) -> None:
        self.config = config
        built = [build_stage(config, n, "cpu", lambda _: None) for n in range(config.stages)]
        self.stages = [stage for stage, _ in built]
        self.reports = [report for _, report in built]
        self.opened = Epoch(0)
        self.next_seq = 0

    def reopen(self) -> None:
        self.opened = Epoch(self.opened + 1)
        self.next_seq = 0
        for stage in self.stages:
            stage.open_epoch(self.opened)

    def frame(self, ops: Sequence[Op] = (), segments: Sequence[Segment] = ()) -> Frame:
        frame = Frame(self.opened, Seq(self.next_seq), tuple(ops), tuple(segments))
        self.next_seq += 1
        return frame

    def send(self, frame: Frame) -> Reply | None:
        return self.carry(FrameMessage(self.opened, frame))

    def carry(self, message: FrameMessage | Garbled, since: int = 0) -> Reply | None:
        outcome: FrameMessage | ReplyMessage | Garbled | None = message
        for stage in self.stages[since:]:
            assert isinstance(outcome, FrameMessage | Garbled)
            outcome = stage.process(outcome)
            if outcome is None:
                return None
        assert isinstance(outcome, ReplyMessage)
        return outcome.reply

    def served(self, ops: Sequence[Op] = (), segments: Sequence[Segment] = ()) -> Reply:
        reply = self.send(self.frame(ops, segments))
        assert reply is not None
        return reply

    def alone(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """What the prompt's last row gives in lane 2, with nobody beside it."""
        reply = self.served((opening(2),), (prefill(2, prompt),))
        assert reply.refusals == ()
        return reply.segments[0].tokens


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> Chain:
    return Chain(config(tiny_model))


@pytest.fixture
def chain(loaded: Chain) -> Chain:
    loaded.reopen()
    return loaded


def opening(lane: int, prefix: tuple[int, ...] = ()) -> OpenLane:
    return OpenLane(LaneId(lane), JOB, len(prefix), digest_of(prefix))


def prefill(lane: int, tokens: tuple[int, ...], start: int = 0, spec=GREEDY) -> Segment:
    return Segment(LaneId(lane), JOB, start, tokens, SegmentKind.PREFILL, spec, start + len(tokens))


def verify(lane: int, tokens: tuple[int, ...], start: int, spec=GREEDY) -> Segment:
    return Segment(LaneId(lane), JOB, start, tokens, SegmentKind.VERIFY, spec, len(PROMPT))


def codes(reply: Reply) -> list[tuple[RefusalCode, int, int | None]]:
    return [(refusal.code, refusal.stage, refusal.lane) for refusal in reply.refusals]


def head(chain: Chain, frame: Frame) -> FrameMessage:
    """What the first stage makes of a frame."""
    outcome = chain.stages[0].process(FrameMessage(chain.opened, frame))
    assert isinstance(outcome, FrameMessage)
    return outcome


@pytest.mark.parametrize("splits", [((0, 4),), ((0, 1), (1, 2), (2, 4))])
def test_any_number_of_stages_gives_the_same_tokens(
    chain: Chain, tiny_model: Path, splits: tuple[tuple[int, int], ...]
) -> None:
    other = Chain(config(tiny_model, *splits))
    frames = [
        chain.frame((opening(0),), (prefill(0, PROMPT),)),
        chain.frame((), (verify(0, OTHER, len(PROMPT)),)),
    ]
    other.opened = chain.opened
    for stage in other.stages:
        stage.open_epoch(chain.opened)
    for frame in frames:
        left, right = chain.send(frame), other.send(frame)
        assert left is not None
        assert right is not None
        assert left.segments == right.segments
        assert left.lanes == right.lanes
    assert len(left.segments[0].tokens) == len(OTHER)


def test_only_asked_rows_are_sampled(chain: Chain) -> None:
    silent = chain.served((opening(0),), (prefill(0, PROMPT, spec=None),))
    assert silent.segments[0].tokens == ()
    assert not silent.segments[0].refused
    spec = SamplingSpec(temperature=0.0, logprobs=2)
    asked = chain.served((), (verify(0, OTHER, len(PROMPT), spec),)).segments[0]
    assert len(asked.tokens) == len(asked.logprobs) == len(OTHER)
    assert all(row.chosen == row.top[0][1] for row in asked.logprobs)


def test_the_reply_names_each_stages_times_and_the_least_rows(chain: Chain) -> None:
    reply = chain.served((opening(0), opening(1)), (prefill(0, PROMPT),))
    assert [timing.stage for timing in reply.timings] == [0, 1]
    assert all(timing.compute_s > 0 for timing in reply.timings)
    assert reply.lanes == (LaneRows(LaneId(0), len(PROMPT)), LaneRows(LaneId(1), 0))


@pytest.mark.parametrize("behind", [0, 1])
def test_a_lane_that_one_stage_refuses_leaves_the_others_as_they_were(
    chain: Chain, behind: int
) -> None:
    expected = chain.alone(OTHER)
    chain.served((opening(0),), (prefill(0, PROMPT),))
    chain.stages[behind].ledger.truncate(LaneId(0), 4)
    lost = verify(0, (7, 7), len(PROMPT))
    reply = chain.served((opening(1),), (lost, prefill(1, OTHER)))
    assert codes(reply) == [(RefusalCode.KV_GAP, behind, 0)]
    assert [part.refused for part in reply.segments] == [True, False]
    assert reply.segments[1].tokens == expected
    assert reply.lanes[1] == LaneRows(LaneId(0), 4)


def test_a_lane_refused_by_the_tail_is_refused_until_it_is_opened(chain: Chain) -> None:
    chain.served((opening(0),), (prefill(0, PROMPT),))
    chain.stages[1].ledger.truncate(LaneId(0), 4)
    for _ in range(2):
        reply = chain.served((), (verify(0, (7,), len(PROMPT)),))
        assert codes(reply) == [(RefusalCode.KV_GAP, 1, 0)]
    reply = chain.served((opening(0, PROMPT[:4]),), (prefill(0, PROMPT[4:], 4),))
    assert reply.refusals == ()
    assert reply.segments[0].tokens == chain.alone(PROMPT)


@pytest.mark.parametrize(
    "segment",
    [prefill(0, (1, 199)), prefill(0, (1,), spec=replace(GREEDY, logit_bias=((199, 1.0),)))],
    ids=["token", "logit bias"],
)
def test_what_only_a_larger_vocabulary_could_mean_is_a_bad_frame_of_its_lane(
    chain: Chain, segment: Segment
) -> None:
    expected = chain.alone(OTHER)
    reply = chain.served((opening(0), opening(1)), (segment, prefill(1, OTHER)))
    assert codes(reply) == [(RefusalCode.BAD_FRAME, 0, 0)]
    assert reply.segments[1].tokens == expected


def test_a_frame_refused_whole_goes_to_the_tail_and_changes_no_stage(chain: Chain) -> None:
    chain.served((opening(0),), (prefill(0, PROMPT),))
    due = chain.frame((), (verify(0, (1,), len(PROMPT)),))
    reply = chain.send(replace(due, seq=Seq(due.seq + 1)))
    assert reply is not None
    assert codes(reply) == [(RefusalCode.FRAME_ORDER, 0, None)]
    assert reply.segments[0].refused
    assert [timing.stage for timing in reply.timings] == [0, 1]
    assert chain.send(due) is not None


def test_a_frame_that_a_later_stage_missed_is_refused_there(chain: Chain) -> None:
    head(chain, chain.frame((opening(0),), (prefill(0, PROMPT),)))
    reply = chain.served((), (verify(0, (1,), len(PROMPT)),))
    assert codes(reply) == [(RefusalCode.FRAME_ORDER, 1, None)]
    assert reply.segments[0].refused


def test_a_frame_that_was_applied_is_dropped_by_every_stage(chain: Chain) -> None:
    frame = chain.frame((opening(0),), (prefill(0, PROMPT),))
    passed = head(chain, frame)
    assert chain.carry(passed, since=1) is not None
    assert chain.carry(passed, since=1) is None
    assert chain.send(frame) is None
    assert chain.stages[0].ledger.valid_rows(LaneId(0)) == len(PROMPT)


def test_what_was_submitted_before_an_epoch_opened_is_dropped(chain: Chain) -> None:
    passed = head(chain, chain.frame((opening(0),), (prefill(0, PROMPT),)))
    chain.reopen()
    assert chain.carry(passed, since=1) is None
    assert chain.stages[1].ledger.valid_rows(LaneId(0)) == 0


@pytest.mark.parametrize("stage", [0, 1])
def test_garbled_bytes_are_refused_and_the_stage_lives_on(chain: Chain, stage: int) -> None:
    reply = chain.carry(Garbled(chain.opened, chain.opened, Seq(0), "what"), since=stage)
    assert reply is not None
    assert (reply.epoch, reply.seq) == (chain.opened, 0)
    assert codes(reply) == [(RefusalCode.BAD_FRAME, stage, None)]
    assert chain.alone(PROMPT)


def without_rows(message: FrameMessage) -> FrameMessage:
    return replace(message, hidden=None)


def with_a_row_too_few(message: FrameMessage) -> FrameMessage:
    assert message.hidden is not None
    return replace(message, hidden=message.hidden[:-1])


def with_narrower_rows(message: FrameMessage) -> FrameMessage:
    assert message.hidden is not None
    return replace(message, hidden=message.hidden[:, :-1])


def with_rows_of_a_lane_too_few(message: FrameMessage) -> FrameMessage:
    return replace(message, computed=message.computed[:-1])


def with_rows_in_another_order(message: FrameMessage) -> FrameMessage:
    return replace(message, computed=message.computed[::-1])


@pytest.mark.parametrize(
    "change",
    [
        without_rows,
        with_a_row_too_few,
        with_narrower_rows,
        with_rows_of_a_lane_too_few,
        with_rows_in_another_order,
    ],
)
def test_hidden_rows_that_do_not_fit_their_segments_are_a_bad_frame(chain: Chain, change) -> None:
    frame = chain.frame((opening(0), opening(1)), (prefill(0, PROMPT), prefill(1, OTHER)))
    passed = head(chain, frame)
    reply = chain.carry(change(passed), since=1)
    assert reply is not None
    assert codes(reply) == [(RefusalCode.BAD_FRAME, 1, None)]
    assert chain.carry(passed, since=1) is not None


def test_hidden_rows_for_the_first_stage_are_a_bad_frame(chain: Chain) -> None:
    frame = chain.frame((opening(0),), (prefill(0, PROMPT),))
    message = FrameMessage(chain.opened, frame, computed=(LaneId(0),), hidden=torch.zeros(6, 64))
    reply = chain.carry(message)
    assert reply is not None
    assert codes(reply) == [(RefusalCode.BAD_FRAME, 0, None)]


def poison(stage: Stage, lane: int, first: int, last: int) -> None:
    keys, _ = stage.model.rows.view(0, lane, last)
    keys[:, first:last].fill_(float("nan"))


def test_logits_that_are_not_finite_refuse_their_lane_only(chain: Chain) -> None:
    expected = chain.alone(OTHER)
    chain.served((opening(0),), (prefill(0, PROMPT),))
    poison(chain.stages[1], 0, 0, 2)
    reply = chain.served((opening(1),), (verify(0, (7, 8), len(PROMPT)), prefill(1, OTHER)))
    assert codes(reply) == [(RefusalCode.BAD_FRAME, 1, 0)]
    assert reply.segments[1].tokens == expected
    assert LaneRows(LaneId(0), len(PROMPT)) in reply.lanes
    healed = chain.served((opening(0),), (prefill(0, PROMPT),))
    assert healed.segments[0].tokens == chain.alone(PROMPT)


@pytest.mark.parametrize(("penalty", "reads"), [(0.0, 0), (0.5, 1)])
def test_a_context_is_read_once_a_segment_and_only_for_penalties(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, penalty: float, reads: int
) -> None:
    ledger = chain.stages[1].ledger
    ends: list[int | None] = []

    def tokens(lane: LaneId, end: int | None = None) -> tuple[int, ...]:
        ends.append(end)
        return Ledger.tokens(ledger, lane, end)

    chain.served((opening(0),), (prefill(0, PROMPT),))
    monkeypatch.setattr(ledger, "tokens", tokens)
    segment = verify(0, (7, 8, 9, 10), len(PROMPT))
    spec = replace(GREEDY, presence_penalty=penalty)
    reply = chain.served((), (replace(segment, sampling=spec),))
    assert len(reply.segments[0].tokens) == 4
    assert ends == [len(PROMPT) + 4] * reads


@pytest.mark.parametrize("by_copy", [False, True])
def test_nothing_of_one_conversation_reaches_the_next_one_in_its_lane(
    chain: Chain, by_copy: bool
) -> None:
    expected = chain.alone(PROMPT)
    chain.served((opening(0),), (prefill(0, PROMPT * 5),))
    for stage in chain.stages:
        poison(stage, 0, 3, 30)
    ops: tuple[Op, ...] = (opening(0, PROMPT[:3]),)
    if by_copy:
        chain.served((opening(1),), (prefill(1, PROMPT),))
        ops = (CopyRows(LaneId(1), LaneId(0), 3), *ops)
    reply = chain.served(ops, (prefill(0, PROMPT[3:], 3),))
    assert reply.segments[0].tokens == expected


def test_a_lane_is_copied_before_it_is_opened_anew(chain: Chain) -> None:
    """Ops take effect in their order: the copy still sees the rows that the opening gives up."""
    chain.served((opening(0),), (prefill(0, PROMPT),))
    ops = (CopyRows(LaneId(0), LaneId(1), 5), opening(0, PROMPT[:2]), opening(1, PROMPT[:5]))
    reply = chain.served(ops, (prefill(1, PROMPT[5:], 5), prefill(0, PROMPT[2:], 2)))
    assert reply.refusals == ()
    assert [part.tokens for part in reply.segments] == [chain.alone(PROMPT)] * 2
