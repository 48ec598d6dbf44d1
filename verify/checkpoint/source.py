"""From what a user calls a model to the path of its checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.verify.checkpoint.checkpoint import is_gguf
from outrider.verify.checkpoint.config import UnsupportedCheckpoint
from outrider.verify.checkpoint.default_model import DEFAULT_MODEL

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


class SourceNotFound(Exception):
    """There is no such model here; the message says how to get it."""


def resolve_source(source: str) -> Path:
    """The checkpoint that ``source`` names: ``default``, a directory, a ``.gguf`` file or a hub id.

    A hub id is fetched into Hugging Face's own cache unless it is there.

    Raises:
        SourceNotFound: there is none, or it cannot be fetched.
        UnsupportedCheckpoint: the path is something else.
    """
    if is_default(source):
        path = DEFAULT_MODEL.path
        if not path.is_file():
            raise SourceNotFound(f"the default model is not at {path} yet; run: outrider models pull")
        return path
    if not source.strip():
        raise SourceNotFound("the model's name is empty: name a directory, a .gguf file, a hub id, or 'default'")
    path = Path(source).expanduser()
    if path.is_dir() or is_gguf(path):
        return path
    if path.exists():
        raise UnsupportedCheckpoint(f"{source} is neither a Hugging Face directory nor a .gguf file")
    if _HUB_ID.fullmatch(source) and path.suffix != ".gguf":
        return _fetch_from_hub(source)
    raise SourceNotFound(
        f"there is no model {source!r}: name an existing directory, a .gguf file, "
        "a hub id such as org/name, or 'default'"
    )


def is_default(source: str) -> bool:
    return source in ("default", DEFAULT_MODEL.name)


def model_name(source: str) -> str:
    """What clients call the model that ``source`` names."""
    if is_default(source):
        return DEFAULT_MODEL.name
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else source


def _fetch_from_hub(repository: str) -> Path:
    # Half a second of imports that only hub ids need.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES, ignore_patterns=["original/*"]))
    except LocalEntryNotFoundError as error:
        raise SourceNotFound(
            f"{repository} is not in the local Hugging Face cache and the hub cannot be reached; "
            "connect to the network, or name a directory or a .gguf file on this machine"
        ) from error
    except RepositoryNotFoundError as error:
        raise SourceNotFound(
            f"the Hugging Face hub has no model {repository!r}, or it is private (log in with: hf auth login); "
            "nor is there a file or directory of that name"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise SourceNotFound(f"{repository} cannot be fetched from the Hugging Face hub: {error}") from error
