"""Logits processing: what a request adds to, takes from and bans in a row of logits.

The second half of ``SamplingParams``' order, from temperature on, is in ``distribution``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from outrider.verify.sampling_params import SamplingParams


class LogitsProcessor:
    """Applies one request's bias, penalties and bans, row by row, as its history grows.

    A row is processed as if its history had come token by token: start with the verified tokens, call
    ``append`` for each drafted token that is kept, and ``process`` the next row.

    ``min_tokens`` bans ``stop_token_ids`` and, unless the request ignores them, ``eos_token_ids``.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        eos_token_ids: Iterable[int],
    ) -> None:
        self._params = params
        self._num_output_tokens = len(output_token_ids)
        self._output_counts: Counter[int] | None = None
        self._seen_ids: set[int] | None = None
        if params.presence_penalty or params.frequency_penalty:
            self._output_counts = Counter(output_token_ids)
        if params.repetition_penalty != 1.0:
            self._seen_ids = set(prompt_token_ids).union(output_token_ids)
        self._ending_ids = np.array(
            [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)], dtype=np.int64
        )
        self._bias_ids, self._biases = _arrays(params.logit_bias.keys(), params.logit_bias.values())

    def append(self, token_id: int) -> None:
        """Add one token to the output that the next rows are processed after."""
        self._num_output_tokens += 1
        if self._output_counts is not None:
            self._output_counts[token_id] += 1
        if self._seen_ids is not None:
            self._seen_ids.add(token_id)

    def process(self, logits: npt.NDArray[np.float64]) -> None:
        """Change one row of logits, ``[vocab_size]``, in place."""
        params = self._params
        logits[self._bias_ids] += self._biases
        if self._seen_ids is not None:
            seen = np.fromiter(self._seen_ids, np.int64, len(self._seen_ids))
            seen_logits = logits[seen]
            # CTRL divides; that would raise a negative logit, so those are multiplied.
            logits[seen] = np.where(
                seen_logits > 0, seen_logits / params.repetition_penalty, seen_logits * params.repetition_penalty
            )
        if self._output_counts is not None:
            output_ids, counts = _arrays(self._output_counts.keys(), self._output_counts.values())
            logits[output_ids] -= params.frequency_penalty * counts + params.presence_penalty
        if self._num_output_tokens < params.min_tokens:
            logits[self._ending_ids] = -np.inf


def _arrays(token_ids: Iterable[int], values: Iterable[float]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    return np.fromiter(token_ids, np.int64), np.fromiter(values, np.float64)
