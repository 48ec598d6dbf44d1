"""The contract of a checkpoint: a model's shape and its weights, whatever files they lie in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from outrider.verify.checkpoint.config import ModelConfig, UnsupportedCheckpoint

if TYPE_CHECKING:
    from outrider.kernels.operations import Weight

_FINGERPRINTED_BYTES = 1 << 20


class Checkpoint(Protocol):
    """An opened checkpoint: every weight its configuration calls for is there and of the right shape.

    Weights go by their Hugging Face names (``model.layers.0.self_attn.q_proj.weight``, ...), and their
    rows stand in Hugging Face order. ``lm_head.weight`` is absent where the embedding is tied.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def fingerprint(self) -> str:
        """Identifies the weights for caches, see ``fingerprint_files``."""

    def has(self, name: str) -> bool: ...

    def weight(self, name: str) -> Weight:
        """The weight called ``name``.

        Raises:
            UnsupportedCheckpoint: there is none of that name.
        """


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face directory or a GGUF file; the weights stay on disk until they are read.

    Raises:
        UnsupportedCheckpoint: it is neither, or needs something that is not supported.
    """
    if path.is_dir():
        from outrider.verify.checkpoint.huggingface import HuggingFaceCheckpoint

        return HuggingFaceCheckpoint(path)
    if is_gguf(path):
        from outrider.verify.checkpoint.gguf import GGUFCheckpoint

        return GGUFCheckpoint(path)
    raise not_a_checkpoint(path)


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def not_a_checkpoint(path: Path) -> UnsupportedCheckpoint:
    if not path.exists():
        return UnsupportedCheckpoint(f"there is no checkpoint at {path}")
    return UnsupportedCheckpoint(f"{path} is neither a Hugging Face directory nor a .gguf file")


def fingerprint_files(paths: Iterable[Path]) -> str:
    """A SHA-256 in hex over each file's size, modification time and first MiB (where headers are).

    Milliseconds for any size, and the same wherever the files lie. Good for caches on one machine; it is
    no proof of content: whoever may write the files can forge it.
    """
    digest = hashlib.sha256()
    for path in paths:
        status = path.stat()
        digest.update(f"{status.st_size} {status.st_mtime_ns} ".encode())
        with path.open("rb") as file:
            digest.update(hashlib.sha256(file.read(_FINGERPRINTED_BYTES)).digest())
    return digest.hexdigest()
