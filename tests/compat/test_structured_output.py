"""Structured output over gRPC: what a client asks for is what the whole answer looks like, or it is told why not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import jsonschema
import pytest

from coordinator.requests import FinishReason, SamplingSpec
from gateway.chat.byte_tokenizer import END
from gateway.client import Client, error_info
from gateway.pb import generation_pb2 as pb
from gateway.rpc.client_convert import generate_request
from gateway.rpc.convert import turn_request
from gateway.turns import (
    GrammarKind,
    GrammarSpec,
    TextPrompt,
    TurnDelta,
    TurnFinished,
    TurnRequest,
)

Sites = Callable[..., AbstractAsyncContextManager[Any]]

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "catfish", "dog"]},
        "name": {"type": "string", "maxLength": 6, "pattern": "^[a-z]+$"},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 2},
    },
    "required": ["kind", "name", "ages"],
    "additionalProperties": False,
}
JSON = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))


def turn(grammar: GrammarSpec | None, **more: Any) -> TurnRequest:
    settings = {"sampling": SamplingSpec(temperature=0.0), "max_tokens": 400} | more
    return TurnRequest(TextPrompt("a pet"), grammar=grammar, **settings)


async def answer(client: Client, asked: TurnRequest) -> tuple[str, TurnFinished]:
    async with client.generate(asked) as stream:
        events = [event async for event in stream]
    assert isinstance(events[-1], TurnFinished)
    text = "".join(event.text for event in events if isinstance(event, TurnDelta))
    return text, events[-1]


async def refused(client: Client, asked: TurnRequest) -> tuple[str, dict[str, str]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(client, asked)
    info = error_info(caught.value)
    assert info is not None
    return info.reason, info.metadata


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_an_answer_keeps_to_its_schema_and_ends_by_itself(
    site: Sites, temperature: float, draft: bool
) -> None:
    async with site() as it:
        for seed in range(1, 6):
            sampling = SamplingSpec(temperature=temperature, seed=seed)
            text, done = await answer(it.client, turn(JSON, sampling=sampling, draft=draft))
            jsonschema.validate(json.loads(text), SCHEMA)
            assert (done.reason, done.matched_stop) == (FinishReason.STOP, END)
            plain, _ = await answer(it.client, turn(JSON, sampling=sampling, draft=not draft))
            assert plain == text


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (GrammarSpec(GrammarKind.REGEX, "(yes|no), [0-9]{3}"), r"(yes|no), [0-9]{3}"),
        (GrammarSpec(GrammarKind.LARK, 'start: "<" WORD ">"\nWORD: /[a-f]{2}/'), r"<[a-f]{2}>"),
    ],
)
async def test_an_answer_is_a_whole_match_of_its_grammar(
    site: Sites, grammar: GrammarSpec, pattern: str
) -> None:
    async with site() as it:
        text, done = await answer(it.client, turn(grammar))
        assert re.fullmatch(pattern, text)
        assert done.reason is FinishReason.STOP


async def test_any_object_begins_as_one_and_is_cut_off_by_max_tokens(site: Sites) -> None:
    async with site() as it:
        anything = GrammarSpec(GrammarKind.JSON_OBJECT)
        whole, done = await answer(it.client, turn(anything))
        assert isinstance(json.loads(whole), dict)
        assert done.reason is FinishReason.STOP
        text, done = await answer(it.client, turn(JSON, max_tokens=9))
        assert text.startswith("{")
        assert done.reason is FinishReason.LENGTH
        assert done.usage.generated_tokens == 9


async def test_turns_with_and_without_a_grammar_run_beside_each_other(site: Sites) -> None:
    async with site() as it:
        free, _ = await answer(it.client, turn(None))
        bound, _ = await answer(it.client, turn(JSON))
        assert (await answer(it.client, turn(None)))[0] == free
        assert (await answer(it.client, turn(JSON)))[0] == bound
        assert free != bound


async def test_a_client_that_ignores_the_end_is_told_it_again_and_again(site: Sites) -> None:
    async with site() as it:
        asked = turn(GrammarSpec(GrammarKind.REGEX, "ok"), ignore_eos=True, max_tokens=6)
        async with it.client.generate(asked) as stream:
            events = [event async for event in stream]
        ids = [i for event in events if isinstance(event, TurnDelta) for i in event.token_ids]
        assert ids == [*b"ok", END, END, END, END]


@pytest.mark.parametrize(
    ("grammar", "field"),
    [
        (GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "objct"}'), "json_schema"),
        (GrammarSpec(GrammarKind.JSON_SCHEMA, "[" * 5000), "json_schema"),
        (GrammarSpec(GrammarKind.REGEX, "(("), "regex"),
        (GrammarSpec(GrammarKind.LARK, "start: nowhere"), "lark_grammar"),
    ],
)
async def test_a_grammar_that_is_no_use_is_named_before_anything_runs(
    site: Sites, grammar: GrammarSpec, field: str
) -> None:
    async with site() as it:
        reason, metadata = await refused(it.client, turn(grammar))
        assert (reason, metadata["field"]) == ("INVALID_VALUE", field)
        assert it.driver.status().counts.frames == 0


async def test_a_grammar_that_meets_a_limit_ends_its_own_turn_only(site: Sites) -> None:
    wide = {"type": "object", "properties": {f"p{n}": {} for n in range(3000)}, "required": ["p1"]}
    grammar = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": wide}))
    async with site() as it:
        reasons = {(await refused(it.client, turn(grammar)))[0] for _ in range(2)}
        assert reasons == {"CONSTRAINT_FAILED"}
        text, _ = await answer(it.client, turn(JSON))
        jsonschema.validate(json.loads(text), SCHEMA)
        assert it.driver.status().epoch == 0


@pytest.mark.parametrize("kind", GrammarKind)
def test_every_kind_of_grammar_crosses_the_wire(kind: GrammarKind) -> None:
    spec = GrammarSpec(kind, "" if kind is GrammarKind.JSON_OBJECT else "x")
    assert turn_request(generate_request(turn(spec)), None).grammar == spec


def test_no_object_asked_for_is_no_grammar() -> None:
    message = pb.GenerateRequest(text="x", json_object=False)
    assert turn_request(message, None).grammar is None
