"""The rows of one request, processed one after the other along what is drafted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from outrider.verify.distribution import TokenDistribution, target_distribution
from outrider.verify.logits import LogitsProcessor
from outrider.verify.sampling_params import SamplingParams


class UnusableRow(Exception):
    """No token can be chosen from a row; the message says why, and what can be done."""


class ProcessedRows:
    """Makes of rows of logits ``[num_rows, vocab_size]`` what their tokens are drawn from.

    The rows are asked for along one path: before each, ``append`` every token that leads to it.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        rows: Tensor,
    ) -> None:
        self._params = params
        self._processor = LogitsProcessor(params, prompt_token_ids, output_token_ids, eos_token_ids)
        self._rows = rows.cpu().numpy()

    def append(self, token_id: int) -> None:
        self._processor.append(token_id)

    def target(self, row: int, position: int) -> TokenDistribution:
        """What the token at ``position`` is drawn from.

        Raises:
            UnusableRow: nothing can be drawn from it.
        """
        logits = self._rows[row].astype(np.float64)
        if not np.isfinite(logits.max()):
            raise no_finite_logit(position)
        self._processor.process(logits)
        if logits.max() == -np.inf:
            raise UnusableRow(
                f"min_tokens bans every token that could stand at position {position}; "
                "lower min_tokens or name fewer stop_token_ids"
            )
        return target_distribution(logits, self._params)


def no_finite_logit(position: int) -> UnusableRow:
    return UnusableRow(f"the model gave no usable logits for position {position} (NaN or none finite); try again")
