"""The fake model: the next token is a hash of the rows that a stage actually reads.

This file decides what a row holds, what an activation is and which token follows. It has two forms of one
function: `Rows.write_and_read` works on a stage's own buffers, `FakeModel.next_token` on token ids alone.
They agree only when every row of every stage is right; it may not ask a ledger what ought to be there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from coordinator.constraints import Constraint, allows
from coordinator.errors import InvalidSetting
from coordinator.requests import GREEDY, RowLogprobs, SamplingSpec

Hashes: TypeAlias = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's constants (Steele, Lea, Flood 2014)
_MUL_A = 0xBF58476D1CE4E5B9
_MUL_B = 0x94D049BB133111EB
# What a lane goes on from where it has no state: nothing that any tokens hash to, as far as chance goes.
_NO_STATE = 0x5EED5EED5EED5EED


def mix(value: int) -> int:
    """splitmix64's finalizer: a bijection of 64 bits that keeps 0."""
    value = ((value ^ (value >> 30)) * _MUL_A) & _MASK
    value = ((value ^ (value >> 27)) * _MUL_B) & _MASK
    return value ^ (value >> 31)


def _mix_all(values: Hashes) -> Hashes:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MUL_A)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MUL_B)
    return values ^ (values >> np.uint64(31))


def context_hashes(tokens: Hashes) -> Hashes:
    """For each row the hash of the tokens up to it; one token elsewhere changes it from there on."""
    places = np.arange(1, len(tokens) + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return np.cumsum(_mix_all(tokens + places), dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Copies of a lane's rows from `start` on, as they really were."""

    start: int
    tokens: Hashes
    activations: Hashes
    state: int | None = None  # the recurrent state behind the last of them

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Rows:
    """One stage's buffers. Each row keeps its token and the activation that it was computed from.

    Nothing is ever cleared but by `wipe`: a void row holds whatever was there, as real buffers do.
    """

    def __init__(self, lanes: int, max_rows: int, state_rows: int = 0) -> None:
        """`state_rows`: with recurrent layers, how many rows back from its end a lane's state is kept."""
        self._state_rows = state_rows
        self._states: list[dict[int, int]] = [{} for _ in range(lanes)]  # by row count
        self.tokens = np.zeros((lanes, max_rows), dtype=np.uint64)
        self.activations = np.zeros((lanes, max_rows), dtype=np.uint64)

    def wipe(self) -> None:
        self.tokens[:] = 0
        self.activations[:] = 0
        for states in self._states:
            states.clear()

    def copy(self, source: int, target: int, rows: int) -> None:
        self.tokens[target, :rows] = self.tokens[source, :rows]
        self.activations[target, :rows] = self.activations[source, :rows]
        self._states[target] = _only(rows, self._states[source].get(rows))

    def save(self, lane: int, start: int, end: int, *, state: bool = False) -> KeptRows:
        return KeptRows(
            start,
            self.tokens[lane, start:end].copy(),
            self.activations[lane, start:end].copy(),
            self._states[lane].get(end) if state else None,
        )

    def restore(self, lane: int, start: int, end: int, kept: KeptRows) -> None:
        """Rows [start, end) of what was kept."""
        part = slice(start - kept.start, end - kept.start)
        self.tokens[lane, start:end] = kept.tokens[part]
        self.activations[lane, start:end] = kept.activations[part]
        self._states[lane] = _only(end, kept.state if end == kept.end else None)

    def state(self, lane: int, rows: int) -> int | None:
        """What the lane's recurrent layers would go on from behind so many rows, if they can."""
        return self._states[lane].get(rows)

    def history(self, lane: int, row: int) -> tuple[int, ...]:
        return tuple(int(token) for token in self.tokens[lane, : row + 1])

    def write_and_read(
        self, lane: int, start: int, tokens: Sequence[int], received: Hashes | None
    ) -> Hashes:
        """Writes rows from `start` and reads every row up to them; returns the new rows' activations.

        `received` is what the stage before made of these rows; the first stage gets none. A right row's
        activation is the context hash, on any stage, so the number of stages does not show. A row whose
        token or whose kept activation is wrong spoils every row that reads it.
        """
        end = start + len(tokens)
        self.tokens[lane, start:end] = np.asarray(tokens, dtype=np.uint64)
        context = context_hashes(self.tokens[lane, :end])
        self.activations[lane, start:end] = context[start:] if received is None else received
        wrong = self.activations[lane, :end] ^ context
        spoiled: Hashes = context + np.cumsum(_mix_all(wrong), dtype=np.uint64)
        return spoiled[start:] + np.uint64(self._pass_states(lane, start, context))

    def _pass_states(self, lane: int, start: int, context: Hashes) -> int:
        """Goes on from the state at `start`, and returns how wrong it was: 0 where there is none to be wrong."""
        if not self._state_rows:
            return 0
        end, states = len(context), self._states[lane]
        right = int(context[start - 1]) if start else 0
        error = mix(right ^ states.get(start, _NO_STATE)) if start else 0
        oldest = end - self._state_rows
        kept = {rows: state for rows, state in states.items() if oldest <= rows <= start}
        fresh = range(max(start + 1, oldest), end + 1)
        self._states[lane] = kept | {rows: int(context[rows - 1]) ^ error for rows in fresh}
        return error


def _only(rows: int, state: int | None) -> dict[int, int]:
    return {} if state is None else {rows: state}


@dataclass(frozen=True, slots=True)
class FakeModel:
    """A language of hashes. `quoting`: how often the next token repeats what followed the same two (or one)
    tokens before, so that a drafter is sometimes right. Without an `end_token` an answer never ends by itself.
    Generated ids lie in [low, high). Of a sampling spec only temperature (0 or not), seed and logprobs count.
    """

    vocab_size: int
    seed: int = 0
    quoting: float = 0.5
    end_token: int | None = None
    end_one_in: int = 64  # tokens; the mean length of an answer
    low: int = 0
    high: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low < self._high <= self.vocab_size:
            raise InvalidSetting("high", f"ids [{self.low}, {self._high}) of {self.vocab_size}")
        if not 0.0 <= self.quoting <= 1.0:
            raise InvalidSetting("quoting", f"must be between 0 and 1, got {self.quoting}")
        if self.end_one_in < 1:
            raise InvalidSetting("end_one_in", f"must be at least 1, got {self.end_one_in}")

    @property
    def _high(self) -> int:
        return self.vocab_size if self.high is None else self.high

    def choose(
        self, activation: int, history: Sequence[int], sampling: SamplingSpec, mask: bytes = b""
    ) -> int:
        """The token sampled at the last row of `history`, where the tail got `activation`: what the model would say,
        or else one of those that the mask lets follow.
        """
        key = mix(activation ^ mix(self.seed + 1))
        if sampling.temperature > 0.0:
            key = mix(key ^ mix((sampling.seed ^ (len(history) * _GOLDEN)) & _MASK))
        token = self._say(key, history)
        if allows(mask, token):
            return token
        allowed = [token for token in range(self.vocab_size) if allows(mask, token)]
        return allowed[mix(key ^ 4) % len(allowed)]

    def _say(self, key: int, history: Sequence[int]) -> int:
        if self.end_token is not None and mix(key ^ 1) % self.end_one_in == 0:
            return self.end_token
        if mix(key ^ 2) < self.quoting * (1 << 64):
            quoted = _what_followed(history)
            if quoted not in (None, self.end_token) and self.low <= quoted < self._high:
                return quoted
        return self.low + mix(key ^ 3) % (self._high - self.low)

    def logprobs(self, activation: int, token: int, alternatives: int) -> RowLogprobs:
        """Made-up values: negative, falling, the chosen token first."""
        chosen = -((mix(activation) % 1000) + 1) / 1000
        count = min(alternatives, self.vocab_size)
        top = tuple(((token + n) % self.vocab_size, chosen - n) for n in range(count))
        return RowLogprobs(chosen, top)

    # The oracle: what must come out, from token ids alone and in plain integers.

    def next_token(self, tokens: Sequence[int], sampling: SamplingSpec = GREEDY) -> int:
        """What a ring with nothing but right rows samples after `tokens`."""
        return self.oracle(tokens, 1, sampling)[0]

    def oracle(
        self,
        tokens: Sequence[int],
        count: int,
        sampling: SamplingSpec = GREEDY,
        stop: Collection[int] = (),
        constraint: Constraint | None = None,
    ) -> tuple[int, ...]:
        """The answer to a prompt: `count` tokens, or fewer when one of `stop` comes, which is then the last."""
        history = list(tokens)
        context = context_hash(history)
        while len(history) < len(tokens) + count:
            said = history[len(tokens) :]
            mask = b"" if constraint is None else constraint.masks(said, ())[0]
            token = self.choose(context, history, sampling, mask)
            context = _extended(context, len(history), token)
            history.append(token)
            if token in stop:
                break
        return tuple(history[len(tokens) :])


def _extended(context: int, row: int, token: int) -> int:
    return (context + mix((token + (row + 1) * _GOLDEN) & _MASK)) & _MASK


def context_hash(tokens: Sequence[int]) -> int:
    """What the last of right rows makes of them."""
    context = 0
    for row, token in enumerate(tokens):
        context = _extended(context, row, token)
    return context


def _what_followed(history: Sequence[int]) -> int | None:
    """The token after the latest earlier place of the last two tokens, else of the last one."""
    for width in (2, 1):
        tail = tuple(history[-width:])
        for start in range(len(history) - width - 1, -1, -1):
            if (
                history[start + width - 1] == tail[-1]
                and tuple(history[start : start + width]) == tail
            ):
                return history[start + width]
    return None
