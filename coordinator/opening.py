"""What the driver awaits of a ring, an epoch's opening and the replies: whatever goes wrong there is a loss, and what
the scheduler is told of one.

It decides nothing: what follows from a loss is the scheduler's business.
"""

from __future__ import annotations

import asyncio
import logging

from coordinator import events
from coordinator.errors import RingLost
from coordinator.frames import Epoch, Reply
from coordinator.held import Holding
from coordinator.ring import Ring

_log = logging.getLogger(__name__)


async def opened(ring: Ring, epoch: Epoch, within_s: float) -> Holding:
    """Raises RingLost, and nothing else."""
    try:
        async with asyncio.timeout(within_s):
            return await ring.open_epoch(epoch)
    except RingLost:
        raise
    except TimeoutError as late:
        raise RingLost(None, f"it did not heal within {within_s:g} s") from late
    except Exception as bug:
        # The rim: a bug of ours costs attempts, and then the ring; without a word its jobs would wait for ever.
        _log.critical("epoch=%d was not opened", epoch, exc_info=bug)
        raise RingLost(None, f"{type(bug).__name__}: {bug}") from bug


async def replied(ring: Ring) -> Reply:
    """The ring's next reply. Raises RingLost, and nothing else."""
    try:
        return await ring.next_reply()
    except RingLost:
        raise
    except Exception as bug:
        # The rim, as above: without a reader no reply would be heard of before it is overdue.
        _log.critical("a reply could not be read", exc_info=bug)
        raise RingLost(None, f"{type(bug).__name__}: {bug}") from bug


def broken(epoch: Epoch, lost: RingLost, now: float) -> events.RingBroken:
    return events.RingBroken(epoch, str(lost), now, lost.for_good)


def failed(epoch: Epoch, lost: RingLost, now: float) -> events.EpochFailed:
    return events.EpochFailed(epoch, str(lost), now, lost.for_good)
