"""What ``Operations.draft_chain`` takes and gives: a draft model, the limits of its chains, and the chains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

if TYPE_CHECKING:
    from outrider.kernels.operations import DecoderShape, PackedDecoder, PackedEmbedding, PackedLinear


@dataclass(frozen=True, slots=True)
class DraftModel:
    """What guesses a chain of tokens: a decoder with a table before it and a head behind it.

    ``token_map`` ``[head's out_features]`` int64: the token id that each output stands for; None: its own number.
    ``conditioned``: the residual of a row is what the row before left (and for the first what the caller made of the
    target), its token's embedding goes to ``DecoderPass.embeddings``. Else the embedding is the residual.
    """

    decoder: PackedDecoder
    shape: DecoderShape
    sliding_window: int | None  # of its layers that have one
    embedding: PackedEmbedding
    norm: Tensor  # [hidden_size]
    head: PackedLinear
    token_map: Tensor | None = None
    conditioned: bool = False


class PackedDraft(Protocol):
    """A ``DraftModel`` in the form one implementation runs it in; opaque to everyone else."""


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """How far the chain of each sequence may go, and how its tokens are chosen."""

    limits: npt.NDArray[np.int64]  # [num_seqs], tokens at most, up to max_steps
    min_survival: npt.NDArray[np.float64]  # [num_seqs], 0 or less: none
    temperatures: npt.NDArray[np.float64]  # [num_seqs], 0: the likeliest token
    draws: npt.NDArray[np.uint64]  # [num_seqs, max_steps], see race_candidates; not read at temperature 0


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """Chains, one a sequence; what lies behind a chain's end is -1 and 0."""

    token_ids: npt.NDArray[np.int64]  # [num_seqs, max_steps]
    confidences: npt.NDArray[np.float32]  # [num_seqs, max_steps]
    counts: npt.NDArray[np.int64]  # [num_seqs]
