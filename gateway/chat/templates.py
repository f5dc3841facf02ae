"""Renders a conversation by the model's chat template, into text, token ids and message boundaries.

A template is foreign code: whatever it raises is the request's fault, told as InvalidValue, never a crash. What
it can do is found by trying it, not by reading it: a template that says nothing of a probe's tool has no tools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.errors import InvalidValue
from coordinator.prefixes import common_prefix
from coordinator.sessions import splice
from gateway.chat.billing import billed_to_nobody
from gateway.chat.boundaries import AddedTokens, MessageOpeners
from gateway.chat.conversation import TemplateDict, conversation
from gateway.chat.folding import OURS
from gateway.chat.heads import Heads, leading
from gateway.chat.probing import Probe, Template, guarded
from gateway.chat.seams import kept

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
    # For each message that may have a boundary, the first of the client's that it holds, or OURS.
    origins: tuple[int, ...] = ()


class ChatRenderer:
    """One model's template with its tokenizer. Remembers nothing of a turn but where its head ends; thread-safe."""

    def __init__(
        self, template: Template, encode: Callable[[str], Sequence[int]], added: AddedTokens
    ) -> None:
        self._template = template
        self._encode = encode
        self._added = added
        self.probe = Probe(template)
        self.abilities = self.probe.abilities()
        self._openers = MessageOpeners.learn(self._probed, added)
        self._heads = Heads(self._closed, encode, added, self._openers.tokens)

    def _probed(self, messages: Sequence[TemplateDict], generate: bool) -> str:
        return guarded(self._template, messages, (), {}, generate=generate)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        args: Mapping[str, object],
        history: History | None,
        *,
        with_boundaries: bool = True,
        begun: str = "",
    ) -> RenderedPrompt:
        """Raises InvalidValue("messages", "tools" or "template_args")."""
        _check_args(args)
        sent, messages = _split(billed_to_nobody(messages))
        talk = conversation(messages, tools, self.abilities)

        def rendered(part: Sequence[TemplateDict], *, generate: bool = False) -> str:
            return guarded(self._template, part, talk.tools, args, generate=generate)

        text = rendered(talk.messages, generate=True) + begun
        known = kept(history, text, self._added, self._encode)
        ids = splice(known, text, self._encode, self._added.special_ids.__contains__)
        if not ids:
            raise InvalidValue("messages", "the conversation renders to nothing")
        if not with_boundaries:
            return RenderedPrompt(text, ids)
        boundaries = self._openers.boundaries(ids, talk.messages, rendered)
        anchor = self._heads.anchor(messages, tools, args, text, ids)
        if anchor and OURS not in talk.origins and not leading(messages):
            boundaries = _behind(anchor, boundaries)
        origins = tuple(OURS if index == OURS else sent[index] for index in talk.origins)
        return RenderedPrompt(text, ids, boundaries, anchor, origins)

    def prefix(
        self, messages: Sequence[Message], tools: Sequence[Tool], args: Mapping[str, object]
    ) -> tuple[int, ...]:
        """The ids that conversations begin with that begin with these messages, or with this head alone.

        Raises InvalidValue as render() does.
        """
        _check_args(args)
        _, messages = _split(billed_to_nobody(messages))
        if len(leading(messages)) == len(messages):
            return self._heads.tokens(messages, tools, args)
        closed = self._encode(self._closed(messages, tools, args))
        answered = self.render(messages, tools, args, None, with_boundaries=False).token_ids
        return answered[: common_prefix(closed, answered)]

    def _closed(
        self, messages: Sequence[Message], tools: Sequence[Tool], args: Mapping[str, object]
    ) -> str:
        talk = conversation(messages, tools, self.abilities)
        return guarded(self._template, talk.messages, talk.tools, args, generate=False)


def _split(
    kept: Sequence[tuple[int, Message]],
) -> tuple[tuple[int, ...], tuple[Message, ...]]:
    return tuple(index for index, _ in kept), tuple(message for _, message in kept)


def _behind(head: int, boundaries: tuple[int, ...]) -> tuple[int, ...]:
    """The first message begins behind a head of tools that the template renders by itself: it is nobody's message."""
    if len(boundaries) > 1 and boundaries[1] <= head:
        return boundaries
    return (head, *boundaries[1:])


def _check_args(args: Mapping[str, object]) -> None:
    taken = sorted(_RESERVED & args.keys())
    if taken:
        raise InvalidValue("template_args", f"{taken[0]} is set by the server")
