"""Whose rows lie where: told from the frames alone, without a digest or a root.

The simulation's witness that nothing crosses from one tenant to another: it follows each row from the job that computed
it through copies, chain nodes and memos, and raises Crossed for a frame that lets a job read a row, or sample from
logits, of another tenant. It decides nothing, and knows nothing of refusals: what a stage did not take is written over
before anybody reads it.
"""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.foresight import AHEAD, Wish
from coordinator.frames import (
    CopyRows,
    Frame,
    JobId,
    LaneId,
    LoadNodes,
    NodeId,
    OpenLane,
    Segment,
    SegmentKind,
)
from coordinator.held import Holding


class Crossed(AssertionError):
    """A tenant's job was given what another tenant's job computed."""


class Owners:
    """`tenants`: those of the jobs; filled by the caller before their frames come."""

    def __init__(
        self, lanes: int, tenants: Mapping[JobId, str], roots: Mapping[NodeId, str]
    ) -> None:
        """`roots`: whose chains begin there."""
        self._tenants = tenants
        self._roots = roots
        self._writers: list[list[set[str]]] = [[] for _ in range(lanes)]  # of each row, ever
        self._rows: list[list[str]] = [[] for _ in range(lanes)]  # of each lane: whose each row is
        self._holders = [""] * lanes  # whose job had the lane last
        self._nodes: dict[
            NodeId, tuple[int, list[str]]
        ] = {}  # where it starts, and whose its rows are
        self._memos: dict[int, str] = {}
        self._wishes: list[Wish] = []

    def new_epoch(self, held: Holding) -> None:
        """Of frames that not every stage has seen, earlier rows may be left: whose they are the stages say. Raises
        Crossed where he never had any there.
        """
        self._memos.clear()
        for lane, writers in enumerate(self._writers):
            left = held.lane(lane)
            rows = len(left.tokens)
            self._rows[lane] = [self._roots[left.root]] * rows if rows else []
            if any(self._roots[left.root] not in known for known in writers[:rows]):
                raise Crossed(f"lane {lane} comes back as {self._roots[left.root]!r}'s")

    def wished(self, wish: Wish) -> None:
        self._wishes.append(wish)

    def sent(self, frame: Frame) -> None:
        """Raises Crossed."""
        for op in frame.ops:
            if isinstance(op, CopyRows):
                self._rows[op.target] = self._rows[op.source][: op.rows]
            elif isinstance(op, LoadNodes):
                self._load(op)
            elif isinstance(op, OpenLane):
                self._open(op)
        for segment in frame.segments:
            self._write(segment)
        for lane, rows in enumerate(self._rows):
            self._note(lane, rows)
        for store in frame.after:
            for span in store.spans:
                rows = self._rows[store.lane][span.start : span.end]
                self._nodes[span.node] = (span.start, rows)

    def _note(self, lane: int, rows: list[str]) -> None:
        writers = self._writers[lane]
        writers.extend(set() for _ in range(len(rows) - len(writers)))
        for known, tenant in zip(writers, rows, strict=False):
            known.add(tenant)

    def _open(self, op: OpenLane) -> None:
        if op.job != AHEAD:
            self._holders[op.lane] = self._tenants[op.job]
        del self._rows[op.lane][op.cached_prefix :]
        self._require_own(op.lane, op.job)

    def _load(self, op: LoadNodes) -> None:
        lane = self._rows[op.lane]
        for node in op.nodes:
            start, rows = self._nodes[node]
            del lane[max(op.start, start) :]
            lane.extend(rows[max(op.start, start) - start : op.end - start])

    def _write(self, segment: Segment) -> None:
        lane = self._rows[segment.lane]
        del lane[segment.start :]
        self._require_own(segment.lane, segment.job)
        tenant = self._holders[segment.lane]
        if segment.job == AHEAD and not any(_covers(w, tenant, segment) for w in self._wishes):
            raise Crossed(f"rows of a wish of another tenant in a lane of {tenant!r}")
        if segment.kind is SegmentKind.RECALL:
            if segment.memo is None or self._memos[segment.memo] != tenant:
                raise Crossed(f"job {segment.job} samples from another tenant's logits")
        elif segment.memo is not None:
            self._memos[segment.memo] = tenant
        lane.extend([tenant] * segment.width)

    def _require_own(self, lane: LaneId, job: JobId) -> None:
        others = set(self._rows[lane]) - {self._holders[lane]}
        if others:
            raise Crossed(f"job {job} of {self._holders[lane]!r} goes on behind rows of {others}")


def _covers(wish: Wish, tenant: str, segment: Segment) -> bool:
    asked = wish.tokens[segment.start : segment.end]
    return wish.tenant == tenant and asked == segment.tokens
