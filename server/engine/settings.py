"""What an engine is made from. No torch here: the command line reads the defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.kernels.cpu.availability import native_problem

DRAFTERS = ("auto", "hybrid", "suffix", "model", "none")
REJECTION_SAMPLE_METHODS = ("block", "standard")
DRAFT_SAMPLE_METHODS = ("probabilistic", "greedy")
KERNELS = ("auto", "cpu", "reference")
QUANTIZATIONS = ("none", "int8", "int4")
DRAFT_QUANTIZATIONS = ("auto", *QUANTIZATIONS)
KV_CACHE_DTYPES = ("auto", "f32", "f16", "int8")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine, checked when made; of JSON types, since they cross to another process.

    Raises:
        ValueError: a value is out of range; the message says which and what to do.
    """

    model_path: str  # a Hugging Face directory or a .gguf file
    model_name: str  # what clients call it
    kernels: str = "auto"  # auto: cpu where the native kernels are built, else reference
    num_threads: int = 0  # for the kernels; 0: one per core
    quantize: str = "none"  # how weights stored as floats are kept; those of a GGUF file keep the file's form
    kv_cache_dtype: str = "auto"  # auto: f16 with the cpu kernels, f32 with the reference
    max_context: int = 0  # tokens of prompt and answer together; 0: what the model was made for, at most 8192
    page_size: int = 16  # tokens a page
    kv_cache_mib: int = 1024  # memory for keys and values
    max_running: int = 32  # sequences with pages
    max_step_tokens: int = 128  # rows of one pass
    drafter: str = "auto"  # hybrid: suffix and model; auto: hybrid where a draft model is named, else suffix
    max_draft_tokens: int = 8  # a sequence and step
    adaptive_drafts: bool = True  # lengths by measured time; False: always max_draft_tokens, the request's own if less
    draft_model_path: str = ""  # a speculators or Hugging Face directory, or a .gguf file; "": the one for this model
    draft_quantize: str = "auto"  # as quantize, for the draft model's weights; auto: int8 at most with the cpu kernels
    draft_sample_method: str = "probabilistic"  # above temperature 0, from a draft model: drawn, or its likeliest
    rejection_sample_method: str = "block"  # drafts with probabilities are verified as a block, or token by token
    suffix_min_match: int = 1  # tokens; the suffix drafter guesses after no shorter repetition
    suffix_history: bool = False  # whether it also looks through earlier answers of the same tenant
    profile: bool = True  # whether the first start measures what passes cost

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, message: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {message}, not {getattr(self, name)!r}")

        require(self.kernels in KERNELS, "kernels", f"one of {', '.join(KERNELS)}")
        require(self.quantize in QUANTIZATIONS, "quantize", f"one of {', '.join(QUANTIZATIONS)}")
        require(self.kv_cache_dtype in KV_CACHE_DTYPES, "kv_cache_dtype", f"one of {', '.join(KV_CACHE_DTYPES)}")
        if self.kernels == "reference":
            require(self.quantize == "none", "quantize", "none with the reference kernels")
            require(self.kv_cache_dtype in ("auto", "f32"), "kv_cache_dtype", "f32 with the reference kernels")
        self._check_speculation(require)
        # Threads that wait for each other on one processor take seconds for what two do in a millisecond.
        most = max(8, 4 * (os.cpu_count() or 1))
        require(0 <= self.num_threads <= most, "num_threads", f"from 0 (one per core) to {most} on this machine")
        require(self.max_context == 0 or self.max_context >= 16, "max_context", "0 (the model's own) or at least 16")
        require(1 <= self.page_size <= 256, "page_size", "from 1 to 256")
        require(self.kv_cache_mib >= 1, "kv_cache_mib", "at least 1")
        require(1 <= self.max_running <= 4096, "max_running", "from 1 to 4096")
        require(
            self.max_step_tokens >= self.max_running, "max_step_tokens", f"at least max_running ({self.max_running})"
        )

    def _check_speculation(self, require: Callable[[bool, str, str], None]) -> None:
        def one_of(name: str, choices: Sequence[str]) -> None:
            require(getattr(self, name) in choices, name, f"one of {', '.join(choices)}")

        one_of("drafter", DRAFTERS)
        one_of("draft_quantize", DRAFT_QUANTIZATIONS)
        one_of("draft_sample_method", DRAFT_SAMPLE_METHODS)
        one_of("rejection_sample_method", REJECTION_SAMPLE_METHODS)
        if self.kernels == "reference":
            require(self.draft_quantize in ("auto", "none"), "draft_quantize", "none with the reference kernels")
        if self.drafter in ("suffix", "none"):
            require(not self.draft_model_path, "draft_model_path", f"empty with the drafter {self.drafter}")
        require(0 <= self.max_draft_tokens <= 64, "max_draft_tokens", "from 0 (no speculation) to 64")
        require(1 <= self.suffix_min_match <= 64, "suffix_min_match", "from 1 to 64")

    def resolved(self) -> EngineSettings:
        """The same with nothing left at ``auto``: the native kernels where they are built, else the reference.

        Raises:
            ValueError: the native kernels are not built, and the reference cannot do what is asked.
        """
        if self.kernels == "auto":
            if (problem := native_problem()) is None:
                return replace(self, kernels="cpu").resolved()
            try:
                return replace(self, kernels="reference").resolved()
            except ValueError as error:
                raise ValueError(f"{error}; {problem}") from error
        suitable = {"cpu": "f16", "reference": "f32"}[self.kernels]
        # What a draft loses by it costs a guess now and then, and its weights are read at every token of a chain.
        draft_quantize = "int8" if (self.kernels, self.quantize) == ("cpu", "none") else self.quantize
        return replace(
            self,
            kv_cache_dtype=suitable if self.kv_cache_dtype == "auto" else self.kv_cache_dtype,
            draft_quantize=draft_quantize if self.draft_quantize == "auto" else self.draft_quantize,
        )
