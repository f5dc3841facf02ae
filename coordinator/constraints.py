"""What may follow what a job has said: the port behind which a grammar stands, and how a job asks it.

Decides what a mask means, and that a constraint which fails costs its own job and nothing else. It knows no grammar,
and it samples nothing: the tail applies the masks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from coordinator.errors import ConstraintFailed, RingserveError

_log = logging.getLogger(__name__)


class Constraint(Protocol):
    """One job's rule for its generated tokens: a pure function of them, whatever it keeps for speed.

    A mask has one bit a token id, the lowest id in the lowest bit of the first byte. Ids beyond its end may not
    follow; an empty mask lets any follow.
    """

    def masks(self, decided: Sequence[int], drafts: Sequence[int]) -> tuple[bytes, ...]:
        """What may follow `decided`, and then what may follow each of `drafts`, up to the first that may not stand
        where it does, or behind which no answer can be had: drafts may cost no job its life. Asked again and again as a
        job goes on; what were drafts once are then `decided`, or wrong.
        """
        ...

    def forced(self, decided: Sequence[int], limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that the rule leaves little choice but to say next: good drafts, no promise."""
        ...


def asked_masks(
    constraint: Constraint, decided: Sequence[int], drafts: Sequence[int]
) -> tuple[bytes, ...]:
    """The constraint's masks: at least one, and each lets something follow. Raises ConstraintFailed."""
    try:
        masks = constraint.masks(decided, drafts)
    except RingserveError:
        raise
    except Exception as error:  # another's code: whatever it is, the ring and its other jobs go on
        raise ConstraintFailed(f"{type(error).__name__}: {error}") from error
    if not 0 < len(masks) <= len(drafts) + 1:
        raise ConstraintFailed(f"{len(masks)} masks for {len(drafts)} drafts")
    if not all(lets_any(mask) for mask in masks):
        raise ConstraintFailed("no token may follow")
    return masks


def forced_drafts(constraint: Constraint, decided: Sequence[int], limit: int) -> tuple[int, ...]:
    """The constraint's own drafts. If it fails here, it is heard of when it is asked for masks."""
    try:
        return constraint.forced(decided, limit)[:limit]
    except Exception as error:
        _log.debug("no drafts of a constraint: %s", error)
        return ()


def lets_any(mask: bytes, vocab_size: int | None = None) -> bool:
    """Whether the mask lets a token follow, of a vocabulary where one is given."""
    if not mask or vocab_size is None or len(mask) * 8 <= vocab_size:
        return not mask or any(mask)
    whole, rest = divmod(vocab_size, 8)
    return any(mask[:whole]) or bool(mask[whole] & ((1 << rest) - 1))


def allows(mask: bytes, token: int) -> bool:
    """Whether the mask lets this token follow."""
    if not mask:
        return True
    place = token >> 3
    return place < len(mask) and bool(mask[place] >> (token & 7) & 1)
