"""The text side of one running turn: sampled ids in, what a client may be shown out.

It decides where the answer ends as text: at a stop string or a stop token, neither of which is shown. It holds back
what may be the beginning of a stop string or half a character. It cancels nothing: the service does, when `matched`
is set.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.requests import Finished, FinishReason, TokenDelta
from gateway.chat.messages import Message
from gateway.chat.parsing.writer import merged
from gateway.chat.parts import AnswerParser, AnswerPart, message_of
from gateway.chat.stops import StopMatcher
from gateway.chat.tokenizer import ChatTokenizer
from gateway.turns import TurnDelta, TurnFinished

# Tokens that a stop string may reach back over, when looking for the ids that spell only what was shown.
_LONGEST_STOP_TOKENS = 32


class Answer:
    """Raises InvalidValue("stop") for stop strings that cannot be looked for."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        stop: Sequence[str],
        stop_tokens: frozenset[int],
        parser: AnswerParser | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._parser = parser
        self._skips_special = parser is None or not parser.reads_special
        self._letters = tokenizer.detokenizer(skip_special=self._skips_special)
        self._matcher = StopMatcher(stop)
        self._stop_tokens = stop_tokens
        self._shown: list[str] = []
        self._parts: list[AnswerPart] = []
        self.token_ids: list[int] = []
        self._thought_tokens = 0
        self.matched: str | int | None = None

    def feed(self, delta: TokenDelta) -> TurnDelta:
        """What to send for these tokens. Those behind the end of the answer are dropped."""
        taken = 0
        text = ""
        parts: list[AnswerPart] = []
        for token in delta.tokens:
            if self.matched is not None:
                break
            taken += 1
            said = self._take(token)
            text += said
            parts += self._parsed(said)
        self._shown.append(text)
        told = self._told(parts)
        return TurnDelta(delta.tokens[:taken], text, delta.logprobs[:taken], told)

    def _parsed(self, text: str) -> tuple[AnswerPart, ...]:
        """What one token brings; it is a thought's when one is open in front of it or behind it."""
        if self._parser is None:
            return ()
        thinking = self._parser.thinking
        parts = self._parser.feed(text)
        self._thought_tokens += thinking or self._parser.thinking
        return parts

    def _told(self, parts: Sequence[AnswerPart]) -> tuple[AnswerPart, ...]:
        told = merged(parts)
        self._parts += told
        return told

    def _take(self, token: int) -> str:
        self.token_ids.append(token)
        if token in self._stop_tokens:
            self.matched = token
            return ""
        return self._match(self._letters.feed((token,)), tokens=1)

    def _match(self, text: str, *, tokens: int) -> str:
        result = self._matcher.feed(text, tokens)
        if result.stop is not None:
            self.matched = result.stop
        return result.text

    def flush(self) -> TurnDelta | None:
        """What was held back, once no more tokens come."""
        text = self._rest()
        parts: tuple[AnswerPart, ...] = ()
        if self._parser is not None:
            parts = self._told((*self._parser.feed(text), *self._parser.flush()))
        return TurnDelta(text=text, parts=parts) if text or parts else None

    def finished(self, done: Finished) -> TurnFinished:
        """The turn's end, once all was flushed."""
        return TurnFinished(
            reason=done.reason if self.matched is None else FinishReason.STOP,
            matched_stop=self.matched,
            usage=done.usage,
            timings=done.timings,
            calls=0 if self._parser is None else self._parser.calls,
            thought_tokens=self._thought_tokens,
        )

    def _rest(self) -> str:
        if isinstance(self.matched, str):
            return ""
        end, self.matched = self.matched, None
        text = self._match(self._letters.flush(), tokens=0)
        if self.matched is None:
            self.matched = end
            text += self._matcher.flush().text
        self._shown.append(text)
        return text

    @property
    def shown(self) -> str:
        """What the client got."""
        return "".join(self._shown)

    @property
    def message(self) -> Message:
        """The answer as the client will send it back."""
        return Message("assistant", self.shown) if self._parser is None else message_of(self._parts)

    @property
    def is_shown_whole(self) -> bool:
        """Whether what the client got spells all that was generated, but for the token that ended it."""
        last = self.token_ids[-1:] if isinstance(self.matched, int) else []
        said = self.token_ids[: len(self.token_ids) - len(last)]
        return self._tokenizer.decode(said, skip_special=False) == self.shown

    def history(self) -> tuple[tuple[int, ...], str]:
        """The ids that the next turn may go on from, and what they render to, special tokens included.

        After a stop string these are the ids that spell what was shown, if any do; else none.
        """
        ids = tuple(self.token_ids)
        if isinstance(self.matched, str):
            ids = self._shown_ids(ids)
        return ids, self._tokenizer.decode(ids, skip_special=False)

    def _shown_ids(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        shown = self.shown
        for kept in range(len(ids), max(len(ids) - _LONGEST_STOP_TOKENS, 0), -1):
            if self._tokenizer.decode(ids[:kept], skip_special=self._skips_special) == shown:
                return ids[:kept]
        return ()
