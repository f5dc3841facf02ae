"""What several unit tests read: the built-in model's tokenizer, loaded once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.chat.tokenizer import ChatTokenizer


@pytest.fixture(scope="session")
def smollm2(smollm2_dir: Path) -> ChatTokenizer:
    from gateway.chat.tokenizer import load_tokenizer

    return load_tokenizer(smollm2_dir)
