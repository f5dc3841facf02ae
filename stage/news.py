"""What a stage's process warns of, kept until its gateway asks: operators read the gateway's log, not one per host.

Decides how much of it is kept. It is written to the process's own log all the same.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

# More at once is one cause many times over.
_KEPT = 20
_OURS = "stage"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a log, without its time."""

    logger: str
    level: int
    text: str

    def tell(self, stage: int) -> None:
        """Into the log of this process."""
        logging.getLogger(self.logger).log(self.level, "%s stage=%d", self.text, stage)


class News(logging.Handler):
    """Any thread may log, and another one take."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[Line] = deque(maxlen=_KEPT)

    def listen(self) -> None:
        root = logging.getLogger()
        if not root.handlers:
            # What Python does where there is no handler, which there is one of from now on.
            root.addHandler(logging.StreamHandler())
        logging.getLogger(_OURS).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(Line(record.name, record.levelno, record.getMessage()))
        except Exception:  # as every handler: a line that cannot be said ends nobody's work
            self.handleError(record)

    def take(self) -> tuple[Line, ...]:
        """What has been logged since this was asked last."""
        taken = []
        while self._lines:
            taken.append(self._lines.popleft())
        return tuple(taken)
