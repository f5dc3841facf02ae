"""Renders a conversation by the model's chat template, into text, token ids and message boundaries.

A template is foreign code: whatever it raises is the request's fault, told as InvalidValue, never a crash. What
it can do is found by trying it, not by reading it: a template that says nothing of a probe's tool has no tools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from coordinator.errors import InvalidValue
from coordinator.prefixes import common_prefix
from coordinator.sessions import splice
from gateway.chat.boundaries import AddedTokens, MessageOpeners
from gateway.chat.conversation import Abilities, TemplateDict, conversation
from gateway.chat.heads import Heads, leading

if TYPE_CHECKING:
    from coordinator.sessions import History
    from gateway.chat.messages import Message, Tool

# What a template or its environment is given by us; an argument of that name would displace it.
_RESERVED = frozenset(
    "messages conversation tools documents chat_template add_generation_prompt continue_final_message "
    "tokenize padding truncation max_length return_tensors return_dict tokenizer_kwargs "
    "return_assistant_tokens_mask bos_token eos_token".split()
)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A conversation as the model reads it. Boundaries are rising token indices at which a message begins."""

    text: str
    token_ids: tuple[int, ...]
    boundaries: tuple[int, ...] = ()
    anchor: int = 0  # the token index at which tools and system prompt end; 0: there are none
    shift: int = 0  # how many more messages have boundaries than the client sent: tools may be one


class Template(Protocol):
    """Renders template dicts to text. May raise anything."""

    def __call__(
        self,
        messages: Sequence[TemplateDict],
        tools: Sequence[TemplateDict],
        args: Mapping[str, object],
        *,
        generate: bool,
    ) -> str: ...


class ChatRenderer:
    """One model's template with its tokenizer. Remembers nothing of a turn but where its head ends; thread-safe."""

    def __init__(
        self, template: Template, encode: Callable[[str], Sequence[int]], added: AddedTokens
    ) -> None:
        self._template = template
        self._encode = encode
        self._added = added
        self.abilities = probe(template)
        self._openers = MessageOpeners.learn(self._probed, added)
        self._heads = Heads(self._closed, encode, added, self._openers.tokens)

    def _probed(self, messages: Sequence[TemplateDict], generate: bool) -> str:
        return _guarded(self._template, messages, (), {}, generate=generate)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        args: Mapping[str, object],
        history: History | None,
        *,
        with_boundaries: bool = True,
    ) -> RenderedPrompt:
        """Raises InvalidValue("messages", "tools" or "template_args")."""
        _check_args(args)
        talk = conversation(messages, tools, self.abilities)

        def rendered(part: Sequence[TemplateDict], *, generate: bool = False) -> str:
            return _guarded(self._template, part, talk.tools, args, generate=generate)

        text = rendered(talk.messages, generate=True)
        ids = splice(history, text, self._encode, self._added.special_ids.__contains__)
        if not ids:
            raise InvalidValue("messages", "the conversation renders to nothing")
        if not with_boundaries:
            return RenderedPrompt(text, ids)
        boundaries = self._openers.boundaries(ids, talk.messages, rendered)
        anchor = self._heads.anchor(messages, tools, args, text, ids)
        shift = len(talk.messages) - len(messages)
        if anchor and not shift and not leading(messages):
            boundaries = _behind(anchor, boundaries)
        return RenderedPrompt(text, ids, boundaries, anchor, shift)

    def prefix(
        self, messages: Sequence[Message], tools: Sequence[Tool], args: Mapping[str, object]
    ) -> tuple[int, ...]:
        """The ids that conversations begin with that begin with these messages, or with this head alone.

        Raises InvalidValue as render() does.
        """
        _check_args(args)
        if len(leading(messages)) == len(messages):
            return self._heads.tokens(messages, tools, args)
        closed = self._encode(self._closed(messages, tools, args))
        answered = self.render(messages, tools, args, None, with_boundaries=False).token_ids
        return answered[: common_prefix(closed, answered)]

    def _closed(
        self, messages: Sequence[Message], tools: Sequence[Tool], args: Mapping[str, object]
    ) -> str:
        talk = conversation(messages, tools, self.abilities)
        return _guarded(self._template, talk.messages, talk.tools, args, generate=False)


def _behind(head: int, boundaries: tuple[int, ...]) -> tuple[int, ...]:
    """The first message begins behind a head of tools that the template renders by itself: it is nobody's message."""
    if len(boundaries) > 1 and boundaries[1] <= head:
        return boundaries
    return (head, *boundaries[1:])


def _check_args(args: Mapping[str, object]) -> None:
    taken = sorted(_RESERVED & args.keys())
    if taken:
        raise InvalidValue("template_args", f"{taken[0]} is set by the server")


def _guarded(
    template: Template,
    messages: Sequence[TemplateDict],
    tools: Sequence[TemplateDict],
    args: Mapping[str, object],
    *,
    generate: bool,
) -> str:
    try:
        return template(messages, tools, args, generate=generate)
    except Exception as error:  # a template may raise anything at all, and each is a refusal
        reason = str(error) or type(error).__name__
        raise InvalidValue(
            "messages", f"the model's chat template refuses them: {reason}"
        ) from error


_ASK: TemplateDict = {"role": "user", "content": "probe-question"}
_ANSWER: TemplateDict = {"role": "assistant", "content": "probe-answer"}
_TOOL: TemplateDict = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe-description",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}},
    },
}
_CALL: TemplateDict = {
    "type": "function",
    "id": "probe0000",  # nine letters: Mistral's templates take no other length
    "function": {"name": "probe_tool", "arguments": {"probe_key": "probe-value"}},
}
_CALLED: TemplateDict = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT: TemplateDict = {
    "role": "tool",
    "content": "probe-result",
    "name": "probe_tool",
    "tool_call_id": "probe0000",
}


def probe(template: Template) -> Abilities:
    """What the template shows of a system message, of tools, and of calls with their results."""

    def shows(messages: Sequence[TemplateDict], *words: str, tools: bool = False) -> bool:
        try:
            text = _guarded(template, messages, [_TOOL] if tools else [], {}, generate=True)
        except InvalidValue:
            return False
        return all(word in text for word in words)

    system: TemplateDict = {"role": "system", "content": "probe-system"}
    return Abilities(
        system=shows([system, _ASK], "probe-system", "probe-question"),
        late_system=shows([_ASK, _ANSWER, system, _ASK], "probe-system"),
        tools=shows([_ASK], "probe_tool", "probe_key", tools=True),
        calls=shows(
            [_ASK, _CALLED, _RESULT], "probe_tool", "probe-value", "probe-result", tools=True
        ),
    )
