"""What an answer must look like: JSON schemas, regular expressions and Lark grammars become constraints, by llguidance.

Decides how a grammar is compiled for the served model's tokens and how far it may go. What may follow is llguidance's
word; a text is refused in its words too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from coordinator.constraints import allows
from coordinator.errors import ConstraintFailed, InvalidValue
from coordinator.prefixes import common_prefix
from gateway.turns import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

    from coordinator.constraints import Constraint
    from gateway.chat.detokenize import TokenBytes
    from gateway.chat.tokenizer import ChatTokenizer

# OpenAI takes schemas of 120,000 characters; the slowest of this size that was found compiles in 4 s.
LONGEST_GRAMMAR = 1 << 17
_LONGEST_REASON = 400
# Masks are made where everybody waits for them. Of a computer's time, a token's may take so long on average, and a
# turn's so much more; common grammars take a tenth. Ambiguous ones were seen to take 2 s a token.
_MASK_S = 0.02
_MORE_S = 1.0

# Between JSON's tokens: a space or two, or a new line and what it is indented by. A small model that may write more
# may write nothing else to the end of its tokens.
WHITE_SPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,40}"
_JSON_DEFAULTS: JsonCompileOptions = {"whitespace_pattern": WHITE_SPACE}


class Grammars:
    """Makes one job's constraint from a grammar. May be called from several threads at once; it takes a while."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._vocabulary: LLTokenizer | None = None

    def warm(self) -> None:
        """Reads the vocabulary in, which holds everybody up for as long as it takes, before somebody asks."""
        with suppress(InvalidValue):  # who asks for a grammar is told
            self._own_vocabulary("")

    def constraint(self, spec: GrammarSpec) -> Constraint:
        """Raises InvalidValue, whose field is the grammar's."""
        field = spec.field or spec.kind.value
        if len(spec.text) > LONGEST_GRAMMAR:
            reason = f"has {len(spec.text)} characters; at most {LONGEST_GRAMMAR} are taken"
            raise InvalidValue(field, reason)
        limits = LLParserLimits(verbose_errors=False)
        vocabulary = self._own_vocabulary(field)
        try:
            matcher = LLMatcher(vocabulary, _grammar(spec), log_level=0, limits=limits)
        except (ValueError, RecursionError) as error:
            raise InvalidValue(field, _short(str(error))) from error
        constraint = MatcherConstraint(matcher, self._unwound)
        try:
            constraint.masks((), ())  # the first takes longest, and here nobody else waits for it
        except ConstraintFailed as failed:
            raise InvalidValue(field, failed.reason) from failed
        return constraint

    @property
    def _unwound(self) -> frozenset[int]:
        table = self._tokenizer.token_bytes
        special = frozenset[int]() if table is None else table.special
        return special | self._tokenizer.stop_token_ids

    def _own_vocabulary(self, field: str) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._made_vocabulary(field)
            return self._vocabulary

    def _made_vocabulary(self, field: str) -> LLTokenizer:
        table, stops = self._tokenizer.token_bytes, sorted(self._tokenizer.stop_token_ids)
        if table is None:
            raise InvalidValue(field, "this model's tokenizer does not tell what its tokens spell")
        if not stops:
            raise InvalidValue(field, "this model has no token that ends an answer")
        words = _Words(self._tokenizer, table, stops[0])
        return LLTokenizer(TokenizerWrapper(words), eos_token=stops)


class _Words:
    """The vocabulary in the shape that llguidance reads."""

    bos_token_id = None

    def __init__(self, tokenizer: ChatTokenizer, table: TokenBytes, stop: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = stop
        self.tokens = [table.pieces.get(token, b"") for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(table.special)

    def __call__(self, text: str | bytes) -> list[int]:
        said = text.decode() if isinstance(text, bytes) else text
        return list(self._tokenizer.encode(said))


_Path: TypeAlias = Sequence[int]


class MatcherConstraint:
    """A Constraint by a matcher that follows the paths it is asked about, and goes back where they part."""

    def __init__(self, matcher: LLMatcher, unwound: frozenset[int]) -> None:
        """`unwound`: tokens that the matcher cannot take back, so that it must start over."""
        self._fresh = matcher
        self._unwound = unwound
        self._known: dict[int, bytes] = {}  # masks behind so many tokens of the path
        self._left_s = _MORE_S
        self._start_over()

    def masks(self, decided: _Path, drafts: _Path) -> tuple[bytes, ...]:
        began_s = time.thread_time()
        masks = self._masks(decided, drafts)
        if decided:  # the first is made where nobody waits
            self._spend(time.thread_time() - began_s, len(masks))
        return masks

    def _masks(self, decided: _Path, drafts: _Path) -> tuple[bytes, ...]:
        self._go_to(decided)
        masks = [self._mask()]
        self._known = {at: mask for at, mask in self._known.items() if at >= len(decided)}
        try:
            for draft in drafts:
                if not allows(masks[-1], draft):
                    break
                self._take(draft)
                masks.append(self._mask())
        except ConstraintFailed:
            pass  # behind a draft only: it has started over
        return tuple(masks)

    def forced(self, decided: _Path, limit: int) -> tuple[int, ...]:
        self._go_to(decided)
        forced = self._matcher.compute_ff_tokens()[:limit]
        if self._matcher.is_error():
            self._fail()
        return tuple(forced)

    def _start_over(self) -> None:
        self._matcher = self._fresh.deep_copy()
        self._path: list[int] = []
        self._known.clear()

    def _go_to(self, path: _Path) -> None:
        shared = common_prefix(self._path, path)
        back = self._path[shared:]
        if back:
            # llguidance 1.9.1 lands elsewhere when it rolls back over a special token, or over an end that it no longer
            # counts since it had stopped.
            if not self._unwound.isdisjoint(back) or not self._matcher.rollback(len(back)):
                self._start_over()
                shared = 0
            del self._path[shared:]
            self._known = {at: mask for at, mask in self._known.items() if at <= shared}
        for token in path[shared:]:
            self._take(token)

    def _take(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            self._fail()
        self._path.append(token)

    def _mask(self) -> bytes:
        mask = self._known.get(len(self._path))
        if mask is None:
            mask = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                self._fail()
            self._known[len(self._path)] = mask
        return mask

    def _spend(self, seconds: float, masks: int) -> None:
        self._left_s = min(self._left_s + _MASK_S * masks, _MORE_S) - seconds
        if self._left_s < 0:
            raise ConstraintFailed("it takes too long for each token")

    def _fail(self) -> None:
        """A matcher never leaves its error: the next question is answered by another one."""
        reason = _short(self._matcher.get_error())
        self._start_over()
        raise ConstraintFailed(reason)


def _grammar(spec: GrammarSpec) -> str:
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(spec.text, defaults=_JSON_DEFAULTS)
        case GrammarKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema('{"type":"object"}', defaults=_JSON_DEFAULTS)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(spec.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(spec.text)


def _short(reason: str) -> str:
    """llguidance's own words, without a dump of its state or of the whole grammar."""
    if reason.startswith("panic"):
        return "is too large or too complex"
    said = reason.partition("\n<")[0].strip() or "is of no use"
    return said if len(said) <= _LONGEST_REASON else said[: _LONGEST_REASON - 1] + "…"
