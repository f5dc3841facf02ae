"""What sessions said before this process began: lanes that an earlier gateway left, read as texts.

A session that is not known here may be one of those. Decides whose lanes a caller's prompt may go on from: the ids of
its own tenant's, whatever the session is called. Where no lane's text fits, nothing comes of it.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator.held import HeldLane
from coordinator.nodes import root_of
from coordinator.router import Router
from coordinator.sessions import History
from gateway.chat.tokenizer import ChatTokenizer


class Inherited:
    def __init__(self, router: Router, tokenizer: ChatTokenizer) -> None:
        self._router = router
        self._tokenizer = tokenizer
        self._read: dict[int, tuple[HeldLane, History]] = {}

    def lanes(self, tenant: str) -> tuple[HeldLane, ...]:
        """Those that the tenant's turns have filled. On the event loop."""
        return tuple(
            lane
            for ring in self._router.rings()
            if ring.info is not None
            for lane in ring.info.held.lanes
            if lane.tokens and lane.root == root_of(ring.info.model_fingerprint, tenant)
        )

    def history(self, lanes: tuple[HeldLane, ...]) -> History | None:
        """As branches of one history. A lane is read once, which takes a moment: beside the event loop."""
        branches = [self._history(lane) for lane in lanes]
        return replace(branches[0], others=tuple(branches[1:])) if branches else None

    def _history(self, lane: HeldLane) -> History:
        known = self._read.get(id(lane))
        if known is not None and known[0] is lane:
            return known[1]
        stream = self._tokenizer.detokenizer(skip_special=False)
        pieces, ends, end = [], [], 0
        for token in lane.tokens:
            pieces.append(stream.feed((token,)))
            end += len(pieces[-1])
            ends.append(end)
        history = History("".join(pieces), tuple(lane.tokens), ends=tuple(ends))
        self._read[id(lane)] = lane, history
        return history
