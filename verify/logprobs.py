"""Log-probabilities of chosen tokens, as the model gave them: before bias, penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from outrider.kernels.operations import Operations
from outrider.verify.distribution import largest
from outrider.verify.sampling_params import TokenLogprob


def token_logprobs(
    operations: Operations, logits: Tensor, token_ids: Sequence[int], num_top: int
) -> tuple[TokenLogprob, ...]:
    """One entry for each of ``token_ids``, from the model's ``logits`` ``[len(token_ids), vocab_size]``."""
    rows = logits.cpu().numpy()
    logprob_rows = operations.log_softmax(logits).cpu().numpy()
    result = []
    for token_id, row, logprobs in zip(token_ids, rows, logprob_rows, strict=True):
        top: list[int] = []
        if num_top > 0:
            # By logits: rounding makes equals of some log-probabilities, and the greedy token must come first.
            ids = largest(row, num_top)
            top = ids[np.argsort(-row[ids], kind="stable")].tolist()
        result.append(TokenLogprob(token_id, float(logprobs[token_id]), tuple((i, float(logprobs[i])) for i in top)))
    return tuple(result)
