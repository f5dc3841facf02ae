"""The coordinator's settings. Defaults are written here once; the command line shows them from
here.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.errors import InvalidSetting

# The tail's logits of one verify segment are vocabulary x rows: 64 rows of 150,000 floats are 38 MB.
MOST_DRAFTS = 63

_COUNTS = (
    "frame_rows",
    "chunk_rows",
    "min_chunk_rows",
    "min_copy_rows",
    "node_rows",
    "queue_limit",
    "session_limit",
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
    # Seconds without the reply that is due before the epoch is given up. A CPU stage may compute a
    # frame for seconds.
    reply_timeout_s: float = 60.0
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
        if not self.reply_timeout_s > 0:
            raise InvalidSetting("reply_timeout_s", "must be greater than 0")
