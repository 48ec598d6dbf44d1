"""What a run of distillation is to make, and how. No torch here: the command line reads the defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_LAYERS = 2
DTYPES = ("auto", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class DistillSettings:
    """Settings of one run, checked when made; of JSON types, since a run that goes on compares them.

    Of ``minutes``, a part (``GENERATION_SHARE``) is for generating, a part for training, the rest for validation.
    ``tokens`` and ``epochs`` bound these two instead, or as well; where both are given, nothing depends on the
    machine's speed, and the same settings give the same draft.

    Raises:
        ValueError: a value is out of range; the message begins with its name and says what to do.
    """

    minutes: float = 480.0  # for all; 0: as long as it takes, which needs tokens and epochs
    tokens: int = 0  # of answers to train on; 0: what the time allows
    epochs: float = 0.0  # times that every conversation is trained on; 0: what the time allows
    seed: int = 0
    layers: int = 1
    draft_vocab: int = 8192  # the most frequent tokens of the answers; more than the target's: all of them
    intermediate: int = 0  # width of the draft's MLP; 0: as the target's
    kv_heads: int = 0  # of the draft; 0: as the target's
    unroll: int = 3  # steps of a chain that are trained
    plain_part: float = 0.4  # of the training, its first part: unrolls nothing, which is quick
    directness: float = 0.3  # part of the gradient that is acceptance's own; the rest is the divergence's
    learning_rate: float = 1e-3  # of matrices; of norms and words half of it
    dtype: str = "auto"  # that is computed in; auto: whichever is faster, found out once a run
    batch_tokens: int = 2048  # rows of one training step
    max_turn_tokens: int = 200  # where a sampled question is cut
    max_answer_tokens: int = 192  # where an answer is cut

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, message: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {message}, not {getattr(self, name)!r}")

        require(math.isfinite(self.minutes) and self.minutes >= 0.0, "minutes", "0 (no limit) or more")
        require(self.tokens >= 0, "tokens", "0 (what the time allows) or more")
        require(math.isfinite(self.epochs) and self.epochs >= 0.0, "epochs", "0 (what the time allows) or more")
        require(
            self.minutes > 0.0 or (self.tokens > 0 and self.epochs > 0.0),
            "minutes",
            "more than 0 unless both tokens and epochs are given",
        )
        require(0 <= self.seed < 2**63, "seed", f"from 0 to {2**63 - 1}")
        require(1 <= self.layers <= MAX_LAYERS, "layers", f"from 1 to {MAX_LAYERS}")
        require(self.draft_vocab >= 2, "draft_vocab", "at least 2")
        require(self.intermediate >= 0, "intermediate", "0 (as the target's) or more")
        require(self.kv_heads >= 0, "kv_heads", "0 (as the target's) or more")
        require(1 <= self.unroll <= 8, "unroll", "from 1 to 8")
        require(0.0 <= self.plain_part <= 1.0, "plain_part", "from 0 to 1")
        require(0.0 <= self.directness <= 1.0, "directness", "from 0 to 1")
        require(0.0 < self.learning_rate <= 1.0, "learning_rate", "more than 0 and at most 1")
        require(self.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}")
        require(self.batch_tokens >= 16, "batch_tokens", "at least 16")
        require(self.max_turn_tokens >= 4, "max_turn_tokens", "at least 4")
        require(self.max_answer_tokens >= 4, "max_answer_tokens", "at least 4")


GENERATION_SHARE = 0.40
TRAINING_SHARE = 0.50
