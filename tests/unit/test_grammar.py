"""Grammars become constraints that are pure functions of what was said, for the tokens of the served model."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from coordinator.constraints import Constraint, allows
from coordinator.errors import ConstraintFailed, InvalidValue
from gateway.chat.byte_tokenizer import END, START, ByteTokenizer
from gateway.chat.grammar import LONGEST_GRAMMAR, Grammars
from gateway.chat.tokenizer import ChatTokenizer
from gateway.turns import GrammarKind, GrammarSpec

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "catfish", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "home": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]},
    },
    "required": ["name", "kind", "ages", "home"],
    "additionalProperties": False,
}


def schema(body: Any) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(body))


def regex(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text)


def lark(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.LARK, text)


def allowed(mask: bytes, size: int = 258) -> list[int]:
    assert mask
    return [token for token in range(size) if allows(mask, token)]


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def said(constraint: Constraint, text: str) -> list[int]:
    """What may follow the bytes of a text."""
    [mask] = constraint.masks(ids(text), ())
    return allowed(mask)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(ByteTokenizer())


@pytest.fixture(scope="session")
def real(smollm2: ChatTokenizer) -> Grammars:
    return Grammars(smollm2)


def test_bytes_follow_a_schema_and_then_only_the_end(grammars: Grammars) -> None:
    constraint = grammars.constraint(schema({"enum": ["ab", "ac"]}))
    assert said(constraint, "") == [ord('"')]
    assert said(constraint, '"a') == [ord("b"), ord("c")]
    assert said(constraint, '"ab"') == [END]


def test_an_end_that_is_possible_is_allowed_beside_what_may_go_on(grammars: Grammars) -> None:
    constraint = grammars.constraint(regex("a+"))
    assert said(constraint, "") == [ord("a")]
    assert said(constraint, "aa") == [ord("a"), END]


def test_masks_behind_drafts_end_at_the_first_that_may_not_stand_there(grammars: Grammars) -> None:
    constraint = grammars.constraint(regex("abc[de]"))
    masks = constraint.masks(ids("a"), ids("bcz"))
    assert [allowed(mask) for mask in masks] == [[ord("b")], [ord("c")], [ord("d"), ord("e")]]
    assert len(constraint.masks(ids("a"), ids("zzz"))) == 1


def test_behind_the_end_only_the_end_follows(grammars: Grammars) -> None:
    """A client that ignores the end goes on; what it may be told then is the end again."""
    constraint = grammars.constraint(regex("ab?"))
    for path in ((97, END), (97, 98, END, END), (97, END, END)):
        assert allowed(constraint.masks(path, ())[0]) == [END]
    assert said(constraint, "a") == [98, END]


def test_all_of_a_models_end_tokens_end_an_answer() -> None:
    class TwoEnds(ByteTokenizer):
        @property
        def stop_token_ids(self) -> frozenset[int]:
            return frozenset({START, END})

    constraint = Grammars(TwoEnds()).constraint(regex("ab?"))
    assert said(constraint, "a") == [98, START, END]
    for path in ((97, END, START), (97, START, END), (97, 98, START, END, START)):
        assert allowed(constraint.masks(path, ())[0]) == [START, END]
    assert said(constraint, "ab") == [START, END]


GRAMMARS = [
    schema(SCHEMA),
    schema({"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "number"}]}}),
    GrammarSpec(GrammarKind.JSON_OBJECT),
    regex("(foo|fo+b[ae]r)*x{2,4}"),
    lark(
        'start: "<" <|start|> WORD <|end|> ("," <|start|> NUM)*\nWORD: /[a-z]+/\nNUM: /[0-9]{1,3}/'
    ),
    lark('start: "(" start ")" | "."'),
]


@pytest.mark.parametrize("spec", GRAMMARS, ids=lambda spec: spec.kind.value)
@pytest.mark.parametrize("model", ["bytes", "smollm2"])
def test_a_mask_depends_on_the_tokens_alone_whatever_was_asked_before(
    spec: GrammarSpec, model: str, smollm2: ChatTokenizer
) -> None:
    """A walk with drafts right and wrong, ends and returns, against a constraint that was never asked before."""
    tokenizer = ByteTokenizer() if model == "bytes" else smollm2
    if model == "smollm2" and "<|start|>" in spec.text:
        spec = lark(spec.text.replace("<|start|>", "<|im_start|>").replace("<|end|>", "<|im_end|>"))
    grammars, size = Grammars(tokenizer), tokenizer.vocab_size
    walked = grammars.constraint(spec)
    dice = random.Random(7)
    path: list[int] = []
    for _ in range(25):
        drafts: list[int] = []
        for _ in range(dice.randint(0, 5)):
            mask = grammars.constraint(spec).masks((*path, *drafts), ())[0]
            drafts.append(_likely(dice, allowed(mask, size)))
        wrong = [*drafts, dice.randrange(size)] if dice.random() < 0.3 else drafts
        masks = walked.masks(path, wrong)
        fresh = grammars.constraint(spec)
        for count, mask in enumerate(masks):
            assert mask == fresh.masks((*path, *wrong[:count]), ())[0]
        assert len(masks) >= len(drafts) + 1
        path += drafts[: dice.randint(0, len(drafts))]
        if dice.random() < 0.2:
            path = path[: dice.randint(0, len(path))]


def _likely(dice: random.Random, tokens: Sequence[int]) -> int:
    """Structure now and then, and not only the rarest characters."""
    few = [token for token in tokens if token < 258]
    return dice.choice(few or tokens)


def test_a_walk_back_over_a_special_token_forgets_it(grammars: Grammars) -> None:
    """llguidance 1.9.1 lands in another state when such a token is rolled back."""
    constraint = grammars.constraint(lark('start: "a" <|start|> "b" <|start|>?'))
    assert said(constraint, "a") == [START]
    assert len(constraint.masks((97,), (START, 98, START))) == 4
    for path, follows in (((97, START), [98]), ((97,), [START]), ((), [97])):
        assert allowed(constraint.masks(path, ())[0]) == follows


def test_the_masks_of_a_real_vocabulary_are_those_of_its_bytes(
    real: Grammars, smollm2: ChatTokenizer
) -> None:
    table = smollm2.token_bytes
    assert table is not None
    constraint = real.constraint(regex("(ab|abc)+[0-9]"))
    [mask] = constraint.masks(smollm2.encode("ab"), ())
    bytes_of = {t: table.pieces.get(t, b"") for t in range(smollm2.vocab_size)}
    rest = [b"c", b"0", b"ab", b"a", b"abc", b"ca", b"cab", b"c0"]
    mine = {t for t, piece in bytes_of.items() if allows(mask, t) and t not in table.special}
    assert {bytes_of[t] for t in mine} >= {piece for piece in rest if piece in bytes_of.values()}
    for token in mine:
        text = b"ab" + bytes_of[token]
        assert grammars_accepts(text), text
    assert not any(allows(mask, token) for token in table.special)


def grammars_accepts(text: bytes) -> bool:
    """Whether (ab|abc)+[0-9] may begin like this, by trying all short endings."""
    import re

    pattern = re.compile(rb"(ab|abc)+[0-9]")
    ends = (b"", b"0", b"b0", b"ab0")
    return any(pattern.fullmatch(text + end) for end in ends)


def test_special_tokens_stay_out_of_strings_and_a_grammar_may_name_them(
    real: Grammars, smollm2: ChatTokenizer
) -> None:
    table = smollm2.token_bytes
    assert table is not None
    text = real.constraint(schema({"type": "string"}))
    [mask] = text.masks(smollm2.encode('"a'), ())
    assert not any(allows(mask, token) for token in table.special)
    [begin] = smollm2.encode("<|im_start|>")
    named = real.constraint(lark('start: <|im_start|> "x"'))
    assert allowed(named.masks((), ())[0], smollm2.vocab_size) == [begin]


def test_text_is_forced_where_nothing_else_is_possible(
    real: Grammars, smollm2: ChatTokenizer
) -> None:
    constraint = real.constraint(regex('\\{"temperature": [0-9]+\\}'))
    forced = constraint.forced((), 20)
    assert smollm2.decode(forced).startswith('{"temperature')
    assert len(constraint.forced((), 2)) == 2
    assert constraint.masks((), forced)[0]
    assert len(constraint.masks((), forced)) == len(forced) + 1


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (GrammarSpec(GrammarKind.JSON_SCHEMA, "{"), "EOF"),
        (schema([1]), "object"),
        (schema({"type": "objct"}), "objct"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"$ref": "https://example.com/schema"}), "example.com"),
        (schema({"$ref": "#/$defs/nowhere"}), "nowhere"),
        (schema({"enum": []}), "Unsatisfiable"),
        (schema(False), "object"),
        (schema({"type": "integer", "minimum": 5, "maximum": 2}), "minimum"),
        (regex("((a"), "unclosed"),
        (regex("(" * 20_000 + ")" * 20_000), ""),
        (lark("start: nowhere"), "nowhere"),
        (lark("start: <|nowhere|>"), "nowhere"),
        (lark("start: " + "(" * 20_000 + ")" * 20_000), "nested"),
        (GrammarSpec(GrammarKind.JSON_SCHEMA, "[" * 100_000), "recursion"),
        (regex("a" * (LONGEST_GRAMMAR + 1)), "at most"),
        (schema({"anyOf": [{"type": "object", "properties": {"p": {"const": n}}} for n in range(2500)]}), ""),
    ],
    ids=lambda value: value.text[:24] if isinstance(value, GrammarSpec) else "",
)  # fmt: skip
def test_a_grammar_that_is_no_use_is_refused_in_words(
    grammars: Grammars, spec: GrammarSpec, words: str
) -> None:
    with pytest.raises(InvalidValue) as caught:
        grammars.constraint(spec)
    assert caught.value.field == spec.kind.value
    assert words in caught.value.reason
    assert len(caught.value.reason) <= 500
    assert "panic" not in caught.value.reason


def test_a_schema_that_refers_to_itself_is_served(grammars: Grammars) -> None:
    node = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["next"],
        "additionalProperties": False,
    }
    constraint = grammars.constraint(schema({"$ref": "#/$defs/node", "$defs": {"node": node}}))
    text = '{"next":' * 30 + "null" + "}" * 30
    assert said(constraint, text) == [END]


def test_white_space_between_json_tokens_comes_to_an_end(grammars: Grammars) -> None:
    """Small models love to break lines for ever."""
    constraint = grammars.constraint(GrammarSpec(GrammarKind.JSON_OBJECT))
    assert ord("\n") in said(constraint, "{")
    assert ord("\n") not in said(constraint, "{\n")
    assert ord(" ") in said(constraint, "{\n" + " " * 39)
    assert ord(" ") not in said(constraint, "{\n" + " " * 40)


def test_a_limit_met_on_the_way_is_a_typed_error_and_only_there(grammars: Grammars) -> None:
    """Too many ways to go on: 3,000 optional properties that begin alike. Behind a draft it only ends the masks."""
    wide = {"type": "object", "properties": {f"p{n}": {} for n in range(3000)}}
    constraint = grammars.constraint(schema({"type": "array", "items": wide}))
    path = ids('[{"p')
    assert 1 < len(constraint.masks((), path)) < len(path)
    for _ in range(2):
        with pytest.raises(ConstraintFailed, match="items"):
            constraint.masks(path, ())
        assert said(constraint, "["), "and it goes on to answer for other paths"


def test_a_model_whose_tokens_spell_nothing_known_takes_no_grammar() -> None:
    class Opaque(ByteTokenizer):
        @property
        def token_bytes(self) -> None:  # type: ignore[override]
            return None

    class Endless(ByteTokenizer):
        @property
        def stop_token_ids(self) -> frozenset[int]:
            return frozenset()

    for tokenizer in (Opaque(), Endless()):
        with pytest.raises(InvalidValue, match="model"):
            Grammars(tokenizer).constraint(regex("a"))
