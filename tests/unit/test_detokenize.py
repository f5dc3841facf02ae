"""Ids become text in deltas that join to the whole, and no character is ever split between two."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.chat.byte_tokenizer import END, ByteTokenizer
from gateway.chat.detokenize import ByteDetokenizer, Detokenizer, WindowedDetokenizer
from gateway.chat.vocabulary import token_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gateway.chat.tokenizer import ChatTokenizer

HARD = [
    "plain words, and a number 1234567",
    "😀🎉🏴󠁧󠁢󠁥󠁮󠁧󠁿 emoji",
    "漢字かな交じり文、한국어, ไทย",
    "family 👨‍👩‍👧‍👦 and 👩🏽‍🚀",
    "e\u0301 n\u0303 a\u0308\u0323 combining",
    "  leading and trailing  \n\n\t",
    "def f(x):\n    return x ** 2  # ∑∞",
]

# Rust's decoder is the reference; hypothesis reruns one input, the fixture is read-only.
_shared = settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="session")
def reference(smollm2_dir: Path) -> Callable[[list[int]], str]:
    rust = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    return lambda ids: str(rust.decode(ids, skip_special_tokens=True))


def _joined(stream: Detokenizer, deltas: list[list[int]]) -> str:
    return "".join([*(stream.feed(ids) for ids in deltas), stream.flush()])


@pytest.mark.parametrize("text", HARD)
def test_one_id_at_a_time_gives_whole_characters_that_join_to_the_text(
    smollm2: ChatTokenizer, text: str
) -> None:
    """Reports exo-explore/exo#1691 and Luce-Org/lucebox#641."""
    for tokenizer in (smollm2, ByteTokenizer()):
        ids = tokenizer.encode(text)
        stream = tokenizer.detokenizer()
        deltas = [stream.feed([i]) for i in ids]
        assert "".join(deltas) == text
        assert stream.flush() == ""
        assert not any("\ufffd" in delta for delta in deltas)


@_shared
@given(ids=st.lists(st.integers(0, 49_151), max_size=12), seed=st.integers(0, 99))
@example(ids=[0, 1, 2, 17, 300], seed=0)
def test_any_ids_in_any_cut_give_what_the_tokenizers_own_decoder_gives(
    smollm2: ChatTokenizer, reference: Callable[[list[int]], str], ids: list[int], seed: int
) -> None:
    cuts = sorted(random.Random(seed).choices(range(len(ids) + 1), k=3))
    edges = [0, *cuts, len(ids)]
    deltas = [ids[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert _joined(smollm2.detokenizer(), deltas) == reference(ids)


@_shared
@given(data=st.lists(st.integers(128, 255), max_size=10))
def test_broken_bytes_become_replacement_characters_as_in_the_tokenizers_own_decoder(
    smollm2: ChatTokenizer, reference: Callable[[list[int]], str], data: list[int]
) -> None:
    single = {smollm2.encode(chr(0x4E00 + i))[k] for i in range(200) for k in (-1, 0)}
    parts = sorted(single)
    ids = [parts[byte % len(parts)] for byte in data]
    assert _joined(smollm2.detokenizer(), [[i] for i in ids]) == reference(ids)
    assert _joined(ByteTokenizer().detokenizer(), [[b] for b in data]) == bytes(data).decode(
        errors="replace"
    )


def test_an_answer_that_ends_within_a_character_flushes_one_replacement() -> None:
    stream = ByteTokenizer().detokenizer()
    assert stream.feed(b"ab" + "界".encode()[:2]) == "ab"
    assert stream.flush() == "\ufffd"


def test_special_tokens_are_left_out_unless_asked_for(smollm2: ChatTokenizer) -> None:
    ids = smollm2.encode("<|im_start|>user\nhi<|im_end|>")
    assert smollm2.decode(ids) == "user\nhi"
    assert smollm2.decode(ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>"
    assert ByteTokenizer().decode([65, END, 66]) == "AB"


def test_ids_beyond_the_vocabulary_spell_nothing(smollm2: ChatTokenizer) -> None:
    assert smollm2.decode([1 << 30, *smollm2.encode("hi")]) == "hi"


_PIECES = {"<unk>": 0, "▁Hello": 1, "▁": 2, "world": 3, "<0xE4>": 4, "<0xBD>": 5, "<0xA0>": 6}
_LLAMA = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(content=" ", left=1),
    ]
)


def _llama_reference(ids: list[int]) -> str:
    names = {i: piece for piece, i in _PIECES.items()}
    return str(_LLAMA.decode([names[i] for i in ids]))


@given(
    ids=st.lists(
        st.sampled_from([[1], [2], [3], [4, 5, 6]]).map(tuple), min_size=1, max_size=8
    ).map(lambda parts: [i for part in parts for i in part])
)
def test_byte_fall_back_and_the_first_space_follow_a_sentencepiece_decoder(ids: list[int]) -> None:
    decoder = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    table = token_bytes(_PIECES, decoder, frozenset())
    assert table is not None
    assert _joined(ByteDetokenizer(table), [[i] for i in ids]) == _llama_reference(ids)


def test_a_decoder_of_no_known_family_has_no_table() -> None:
    assert token_bytes({"a": 0}, {"type": "WordPiece", "prefix": "##"}, frozenset()) is None
    assert token_bytes({"a": 0}, {}, frozenset()) is None


@given(ids=st.lists(st.integers(0, 4), max_size=12))
def test_windows_join_to_the_whole_for_any_other_decoder(ids: list[int]) -> None:
    words = Tokenizer(models.WordPiece({"the": 0, "cat": 1, "##s": 2, "!": 3, "[UNK]": 4}))
    words.decoder = decoders.WordPiece(cleanup=False)
    stream = WindowedDetokenizer(words.decode, frozenset())
    assert _joined(stream, [[i] for i in ids]) == words.decode(ids, skip_special_tokens=False)
