"""A fake model that says what it was told to say, where its rows are right; it decides nothing else.

Where a grammar does not let the script go on, or the rows are wrong, it speaks its own language of hashes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.constraints import allows
from coordinator.requests import SamplingSpec
from fakering.model import FakeModel, context_hash


@dataclass(frozen=True, slots=True)
class ScriptedModel(FakeModel):
    """`opening`: the tokens with which an answer begins in a prompt; `script`: what is answered to a prompt in which a
    key stands, as tokens both; the key that stands last counts.
    """

    opening: tuple[int, ...] = ()
    script: Mapping[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def choose(
        self, activation: int, history: Sequence[int], sampling: SamplingSpec, mask: bytes = b""
    ) -> int:
        token = self._scripted(_written(history))
        if token is not None and allows(mask, token) and context_hash(history) == activation:
            return token
        return FakeModel.choose(self, activation, history, sampling, mask)

    def _scripted(self, history: str) -> int | None:
        opening = _written(self.opening)
        prompt, found, said = history.rpartition(opening)
        if not opening or not found:
            return None
        places = {key: prompt.rfind(_written(key)) for key in self.script}
        key = max(places, key=lambda each: places[each], default=())
        answer = self.script.get(key, ())
        if places.get(key, -1) < 0 or not _written(answer).startswith(said):
            return None
        return answer[len(said)] if len(said) < len(answer) else self.end_token


def _written(tokens: Sequence[int]) -> str:
    """A letter a token: texts are searched fast."""
    return "".join(map(chr, tokens))
