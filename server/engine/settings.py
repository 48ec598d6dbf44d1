"""What an engine is made from. No torch here: the command line reads the defaults."""

from __future__ import annotations

from dataclasses import dataclass

DRAFTERS = ("suffix", "none")
KERNELS = ("reference",)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine, checked when made; of JSON types, since they cross to another process.

    Raises:
        ValueError: a value is out of range; the message says which and what to do.
    """

    model_path: str  # a Hugging Face directory or a .gguf file
    model_name: str  # what clients call it
    kernels: str = "reference"
    num_threads: int = 0  # for the kernels; 0: one per core
    max_context: int = 0  # tokens of prompt and answer together; 0: what the model was made for, at most 8192
    page_size: int = 16  # tokens a page
    kv_cache_mib: int = 1024  # memory for keys and values
    max_running: int = 32  # sequences with pages
    max_step_tokens: int = 128  # rows of one pass
    drafter: str = "suffix"
    max_draft_tokens: int = 8  # a sequence and step

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, message: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {message}, not {getattr(self, name)!r}")

        require(self.kernels in KERNELS, "kernels", f"one of {', '.join(KERNELS)}")
        require(self.drafter in DRAFTERS, "drafter", f"one of {', '.join(DRAFTERS)}")
        require(self.num_threads >= 0, "num_threads", "0 (one per core) or more")
        require(self.max_context == 0 or self.max_context >= 16, "max_context", "0 (the model's own) or at least 16")
        require(1 <= self.page_size <= 256, "page_size", "from 1 to 256")
        require(self.kv_cache_mib >= 1, "kv_cache_mib", "at least 1")
        require(1 <= self.max_running <= 4096, "max_running", "from 1 to 4096")
        require(0 <= self.max_draft_tokens <= 64, "max_draft_tokens", "from 0 (no speculation) to 64")
        require(
            self.max_step_tokens >= self.max_running, "max_step_tokens", f"at least max_running ({self.max_running})"
        )
