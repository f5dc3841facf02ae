"""The boundary between a model's files and us: whatever a library says of damaged files becomes one ModelUnusable.

Decides how foreign errors are worded: one line, with what was being done in front. It may not hide a bug of ours: the
traceback goes into the log. Folders come from anywhere, so readers of them raise whatever they like; every public
entry that reads one does so inside `unusable`, and none of them catches errors by kind.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.errors import ModelUnusable, RingserveError

log = logging.getLogger(__name__)

_LONGEST = 240
# Their own words say enough; of any other error its kind is said too ("KeyError: 'nope'").
_SPEAKING = (OSError, ValueError, ModelUnusable)


@contextmanager
def unusable(what: str, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raises ModelUnusable(f"{what}: ...") for any error but ours, those `passing`, and want of memory."""
    ours: tuple[type[Exception], ...] = (RingserveError, MemoryError, *passing)
    try:
        yield
    except ours:
        raise
    except Exception as error:
        log.debug("refused because=%r", what, exc_info=True)
        raise ModelUnusable(f"{what}: {in_one_line(error)}") from error


def in_one_line(error: BaseException) -> str:
    """The first line of what an error says, and the next one where the first only leads to it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    for line in lines[1:]:
        if not text.endswith(":"):
            break
        text = f"{text} {line}"
    if not text or not isinstance(error, _SPEAKING):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3].rstrip() + "..."
