"""The coordinator's settings. Defaults are written here once; the command line shows them from
here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coordinator.errors import InvalidSetting

# The tail's logits of one verify segment are vocabulary x rows: 64 rows of 150,000 floats are 38 MB.
MOST_DRAFTS = 63

# What clients get at both ends: in the coordinator, and where their sockets are.
UNREAD_S = 60.0

_COUNTS = (
    "frame_rows",
    "chunk_rows",
    "min_chunk_rows",
    "min_copy_rows",
    "node_rows",
    "queue_limit",
    "unread_tokens",
    "session_limit",
    "heal_attempts",
)


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Raises InvalidSetting."""

    # Rows of one frame. A frame holds the stage that computes it: at about 200 rows/s (SmolLM2, one
    # CPU core) 256 rows are 1.3 s; on a GPU the same rows are tens of milliseconds.
    frame_rows: int = 256
    # Rows of one prefill chunk. Two stages are both busy from the second chunk on.
    chunk_rows: int = 128
    # A message boundary closer than this to the last cut starts no chunk: GEMMs of few rows waste
    # weight reads.
    min_chunk_rows: int = 32
    # Drafts of one verify frame, at most: how many are sent is learned from how many were right. Beyond 16
    # rows a frame on a CPU core costs more than twice a step of one row.
    max_drafts: int = 15
    # How much longer than undisturbed a decoding job's step may take while others prefill beside it.
    # Steps vary: at 2.1 their p95 stays below 3 on two busy CPU cores.
    max_stretch: float = 2.1
    # Jobs that may wait for a lane.
    queue_limit: int = 64
    # Prompt tokens to be computed that may wait with them; what is held already costs nothing. None: two minutes' worth
    # of prefill as measured, a lane's rows at least. One job may always wait.
    queue_tokens: int | None = None
    # Tokens of an answer that may lie unread before its job rests: seconds of a fast answer. It goes on at half of it.
    unread_tokens: int = 256
    # Seconds that nothing of them may be read before the job is ended.
    unread_s: float = UNREAD_S
    # Seconds without the reply that is due, beyond what frames of its size are known to take, before the epoch is
    # given up. Stages that die or hang are noticed sooner; this is for what is lost on the way.
    reply_timeout_s: float = 30.0
    # Seconds that an epoch may take to open: a lost stage's process starts and loads its weights, 20 GB from a disk
    # that reads 100 MB/s.
    heal_timeout_s: float = 300.0
    # Openings in a row without a good reply before the ring is given up, and the wait before the second, which then
    # doubles: 0.5 + 1 + 2 + 4 s. And how many epochs may end under one job before it has another token.
    heal_attempts: int = 5
    heal_backoff_s: float = 0.5
    # A shared prefix shorter than this is prefilled anew rather than copied into another lane.
    min_copy_rows: int = 16
    # Rows of a chain node: 3 MB of SmolLM2 in float32, 4 MB of a 27B model in bfloat16. A conversation of 100,000
    # tokens is a chain of 1,600, and the part of a block that is lost at its end costs little.
    node_rows: int = 64
    # Sessions whose lengths and histories are remembered.
    session_limit: int = 4096

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise InvalidSetting(name, f"must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.max_drafts <= MOST_DRAFTS:
            raise InvalidSetting(
                "max_drafts", f"must be between 0 and {MOST_DRAFTS}, got {self.max_drafts}"
            )
        if self.chunk_rows > self.frame_rows:
            raise InvalidSetting("chunk_rows", "must not be larger than frame_rows")
        if not self.max_stretch >= 1:
            raise InvalidSetting("max_stretch", "must be at least 1")
        if self.queue_tokens is not None and self.queue_tokens < 1:
            raise InvalidSetting("queue_tokens", f"must be at least 1, got {self.queue_tokens}")
        for name in ("reply_timeout_s", "heal_timeout_s", "heal_backoff_s", "unread_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InvalidSetting(name, f"must be greater than 0, got {getattr(self, name)}")
