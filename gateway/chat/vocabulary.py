"""What a Hugging Face tokenizer's tokens spell, read off its vocabulary and its decoder.

Two families cover nearly every model: byte-level BPE (each character of a token stands for one byte) and
SentencePiece with byte fall-back. For any other decoder there is no table; the caller decodes windows then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from gateway.chat.detokenize import TokenBytes

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # SentencePiece's visible space

Decoder = Mapping[str, object]


def token_bytes(
    vocabulary: Mapping[str, int], decoder: Decoder, special: frozenset[int]
) -> TokenBytes | None:
    """None when the decoder is of neither family. `decoder` is that of a tokenizer.json."""
    steps = list(_steps(decoder))
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        letters = _byte_letters()
        pieces = {i: _byte_level(token, letters) for token, i in vocabulary.items()}
        return TokenBytes(pieces, special)
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "ByteFallback" in kinds:
        return _sentencepiece(vocabulary, steps, special)
    return None


def _steps(decoder: Decoder) -> Iterator[Decoder]:
    steps = decoder.get("decoders")
    if isinstance(steps, list):
        yield from steps
    else:
        yield decoder


def _sentencepiece(
    vocabulary: Mapping[str, int], steps: list[Decoder], special: frozenset[int]
) -> TokenBytes | None:
    lead = 0
    for step in steps:
        if step.get("type") == "Replace":
            if (step.get("pattern"), step.get("content")) != ({"String": _SPACE}, " "):
                return None
        if step.get("type") == "Strip":
            if step.get("content") != " " or step.get("stop"):
                return None
            lead += int(str(step.get("start", 0)))
    if lead and {"type": "Fuse"} not in steps:
        return None  # spaces would be dropped from every token, not from the text
    pieces = {i: _fall_back(token) for token, i in vocabulary.items()}
    return TokenBytes(pieces, special, lead)


def _fall_back(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


def _byte_level(token: str, letters: Mapping[str, int]) -> bytes:
    try:
        return bytes([letters[letter] for letter in token])
    except KeyError:  # an added token, kept as it is written
        return token.encode()


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for letters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return letters
