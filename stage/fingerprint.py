"""The identity of a model's files: rows of another fingerprint are never reused.

Decides what counts as the same model: config.json, and of every safetensors file its name, size, header and samples
of its contents. All weights are not read, which would take as long as loading them: a fine-tune changes most tensors
and so some sample, but a hand-made change of a few bytes between the samples goes unseen.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from coordinator.errors import ModelUnusable

_SAMPLES = 256
_SAMPLE_BYTES = 4096
_LENGTH_BYTES = 8  # safetensors: the header's length, little endian
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own bound


def fingerprint(model_dir: Path) -> str:
    """Reads about 1 MB of each file. Raises ModelUnusable."""
    digest = blake3()
    try:
        digest.update((model_dir / "config.json").read_bytes())
        for path in sorted(model_dir.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(f"\0{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                _add_samples(digest, file, size)
    except OSError as error:
        raise ModelUnusable(f"{model_dir}: {error}") from error
    return digest.hexdigest(length=16)


def _add_samples(digest: blake3, file: BinaryIO, size: int) -> None:
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    digest.update(file.read(min(length, _MAX_HEADER_BYTES)))
    start = file.tell()
    step = max((size - start) // _SAMPLES, _SAMPLE_BYTES)
    for offset in range(start, size, step):
        file.seek(offset)
        digest.update(file.read(_SAMPLE_BYTES))
