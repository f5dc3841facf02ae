"""A real model under a JSON schema: valid answers, the same tokens with and without drafts, on any number of stages."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import jsonschema
import pytest

from coordinator.requests import FinishReason, Request, SamplingSpec
from gateway.chat.grammar import Grammars
from gateway.chat.messages import Message
from gateway.chat.tokenizer import ChatTokenizer
from gateway.turns import GrammarKind, GrammarSpec
from tests.unit.real_ring import answered, smollm2_ring

_ADDRESS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "zip": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
_SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog", "goldfish"]},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2},
        "home": _ADDRESS,
    },
    "required": ["kind", "ages", "home"],
    "additionalProperties": False,
}
_QUESTION = "Describe a pet as JSON: kind, ages, home with city and zip."
_SAMPLINGS = (SamplingSpec(temperature=0.0), SamplingSpec(temperature=0.8, seed=5, top_p=0.95))


class Asker:
    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self._grammars = Grammars(tokenizer)
        self._prompt = tokenizer.render((Message("user", _QUESTION),)).token_ids

    def request(
        self, sampling: SamplingSpec, *, draft: bool = True, schema: object = _SCHEMA
    ) -> Request:
        """Without a schema: the same question, and any answer."""
        spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        return Request(
            self._prompt,
            sampling,
            max_new_tokens=120 if schema else 16,
            stop_tokens=self.tokenizer.stop_token_ids,
            draft=draft,
            constraint=None if schema is None else self._grammars.constraint(spec),
        )


@pytest.fixture(scope="module")
def asker(smollm2: ChatTokenizer) -> Asker:
    return Asker(smollm2)


async def test_answers_fit_their_schema_and_do_not_depend_on_drafts_stages_or_neighbours(
    smollm2_dir: Path, asker: Asker
) -> None:
    """Two stages, one turn after another; then three stages, and all turns at once."""
    free, single = asker.request(_SAMPLINGS[1], schema=None), []
    async with smollm2_ring(smollm2_dir, 15, 30, lanes=4) as driver:
        for sampling in _SAMPLINGS:
            tokens, done = await answered(driver, asker.request(sampling))
            assert done.reason is FinishReason.STOP
            assert done.timings.drafted > 0
            plain, undrafted = await answered(driver, asker.request(sampling, draft=False))
            assert undrafted.timings.drafted == 0
            assert plain == tokens
            jsonschema.validate(json.loads(asker.tokenizer.decode(tokens)), _SCHEMA)
            single.append(tokens)
        single.append((await answered(driver, free))[0])
    async with smollm2_ring(smollm2_dir, 8, 20, 30, lanes=4) as driver:
        asked = [*(asker.request(sampling) for sampling in _SAMPLINGS), free]
        together = await asyncio.gather(*(answered(driver, request) for request in asked))
    assert [tokens for tokens, _ in together] == single
    assert len(set(single)) == 3
