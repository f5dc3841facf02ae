"""The served model's tokenizer behind one small interface: text and messages to ids, ids to text.

It reads a local folder and never a network. What stops an answer is what the model's own files say.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from coordinator.errors import InvalidValue, ModelUnusable
from gateway.chat.boundaries import AddedTokens
from gateway.chat.detokenize import (
    ByteDetokenizer,
    Detokenizer,
    TokenBytes,
    WindowedDetokenizer,
)
from gateway.chat.parsing.formats import AnswerFormat, learn
from gateway.chat.templates import ChatRenderer, RenderedPrompt
from gateway.chat.vocabulary import token_bytes
from stage.model.damage import unusable

if TYPE_CHECKING:
    from pathlib import Path

    from coordinator.sessions import History
    from gateway.chat.conversation import TemplateDict
    from gateway.chat.messages import Message, Tool

__all__ = ["ChatTokenizer", "ModelTokenizer", "RenderedPrompt", "load_tokenizer"]

_log = logging.getLogger(__name__)


class ChatTokenizer(Protocol):
    """Two implementations: the model's own (load_tokenizer) and ByteTokenizer (a ring without a model).

    All of it may be called from several threads at once; a detokenizer belongs to one stream.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_token_ids(self) -> frozenset[int]: ...

    @property
    def token_bytes(self) -> TokenBytes | None:
        """What each token spells; None where only whole texts can be decoded."""
        ...

    @property
    def answers(self) -> AnswerFormat:
        """How the model writes thoughts and calls."""
        ...

    def is_special(self, token_id: int) -> bool: ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Text as it stands; special tokens written out in it become their ids, none are added."""
        ...

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """A prompt given as plain text: encode(), plus what the model wants in front (BOS)."""
        ...

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str: ...

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer: ...

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
        """`begun`: what the answer begins with already.

        Raises InvalidValue("messages" | "tools" | "template_args", reason), never anything else.
        """
        ...

    def prefix(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        template_args: Mapping[str, object] | None = None,
    ) -> tuple[int, ...]:
        """The ids that conversations begin with that begin with these messages. Raises as render() does."""
        ...


def load_tokenizer(model_dir: Path) -> ChatTokenizer:
    """From a local model folder; touches no network. Raises ModelUnusable."""
    # Takes seconds to import; `--ring fake` needs none of it.
    from transformers import AutoTokenizer

    # Code that comes with a folder is never run; without the flag, transformers would ask on the terminal.
    with unusable(f"{model_dir.name}: no tokenizer can be made of its files"):
        tokenizer = AutoTokenizer.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=False
        )
        return ModelTokenizer(tokenizer, _stop_ids(model_dir, tokenizer))


def _stop_ids(model_dir: Path, tokenizer: Any) -> frozenset[int]:
    """generation_config.json may name several (a chat model ends turns, a base model texts); all count."""
    named = {tokenizer.eos_token_id, *_eos_in(model_dir / "generation_config.json")}
    if named == {None}:
        named.update(_eos_in(model_dir / "config.json"))
    return frozenset(token for token in named if isinstance(token, int))


def _eos_in(file: Path) -> Iterator[int | None]:
    try:
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except FileNotFoundError:
        return
    except (OSError, ValueError, AttributeError) as error:
        raise ModelUnusable(f"{file} cannot be read: {error}") from error
    for token in eos if isinstance(eos, list) else [eos]:
        if token is not None and type(token) is not int:
            raise ModelUnusable(f"{file}: eos_token_id must be token ids, not {token!r}")
        yield token


class ModelTokenizer:
    """A transformers tokenizer. Encoding goes to its Rust half directly: the Python half keeps settings there
    and fails when two threads meet.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._rust = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._rust is not None:
            self._rust.no_truncation()
            self._rust.no_padding()
        self._stop_token_ids = stop_token_ids
        added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
        marks = {str(t): i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self._special = frozenset(marks.values())
        vocabulary: dict[str, int] = {**tokenizer.get_vocab(), **added}
        self._size = max(vocabulary.values(), default=-1) + 1
        self._table = token_bytes(vocabulary, self._decoder(), self._special)
        tokens = AddedTokens.of(added, marks)
        self._renderer = ChatRenderer(self._apply, self.encode, tokens)
        self._answers = learn(
            self._renderer.probe,
            self._renderer.abilities,
            tokens,
            {text for text, token in added.items() if token in stop_token_ids},
            getattr(tokenizer, "response_template", None),
        )
        _log.info("tokenizer ready tokens=%d stops=%s", self._size, sorted(stop_token_ids))

    def _decoder(self) -> Mapping[str, object]:
        decoder = self._rust.decoder if self._rust is not None else None
        if decoder is None:
            return {}
        state: Mapping[str, object] = json.loads(decoder.__getstate__())
        return state

    @property
    def vocab_size(self) -> int:
        return self._size

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return self._stop_token_ids

    @property
    def token_bytes(self) -> TokenBytes | None:
        return self._table

    @property
    def answers(self) -> AnswerFormat:
        return self._answers

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def encode(self, text: str) -> tuple[int, ...]:
        return self._encoded(text, add_special=False)

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        return self._encoded(text, add_special=True)

    def _encoded(self, text: str, *, add_special: bool) -> tuple[int, ...]:
        try:
            if self._rust is not None:
                # encode() would hold the GIL, and with it the event loop, however long the text is.
                (encoded,) = self._rust.encode_batch_fast([text], add_special_tokens=add_special)
                return tuple(encoded.ids)
            return tuple(self._tokenizer.encode(text, add_special_tokens=add_special))
        except (TypeError, UnicodeError) as error:  # half a surrogate pair, from escaped JSON
            raise InvalidValue("prompt", "the text is no valid Unicode") from error

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        stream = self.detokenizer(skip_special=skip_special)
        return stream.feed(ids) + stream.flush()

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        if self._table is not None:
            return ByteDetokenizer(self._table, skip_special=skip_special)
        skipped = self._special if skip_special else frozenset[int]()
        return WindowedDetokenizer(self._decode_window, skipped)

    def _decode_window(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return text

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
        self._need_template()
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
        self._need_template()
        return self._renderer.prefix(messages, tools, template_args or {})

    def _need_template(self) -> None:
        if not self._tokenizer.chat_template:
            raise InvalidValue(
                "messages", "this model has no chat template; send the prompt as text"
            )

    def _apply(
        self,
        messages: Sequence[TemplateDict],
        tools: Sequence[TemplateDict],
        args: Mapping[str, object],
        *,
        generate: bool,
    ) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=generate,
            **args,
        )
        return text
