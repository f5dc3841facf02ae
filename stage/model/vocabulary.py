"""Whether two models write the same text with the same token ids.

Decides by their folders alone, before anything of them loads: the size of the vocabulary, every token's id and how a
few texts are cut.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from coordinator.errors import ModelUnusable
from stage.model.load import read_config

# Digits, spaces, code, accents, another script and an emoji: where tokenizers of one family begin to differ.
_PROBES = (
    "Hello, world! It's 3.14159 or 2,718,281?",
    "def f(x):\n\treturn  {'a': [x, None]}  # ok\r\n\n",
    "naïve Ångström — 中文字符 привет 👩‍🚀",
)


def check_same_vocabulary(served: Path, draft: Path) -> None:
    """Raises ModelUnusable when token ids of the one mean something else to the other."""
    sizes = [read_config(folder).vocab_size for folder in (served, draft)]
    if sizes[0] != sizes[1]:
        raise _different(served, draft, f"it has {sizes[1]} tokens, not {sizes[0]}")
    ours, theirs = _tokenizer(served), _tokenizer(draft)
    if ours.get_vocab() != theirs.get_vocab():
        raise _different(served, draft, "its tokens have other ids")
    if any(_cut(ours, text) != _cut(theirs, text) for text in _PROBES):
        raise _different(served, draft, "it cuts text into other tokens")


def _tokenizer(folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing more exact
        raise ModelUnusable(f"{folder} has no tokenizer.json to compare: {error}") from error


def _cut(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _different(served: Path, draft: Path, why: str) -> ModelUnusable:
    return ModelUnusable(f"{draft.name} cannot draft for {served.name}: {why}")
