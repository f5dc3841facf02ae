"""What the ring costs beyond its compute: verify frames through Ray actors against the same slices in one process.

Both sides run the same frames at the same depth, in turns, so that a noisy neighbour meets both. It decides
nothing but what is timed. Compute is the sum of the slices' calls; the ring's time is the coordinator's, from
sending a frame to holding its reply.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import psutil
from rich.console import Console

from coordinator.frames import (
    Epoch,
    Frame,
    JobId,
    LaneId,
    OpenLane,
    Reply,
    Segment,
    SegmentKind,
    Seq,
)
from coordinator.prefixes import digest_of
from coordinator.requests import GREEDY
from gateway.launch import ring_config
from gateway.progress import LineBoard
from gateway.settings import ServeSettings
from stage.build import build_stage
from stage.config import RingConfig
from stage.messages import FrameMessage, ReplyMessage
from stage.ray_ring import RayRing
from stage.stage import Stage

_DEPTH = 512  # rows before the verify frame: a short conversation
_WIDTH = 4  # anchor and three drafts, the scheduler's default
_ROUNDS = 12
_FRAMES_A_ROUND = 5
_IDLE_S = 4.0

_LANE, _JOB = LaneId(0), JobId(1)


@dataclass(frozen=True, slots=True)
class OverheadReport:
    """Medians. `ratio` is frame_ms / compute_ms; the rest of a frame is transport, waiting and bookkeeping."""

    ratio: float
    frame_ms: float
    compute_ms: float  # the slices in one process, one after the other
    stage_compute_ms: float  # what the ring's own stages say that they computed
    transfer_ms: float  # decoding, copying and sending, as the stages say
    idle_cpu_percent: float  # of one core, the busiest stage

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def to_text(self) -> str:
        return (
            f"a verify frame of {_WIDTH} rows at row {_DEPTH}: {self.frame_ms:.1f} ms through the ring, "
            f"{self.compute_ms:.1f} ms as slices in one process: {self.ratio:.3f} times\n"
            f"of it the stages computed {self.stage_compute_ms:.1f} ms and moved frames "
            f"{self.transfer_ms:.1f} ms; an idle stage uses {self.idle_cpu_percent:.1f} % of a core"
        )


class _Frames:
    """The frames of one measurement: a prefill to the depth, then the same verify segment for ever."""

    def __init__(self, vocab_size: int) -> None:
        self._prompt = tuple(7 + n * 31 % (vocab_size - 8) for n in range(_DEPTH))
        self._seq = 0

    def prefill(self) -> Frame:
        opening = OpenLane(_LANE, _JOB, 0, digest_of(()))
        return self._frame(Segment(_LANE, _JOB, 0, self._prompt, SegmentKind.PREFILL), opening)

    def verify(self) -> Frame:
        tokens = self._prompt[:_WIDTH]
        return self._frame(Segment(_LANE, _JOB, _DEPTH, tokens, SegmentKind.VERIFY, GREEDY, _DEPTH))

    def _frame(self, segment: Segment, *ops: OpenLane) -> Frame:
        frame = Frame(Epoch(0), Seq(self._seq), ops, (segment,))
        self._seq += 1
        return frame


def overhead_command(settings: ServeSettings, as_json: bool) -> None:
    """Measures and shows it. Raises SetupError."""
    shown = Console(stderr=True)
    board = LineBoard(lambda text: shown.print(text, markup=False, highlight=False))
    report = asyncio.run(measure_overhead(ring_config(settings, board), board.note))
    told = Console(soft_wrap=True)
    if as_json:
        told.print(report.to_json(), markup=False, highlight=False)
    else:
        told.print(report.to_text(), markup=False, highlight=False)


async def measure_overhead(config: RingConfig, tell: Callable[[str], None]) -> OverheadReport:
    """Loads the model twice: as a Ray ring, and as slices in this process. Raises SetupError."""
    tell("loading the slices in this process")
    stages = [
        build_stage(config, index, config.device, lambda _: None)[0]
        for index in range(config.stages)
    ]
    tell("starting the ring")
    ring = RayRing(config)
    info = await ring.start(lambda _: None)
    try:
        tell(f"measuring {_ROUNDS * _FRAMES_A_ROUND} frames a side")
        here, there = _Frames(info.vocab_size), _Frames(info.vocab_size)
        _through_slices(stages, here.prefill())
        await _through_ring(ring, there.prefill())
        compute, frames, replies = [], [], []
        for _ in range(_ROUNDS):
            compute += [_through_slices(stages, here.verify()) for _ in range(_FRAMES_A_ROUND)]
            for _ in range(_FRAMES_A_ROUND):
                seconds, reply = await _through_ring(ring, there.verify())
                frames.append(seconds)
                replies.append(reply)
        tell(f"watching the stages idle for {_IDLE_S:.0f} s")
        idle = await _idle_percent(ring.pids)
    finally:
        await ring.stop()
    return _report(frames, compute, replies, idle)


def _through_slices(stages: Sequence[Stage], frame: Frame) -> float:
    message: FrameMessage | ReplyMessage | None = FrameMessage(Epoch(0), frame)
    begin = time.perf_counter()
    for stage in stages:
        assert isinstance(message, FrameMessage)
        message = stage.process(message)
    seconds = time.perf_counter() - begin
    assert isinstance(message, ReplyMessage)
    assert not message.reply.refusals
    return seconds


async def _through_ring(ring: RayRing, frame: Frame) -> tuple[float, Reply]:
    begin = time.perf_counter()
    ring.submit(frame)
    reply = await ring.next_reply()
    seconds = time.perf_counter() - begin
    assert reply.seq == frame.seq
    assert not reply.refusals
    return seconds, reply


async def _idle_percent(pids: Sequence[int]) -> float:
    processes = [psutil.Process(pid) for pid in pids]
    before = [_cpu_s(process) for process in processes]
    await asyncio.sleep(_IDLE_S)
    after = [_cpu_s(process) for process in processes]
    return max((b - a) / _IDLE_S * 100 for a, b in zip(before, after, strict=True))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _report(
    frames: Sequence[float], compute: Sequence[float], replies: Sequence[Reply], idle: float
) -> OverheadReport:
    frame_ms, compute_ms = _median_ms(frames), _median_ms(compute)
    return OverheadReport(
        ratio=round(frame_ms / compute_ms, 3),
        frame_ms=round(frame_ms, 2),
        compute_ms=round(compute_ms, 2),
        stage_compute_ms=round(_median_ms(_sums(replies, "compute_s")), 2),
        transfer_ms=round(_median_ms(_sums(replies, "transfer_s")), 2),
        idle_cpu_percent=round(idle, 2),
    )


def _sums(replies: Sequence[Reply], part: str) -> Iterator[float]:
    return (sum(getattr(timing, part) for timing in reply.timings) for reply in replies)


def _median_ms(seconds: Sequence[float] | Iterator[float]) -> float:
    return statistics.median(seconds) * 1e3
