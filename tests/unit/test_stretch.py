"""A prefill beside a decoding job is cut to what that job may be held up, and two prefills take turns.

Frames and times are those of the fake network, where a call costs 10 rows: what the scheduler sends is recorded.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.config import SchedulerSettings
from coordinator.costs import DEFAULT_CALL_ROWS, Costs
from coordinator.events import Action, Emit
from coordinator.frames import (
    Epoch,
    Frame,
    JobId,
    LaneId,
    Reply,
    SamplingSpec,
    Segment,
    SegmentKind,
    Seq,
    StageTiming,
)
from coordinator.jobs import Phase
from coordinator.requests import TokenDelta
from fakering.model import FakeModel
from fakering.plan import PlannedJob
from fakering.simulation import Simulation
from fakering.texts import novel

_MODEL = FakeModel(vocab_size=60, seed=3)
_STEP_S, _ROW_S = 0.01, 0.001  # fakering.simulation's pace
_CALL_ROWS = _STEP_S / _ROW_S


@dataclass(frozen=True)
class _Played:
    frames: list[Frame]
    sent_at: list[float]
    emitted: dict[JobId, list[float]]  # when tokens came

    def beside(self, decoding: JobId, prefilling: JobId) -> list[Frame]:
        """The frames from the first to the last with a prefill, while the other job decodes."""
        steps = [place for place, frame in enumerate(self.frames) if _has(frame, decoding, True)]
        chunks = [place for place, frame in enumerate(self.frames) if _has(frame, prefilling)]
        return self.frames[max(steps[0], chunks[0]) : min(steps[-1], chunks[-1]) + 1]

    def gaps(self, job: JobId) -> list[float]:
        times = self.emitted[job]
        return [later - sooner for sooner, later in zip(times, times[1:], strict=False)]


def _has(frame: Frame, job: JobId, verify: bool = False) -> bool:
    kind = SegmentKind.VERIFY if verify else SegmentKind.PREFILL
    return any(segment.job == job and segment.kind is kind for segment in frame.segments)


class _Recorded(Simulation):
    """A simulation that keeps what was sent, and when tokens came."""

    frames: list[Frame]
    sent_at: list[float]
    emitted: dict[JobId, list[float]]

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Emit) and isinstance(action.event, TokenDelta):
            self.emitted.setdefault(action.job, []).append(self.now)
        super()._carry_out(action)


def _play(
    *plan: PlannedJob, stretch: float = 2.5, exact: bool = True, frame_rows: int = 256
) -> _Played:
    settings = SchedulerSettings(
        frame_rows=frame_rows, chunk_rows=128, min_chunk_rows=8, max_stretch=stretch
    )
    simulation = _Recorded(plan, _MODEL, max_rows=1100, exact=exact, settings=settings)
    simulation.frames, simulation.sent_at, simulation.emitted = [], [], {}
    send = simulation.network.send

    def record(frame: Frame, now: float) -> None:
        simulation.frames.append(frame)
        simulation.sent_at.append(now)
        send(frame, now)

    simulation.network.send = record  # type: ignore[method-assign]
    simulation.run()
    return _Played(simulation.frames, simulation.sent_at, simulation.emitted)


def _decoding(tokens: int) -> PlannedJob:
    return PlannedJob(0.0, novel(8, 1, 59), max_new_tokens=tokens, draft=False)


def _prefilling(at_s: float, rows: int = 1000, seed: int = 2) -> PlannedJob:
    return PlannedJob(at_s, novel(rows, seed, 59), max_new_tokens=2, draft=False)


STREAM, PROMPT, OTHER = JobId(0), JobId(1), JobId(2)


def test_alone_a_prompt_goes_out_in_large_frames() -> None:
    """The control: without a job to hold up, nothing is cut."""
    played = _play(_prefilling(0.0))
    assert max(frame.rows for frame in played.frames) > 100


@pytest.mark.parametrize("stretch", [1.5, 2.5, 4.0])
def test_no_frame_beside_a_decoding_job_takes_longer_than_it_may(stretch: float) -> None:
    played = _play(_decoding(400), _prefilling(0.5), stretch=stretch)
    frames = played.beside(STREAM, PROMPT)
    assert sum(_has(frame, PROMPT) for frame in frames) > 10
    # Once the costs are learned; before, a default stands in for them.
    rows = sorted(frame.rows for frame in frames[10:])
    allowed = stretch * (_CALL_ROWS + 1) - _CALL_ROWS
    assert rows[int(len(rows) * 0.9)] <= allowed
    assert rows[-1] <= max(allowed, stretch * (DEFAULT_CALL_ROWS + 1) - DEFAULT_CALL_ROWS)
    # And it uses what it has: a prefill is not slower than it must be.
    assert rows[-1] > 0.9 * allowed - 2


def test_a_stretch_of_nothing_still_moves_the_prompt_on() -> None:
    played = _play(_decoding(300), _prefilling(0.5, rows=60), stretch=1.0)
    chunks = [frame for frame in played.beside(STREAM, PROMPT) if _has(frame, PROMPT)]
    assert len(chunks) > 20
    assert max(frame.rows for frame in chunks) <= 2


def test_the_stream_beside_a_long_prompt_waits_less_than_three_times_as_long() -> None:
    alone = _play(_decoding(60)).gaps(STREAM)
    played = _play(_decoding(400), _prefilling(0.5))
    during = [
        gap
        for gap, when in zip(played.gaps(STREAM), played.emitted[STREAM][1:], strict=True)
        if 0.5 < when <= played.emitted[PROMPT][0]
    ]
    assert len(during) > 20
    assert max(during) > median(alone) * 1.5, "the prompt cost the stream nothing: no prefill ran"
    assert sorted(during)[int(len(during) * 0.95)] < 3 * median(alone)


def _rows_of(frame: Frame, job: JobId) -> int:
    return sum(s.width for s in frame.segments if s.job == job and s.kind is SegmentKind.PREFILL)


def _wait_of(played: _Played, newcomer: JobId, before: JobId) -> int:
    """The earlier prompt's rows that went out between the newcomer's submission and its first chunk."""
    sent = [
        frame
        for frame, when in zip(played.frames, played.sent_at, strict=True)
        if when >= _NEWCOMER_AT
    ]
    first = next(place for place, frame in enumerate(sent) if _has(frame, newcomer))
    return sum(_rows_of(frame, before) for frame in sent[:first])


_NEWCOMER_AT = 0.6
_SHORT = PlannedJob(0.0, (1,), max_new_tokens=1)


@pytest.mark.parametrize(
    ("stream", "exact", "frame_rows"),
    [
        (_SHORT, True, 256),
        (_SHORT, False, 256),
        pytest.param(_SHORT, True, 130),
        (_SHORT, False, 130),
        (_decoding(400), True, 256),
    ],
)
def test_two_prompts_take_turns(stream: PlannedJob, exact: bool, frame_rows: int) -> None:
    """Neither waits for the other's end, though a frame may hold no more than one chunk."""
    prompts = (_prefilling(0.5), _prefilling(0.5, seed=3))
    played = _play(stream, *prompts, exact=exact, frame_rows=frame_rows)
    done = {PROMPT: 0, OTHER: 0}
    for frame in played.frames:
        for job in done:
            done[job] += _rows_of(frame, job)
        if done[OTHER] and min(done.values()) < 1000:
            # The first frames were out when the other came.
            assert abs(done[PROMPT] - done[OTHER]) <= 5 * 128
    first, second = played.emitted[PROMPT][0], played.emitted[OTHER][0]
    assert abs(first - second) < 0.25 * (max(first, second) - 0.5)


@pytest.mark.parametrize("exact", [True, False])
def test_a_short_prompt_overtakes_a_long_one(exact: bool) -> None:
    played = _play(_SHORT, _prefilling(0.5), _prefilling(0.51, rows=40, seed=3), exact=exact)
    assert played.emitted[OTHER][0] < played.emitted[PROMPT][0] - 0.3


@pytest.mark.parametrize("stretch", [1.5, 2.5, 4.0])
@pytest.mark.parametrize("exact", [True, False])
def test_beside_a_decoding_job_a_newcomer_waits_for_the_rest_of_a_chunk(
    stretch: float, exact: bool
) -> None:
    played = _play(
        _decoding(300),
        _prefilling(0.5),
        _prefilling(_NEWCOMER_AT, rows=40, seed=3),
        stretch=stretch,
        exact=exact,
    )
    assert _wait_of(played, OTHER, PROMPT) <= 128


@given(st.integers(0, 10**6))
def test_what_a_frame_may_hold_beside_a_stream_survives_noise(seed: int) -> None:
    """Whatever was seen before, and in what order: never several times what the stages can bear."""
    rng = random.Random(seed)
    costs = Costs(stages=2)
    allowed = 2.2 * (_CALL_ROWS + 1) - _CALL_ROWS
    for _ in range(30):
        phases = rng.choice([{Phase.DECODE}, {Phase.DECODE, Phase.PREFILL}, {Phase.PREFILL}])
        prefills = Phase.PREFILL in phases
        kind = SegmentKind.PREFILL if prefills else SegmentKind.VERIFY
        for _ in range(rng.choice([1, 3, 100])):
            rows = rng.choice([1, 2, 9, 30, 200] if prefills else [1, 1, 1, 1, 1, 8])
            costs.learn(*_timed(rows, kind, rng), phases)
        assert costs.stretched_rows(2.2, 1) <= 2.5 * allowed


def _timed(rows: int, kind: SegmentKind, rng: random.Random) -> tuple[Frame, Reply]:
    """A frame of one segment and its reply, with the noise of two busy cores."""
    segment = Segment(LaneId(0), JobId(0), 0, (1,) * rows, kind, SamplingSpec())
    frame = Frame(Epoch(0), Seq(0), (), (segment,))
    took = [(_CALL_ROWS + rows) * _ROW_S * rng.uniform(0.7, 1.4) for _ in range(2)]
    timings = tuple(StageTiming(stage, compute_s=s) for stage, s in enumerate(took))
    return frame, Reply(Epoch(0), Seq(0), timings=timings)
