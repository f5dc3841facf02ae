"""Where the messages of a rendered conversation begin, in tokens. A pure function of the ids and the first message.

A message begins at a special token that begins messages and nothing else. Which tokens those are is learnt from a few
small conversations when the template is loaded, so that a turn costs one look at its ids, however many messages it
has. Two prompts that share a beginning share its boundaries. A message without such a token has no boundary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.errors import InvalidValue

if TYPE_CHECKING:
    from gateway.chat.conversation import TemplateDict

Render = Callable[[Sequence["TemplateDict"]], str]  # without a generation prompt
RenderFor = Callable[[Sequence["TemplateDict"], bool], str]  # with one, when it says so


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """The tokens that a tokenizer takes out of a text before anything else, and which of them are special."""

    pattern: re.Pattern[str]
    special: Mapping[str, int]
    special_ids: frozenset[int]

    @staticmethod
    def of(texts: Iterable[str], special: Mapping[str, int]) -> AddedTokens:
        longest_first = sorted(texts, key=len, reverse=True)
        pattern = re.compile("|".join(re.escape(text) for text in longest_first) or r"(?!)")
        return AddedTokens(pattern, dict(special), frozenset(special.values()))

    def places(self, text: str) -> Iterator[tuple[int, int]]:
        """The special tokens that stand in a text: at which character, and which."""
        for hit in self.pattern.finditer(text):
            token = self.special.get(hit.group())
            if token is not None:
                yield hit.start(), token


def _message(role: str) -> TemplateDict:
    return {"role": role, "content": f"probe-{role}"}


_PROBES: tuple[tuple[TemplateDict, ...], ...] = (
    tuple(_message(role) for role in ("user", "assistant", "user", "assistant", "user")),
    tuple(_message(role) for role in ("system", "user", "assistant", "user")),
)


class MessageOpeners:
    """The special tokens with which a template begins messages."""

    def __init__(self, openers: frozenset[int], added: AddedTokens) -> None:
        self.tokens = openers
        self._added = added

    @staticmethod
    def learn(render: RenderFor, added: AddedTokens) -> MessageOpeners:
        """`render` raises InvalidValue where the template refuses; what it refuses teaches nothing."""
        begin: set[int] = set()
        inside: set[int] = set()
        for probe in _PROBES:
            starts = _starts(probe, render)
            if not starts:
                continue
            # What a template puts before the second message (a system prompt of its own) is the first one's.
            for place, token in added.places(render(probe, True)):
                if place >= starts[0]:
                    (begin if place in starts else inside).add(token)
        return MessageOpeners(frozenset(begin - inside), added)

    def boundaries(
        self, ids: Sequence[int], messages: Sequence[TemplateDict], render: Render
    ) -> tuple[int, ...]:
        """Rising token indices: 0, where each later message begins, and where the answer begins."""
        found = [index for index, token in enumerate(ids) if token in self.tokens]
        # Counted from the first message alone, so that a longer conversation begins with a shorter one's boundaries.
        return (0, *found[self._openers_of_first(messages[:1], render) :])

    def _openers_of_first(self, first: Sequence[TemplateDict], render: Render) -> int:
        try:
            text = render(first)
        except (
            InvalidValue
        ):  # a template may want a user message; only the whole conversation must render
            return 1
        return sum(token in self.tokens for _, token in self._added.places(text)) or 1


def _starts(probe: Sequence[TemplateDict], render: RenderFor) -> list[int]:
    """The characters at which the second message and each later one begin, and the answer."""
    try:
        whole = render(probe, True)
    except InvalidValue:
        return []
    starts = []
    for count in range(1, len(probe) + 1):
        try:
            shorter = render(probe[:count], False)
        except InvalidValue:
            continue
        if len(shorter) < len(whole) and whole.startswith(shorter):
            starts.append(len(shorter))
    return starts
