"""A coordinator's bare hands: plays frames on any ring, one turn at a time.

It keeps what a coordinator keeps (a ledger replica, epoch, seq) and pairs replies by it, and checks each reply
against its replica. It schedules nothing, drafts nothing and never retries: tests decide what is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.errors import BrokenInvariant
from coordinator.frames import (
    Epoch,
    Frame,
    JobId,
    LaneId,
    Op,
    OpenLane,
    Reply,
    Segment,
    SegmentKind,
    SegmentReply,
    Seq,
)
from coordinator.held import Holding
from coordinator.ledger import Ledger
from coordinator.nodes import root_of
from coordinator.prefixes import digest_of
from coordinator.requests import GREEDY, SamplingSpec
from coordinator.ring import Ring, RingInfo


@dataclass(frozen=True, slots=True)
class Turn:
    """One finished generation: its tokens, and how many rows of the prompt were computed for it."""

    tokens: tuple[int, ...]
    prefilled: int


class Hand:
    """`reply_timeout_s` bounds each wait; a reply that contradicts the replica raises BrokenInvariant."""

    def __init__(self, ring: Ring, info: RingInfo, *, reply_timeout_s: float = 60.0) -> None:
        self.ring = ring
        self.info = info
        self.ledger = Ledger(info.lanes, info.max_rows)
        self.root = root_of(info.model_fingerprint)
        self._timeout_s = reply_timeout_s
        self._next_job = 1
        self._expected: dict[tuple[Epoch, Seq], tuple[tuple[LaneId, int], ...]] = {}
        self._replies: dict[tuple[Epoch, Seq], Reply] = {}

    async def open_epoch(self, epoch: Epoch) -> Holding:
        """Goes on from what all stages hold."""
        held = await self.ring.open_epoch(epoch)
        self.ledger.reset(epoch, held)
        self._expected.clear()
        self._replies.clear()
        return held

    def new_job(self) -> JobId:
        self._next_job += 1
        return JobId(self._next_job)

    # Frames

    def frame(self, ops: Sequence[Op] = (), segments: Sequence[Segment] = ()) -> Frame:
        """The next frame, not sent yet."""
        return Frame(self.ledger.epoch, self.ledger.next_seq, tuple(ops), tuple(segments))

    def submit(self, frame: Frame) -> Frame:
        """Sends it, and feeds it to the replica as every stage will."""
        self.ledger.apply(frame)
        lanes = tuple(segment.lane for segment in frame.segments)
        self._expected[frame.epoch, frame.seq] = tuple(
            (lane, self.ledger.valid_rows(lane)) for lane in lanes if lane < self.ledger.lanes
        )
        self.ring.submit(frame)
        return frame

    def send(self, ops: Sequence[Op] = (), segments: Sequence[Segment] = ()) -> Frame:
        return self.submit(self.frame(ops, segments))

    async def next_reply(self) -> Reply:
        async with asyncio.timeout(self._timeout_s):
            return await self.ring.next_reply()

    async def reply_to(self, frame: Frame) -> Reply:
        """The frame's reply, whatever came before it."""
        key = frame.epoch, frame.seq
        while key not in self._replies:
            reply = await self.next_reply()
            self._check(reply)
            self._replies[reply.epoch, reply.seq] = reply
        return self._replies.pop(key)

    async def exchange(self, ops: Sequence[Op] = (), segments: Sequence[Segment] = ()) -> Reply:
        return await self.reply_to(self.send(ops, segments))

    # What a turn is made of

    def open(
        self, lane: int, job: JobId, prompt: Sequence[int] = (), cached_prefix: int = 0
    ) -> OpenLane:
        digest = digest_of(prompt[:cached_prefix])
        return OpenLane(LaneId(lane), job, cached_prefix, digest, self.root)

    def prefill(
        self,
        lane: int,
        job: JobId,
        start: int,
        tokens: Sequence[int],
        spec: SamplingSpec | None = None,
        masks: tuple[bytes, ...] = (),
    ) -> Segment:
        place = (LaneId(lane), job, start)
        return Segment(*place, tuple(tokens), SegmentKind.PREFILL, spec, masks=masks)

    def verify(
        self,
        lane: int,
        job: JobId,
        start: int,
        tokens: Sequence[int],
        spec: SamplingSpec = GREEDY,
        masks: tuple[bytes, ...] = (),
    ) -> Segment:
        place = (LaneId(lane), job, start)
        return Segment(*place, tuple(tokens), SegmentKind.VERIFY, spec, masks=masks)

    def send_prefill(
        self,
        lane: int,
        job: JobId,
        prompt: Sequence[int],
        *,
        cached_prefix: int = 0,
        chunk: int = 8,
        ops: Sequence[Op] = (),
        spec: SamplingSpec = GREEDY,
    ) -> list[Frame]:
        """Opens the lane and sends the rest of the prompt in chunks that end at multiples of `chunk`."""
        before: tuple[Op, ...] = (*ops, self.open(lane, job, prompt, cached_prefix))
        frames = []
        start = cached_prefix
        while start < len(prompt):
            end = min(len(prompt), (start // chunk + 1) * chunk)
            sampling = spec if end == len(prompt) else None
            part = self.prefill(lane, job, start, prompt[start:end], sampling)
            frames.append(self.send(before, (part,)))
            before, start = (), end
        return frames

    async def turn(
        self,
        lane: int,
        prompt: Sequence[int],
        count: int,
        *,
        cached_prefix: int = 0,
        chunk: int = 8,
        ops: Sequence[Op] = (),
        spec: SamplingSpec = GREEDY,
    ) -> Turn:
        """Prefills from `cached_prefix` and decodes `count` tokens one by one."""
        job = self.new_job()
        frames = self.send_prefill(
            lane, job, prompt, cached_prefix=cached_prefix, chunk=chunk, ops=ops, spec=spec
        )
        replies = [await self.reply_to(frame) for frame in frames]
        tokens = list(_served(replies[-1], lane).tokens)
        while len(tokens) < count:
            row = len(prompt) + len(tokens) - 1
            step = self.verify(lane, job, row, tokens[-1:], spec)
            tokens += _served(await self.exchange(segments=(step,)), lane).tokens
        return Turn(tuple(tokens), prefilled=sum(frame.rows for frame in frames))

    def _check(self, reply: Reply) -> None:
        refused = {refusal.lane for refusal in reply.refusals}
        told = {rows.lane: rows.valid_rows for rows in reply.lanes}
        for lane in refused - {None}:
            if lane is not None and lane in told:
                self.ledger.truncate(lane, told[lane])
        if refused:
            return
        for lane, rows in self._expected.pop((reply.epoch, reply.seq), ()):
            if told.get(lane) != rows:
                raise BrokenInvariant(
                    f"frame {reply.seq}: lane {lane} has {told.get(lane)} rows, expected {rows}"
                )


def _served(reply: Reply, lane: int) -> SegmentReply:
    """The lane's part of the reply; raises BrokenInvariant when it was refused."""
    part = next(part for part in reply.segments if part.lane == lane)
    if part.refused or not part.tokens:
        raise BrokenInvariant(f"lane {lane} was not served: {reply.refusals}")
    return part
