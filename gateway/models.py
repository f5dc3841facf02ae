"""Finds the folder of the model that was asked for: a local one, one of the hub's, or the built-in one.

It decides what a model's name means and how it is called when served. It loads nothing; the environment's HF_HOME,
HF_TOKEN and HF_HUB_OFFLINE hold, since huggingface_hub reads them.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coordinator.errors import ModelUnusable

BUILT_IN = "smollm2"

# What a slice and its tokenizer are made of; repositories hold the same weights in other formats beside it.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]

_HINT = f"; {BUILT_IN} is built in"
# The fault of the disk here, not of the way to the hub.
_NOT_STORED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR)

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder with config, weights and tokenizer, and the name without "/" that clients see."""

    path: Path
    name: str


def find_model(model: str, note: Note) -> ModelFolder:
    """Downloads what is not there yet; may take minutes. Raises ModelUnusable."""
    if model == BUILT_IN:
        path = _built_in(note)
        return ModelFolder(path, path.name)
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelFolder(path.resolve(), path.resolve().name)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelUnusable(f"there is no model {model!r}: no such folder{_HINT}")
    return ModelFolder(_from_hub(model, note), model.rpartition("/")[2])


def _built_in(note: Note) -> Path:
    from stage.model.embedded import ensure_embedded_model

    told: set[str] = set()

    def tell(what: str, _: float) -> None:
        if what not in told:
            told.add(what)
            note(what)

    return ensure_embedded_model(tell)


def _from_hub(model: str, note: Note) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        try:
            found = snapshot_download(model, allow_patterns=_HUB_FILES, local_files_only=True)
        except LocalEntryNotFoundError:
            note(f"asking the hub for {model}")
            found = snapshot_download(model, allow_patterns=_HUB_FILES)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelUnusable(
            f"there is no model {model!r}: no such folder, and {_why_not(error)}{_HINT}"
        ) from error
    return Path(found)


def _why_not(error: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    if constants.HF_HUB_OFFLINE:
        return "the hub may not be asked: HF_HUB_OFFLINE is set"
    match error:
        case HFValidationError():
            return "it cannot be the id of a hub's model"
        case GatedRepoError():
            return f"the hub gives it only to those who were let in ({_first_line(error)})"
        case RepositoryNotFoundError():
            return "the hub has none of that name"
        case HfHubHTTPError():
            return f"the hub refuses ({_first_line(error)})"
    if isinstance(error, OSError) and error.errno in _NOT_STORED:
        return f"the hub's files cannot be kept in {constants.HF_HUB_CACHE} ({error.strerror})"
    return f"the hub cannot be reached ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), "no reason given"
    )
