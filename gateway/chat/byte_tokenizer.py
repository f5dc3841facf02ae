"""A tokenizer without a model, for `serve --ring fake`: 256 bytes and two special tokens.

Its chat template is the plainest there is; tools and calls are written into the messages' text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from coordinator.errors import InvalidValue
from gateway.chat.boundaries import AddedTokens
from gateway.chat.detokenize import ByteDetokenizer, Detokenizer, TokenBytes
from gateway.chat.parsing.formats import AnswerFormat, CallFrame
from gateway.chat.parsing.tagged import THINK, TOOL_CALL
from gateway.chat.templates import ChatRenderer, RenderedPrompt

if TYPE_CHECKING:
    from coordinator.sessions import History
    from gateway.chat.conversation import TemplateDict
    from gateway.chat.messages import Message, Tool

START = 256
END = 257
_SPECIALS = {"<|start|>": START, "<|end|>": END}
_CUT = re.compile("(" + "|".join(re.escape(text) for text in _SPECIALS) + ")")
_TABLE = TokenBytes(
    {
        **{byte: bytes([byte]) for byte in range(256)},
        **{token: text.encode() for text, token in _SPECIALS.items()},
    },
    frozenset(_SPECIALS.values()),
)


class ByteTokenizer:
    """A ChatTokenizer of 258 ids: a byte each, START begins a message and END ends it."""

    def __init__(self) -> None:
        added = AddedTokens.of(_SPECIALS, _SPECIALS)
        self._renderer = ChatRenderer(_apply, self.encode, added)

    @property
    def vocab_size(self) -> int:
        return 256 + len(_SPECIALS)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return frozenset({END})

    @property
    def token_bytes(self) -> TokenBytes:
        return _TABLE

    @property
    def answers(self) -> AnswerFormat:
        return AnswerFormat(THINK, TOOL_CALL, CallFrame(), specials=_SPECIALS)

    def is_special(self, token_id: int) -> bool:
        return token_id in (START, END)

    def encode(self, text: str) -> tuple[int, ...]:
        ids: list[int] = []
        for part in _CUT.split(text):
            if part in _SPECIALS:
                ids.append(_SPECIALS[part])
            else:
                ids.extend(_bytes(part))
        return tuple(ids)

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        return self.encode(text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        stream = self.detokenizer(skip_special=skip_special)
        return stream.feed(ids) + stream.flush()

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        return ByteDetokenizer(_TABLE, skip_special=skip_special)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        template_args: Mapping[str, object] | None = None,
        history: History | None = None,
        *,
        with_boundaries: bool = True,
        begun: str = "",
    ) -> RenderedPrompt:
        return self._renderer.render(
            messages,
            tools,
            template_args or {},
            history,
            with_boundaries=with_boundaries,
            begun=begun,
        )

    def prefix(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        template_args: Mapping[str, object] | None = None,
    ) -> tuple[int, ...]:
        return self._renderer.prefix(messages, tools, template_args or {})


def _bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeError as error:  # half a surrogate pair, from escaped JSON
        raise InvalidValue("prompt", "the text is no valid Unicode") from error


def _apply(
    messages: Sequence[TemplateDict],
    tools: Sequence[TemplateDict],
    args: Mapping[str, object],
    *,
    generate: bool,
) -> str:
    said = [f"<|start|>{message['role']}\n{message['content']}<|end|>\n" for message in messages]
    return "".join(said) + ("<|start|>assistant\n" if generate else "")


def byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer()
