"""What could have been reused, reckoned from the log of requests alone: no ring, ledger or lane is asked.

The reference is an unlimited cache on each ring: it holds every prompt from the moment that its turn has begun and
every answer from the moment that it has ended, the answer's last token excepted, which no server has computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.prefixes import common_prefix
from gateway.bench.endpoints import Answered


def reusable_tokens(turns: Sequence[Answered]) -> list[int]:
    """For each turn, in the order given: the longest prefix of its prompt that its ring had seen."""
    return [_reusable(turn, [other for other in turns if other is not turn]) for turn in turns]


def _reusable(turn: Answered, others: Sequence[Answered]) -> int:
    seen = [_rows(other, turn) for other in others if _before(other, turn)]
    longest = max((common_prefix(rows, turn.prompt) for rows in seen), default=0)
    # One token is always computed, to go on from.
    return min(longest, len(turn.prompt) - 1)


def _before(other: Answered, turn: Answered) -> bool:
    return other.ring == turn.ring and other.started_s < turn.started_s


def _rows(other: Answered, turn: Answered) -> tuple[int, ...]:
    ended = other.last_s <= turn.started_s
    return (*other.prompt, *other.tokens[:-1]) if ended else other.prompt
