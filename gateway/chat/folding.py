"""Puts messages where a template can take them: late system messages, and several messages of one side in a row.

Nothing moves further than to its neighbours between two answers, so that each request still begins with the one before;
and nothing is put between a call and its result. What a template takes where it stands stays there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

TemplateDict = dict[str, object]  # what templates read: OpenAI's wire shape
OURS = -1  # the origin of a message that no client sent


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a template renders by itself; the rest is written into the messages' text."""

    system: bool
    tools: bool
    calls: bool  # assistant messages' tool calls, and tool messages
    late_system: bool = True  # system messages behind the first message, as agents send them
    repeats: bool = True  # user messages in a row
    asks_behind_results: bool = True  # a user message behind a tool's result
    long_ids: bool = True  # call ids other than nine letters and digits
    thoughts: str = "reasoning_content"  # what it calls an assistant message's thoughts


@dataclass(frozen=True, slots=True)
class Turned:
    """A message for the template, and which of the client's it is, or the first of those that it holds."""

    message: TemplateDict
    origin: int = OURS

    @property
    def role(self) -> object:
        return self.message["role"]

    @property
    def content(self) -> object:
        return self.message["content"]

    def but(self, **changes: object) -> Turned:
        return replace(self, message={**self.message, **changes})

    def with_text(self, other: Turned) -> Turned:
        """This message, and what the other says behind it."""
        return self.but(content=joined(self.content, other.content))


def joined(first: object, second: object) -> str:
    return "\n\n".join(str(part) for part in (first, second) if part)


def folded(turned: Sequence[Turned], abilities: Abilities) -> list[Turned]:
    head, rest = _head(turned, abilities)
    messages = [*head]
    for run in _runs(rest):
        messages += run if run[0].role == "assistant" else _run(run, abilities)
    return messages if abilities.system else _without_system(messages)


def _head(turned: Sequence[Turned], abilities: Abilities) -> tuple[list[Turned], Sequence[Turned]]:
    """The system messages in front, as one where a template takes no more."""
    count = next((i for i, each in enumerate(turned) if each.role != "system"), len(turned))
    head = list(turned[:count])
    if not abilities.late_system:
        while len(head) > 1:
            head[:2] = [head[0].with_text(head[1])]
    return head, turned[count:]


def _runs(turned: Sequence[Turned]) -> Iterator[list[Turned]]:
    """Each answer by itself, and all that stands between two answers together."""
    run: list[Turned] = []
    for each in turned:
        if each.role == "assistant":
            if run:
                yield run
            yield [each]
            run = []
        else:
            run.append(each)
    if run:
        yield run


def _run(run: list[Turned], abilities: Abilities) -> list[Turned]:
    messages: list[Turned] = []
    for each in _behind_results(run):
        before = messages[-1] if messages else None
        late = each.role == "system" and not abilities.late_system
        if before is not None and _is_one_too_many(before, each, late, abilities):
            messages[-1] = before.with_text(each)
        else:
            messages.append(each.but(role="user") if late else each)
    return messages


def _behind_results(run: list[Turned]) -> list[Turned]:
    """System messages that stand between a call and its results go behind the last of them."""
    last = max((i for i, each in enumerate(run) if each.role == "tool"), default=-1)
    early = [each for each in run[: last + 1] if each.role == "system"]
    results = [each for each in run[: last + 1] if each.role != "system"]
    return [*results, *early, *run[last + 1 :]]


def _is_one_too_many(before: Turned, each: Turned, late: bool, abilities: Abilities) -> bool:
    """Whether it must go into the message before it, as a template takes it nowhere else."""
    if before.role == "tool":
        # As a message of its own it would look like the user's next question.
        return late or (each.role == "user" and not abilities.asks_behind_results)
    return before.role == "user" and (late or each.role == "user") and not abilities.repeats


def _without_system(messages: list[Turned]) -> list[Turned]:
    """The system prompt in front of what the user says first."""
    if not messages or messages[0].role != "system":
        return messages
    if len(messages) < 2 or messages[1].role != "user":
        return [messages[0].but(role="user"), *messages[1:]]
    both = joined(messages[0].content, messages[1].content)
    first = replace(messages[1].but(content=both), origin=messages[0].origin)
    return [first, *messages[2:]]
