"""Log-probabilities of chosen tokens, as the model gave them: before bias, penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.kernels.operations import Operations
from outrider.verify.sampling_params import TokenLogprob


def token_logprobs(
    operations: Operations, logits: Tensor, token_ids: Sequence[int], num_top: int
) -> tuple[TokenLogprob, ...]:
    """One entry for each of ``token_ids``, from the model's ``logits`` ``[len(token_ids), vocab_size]``."""
    logprob_rows = operations.log_softmax(logits).cpu().numpy()
    # By logits: rounding makes equals of some log-probabilities, and the greedy token must come first.
    count = min(num_top, logits.shape[1])
    tops = operations.top_k(logits, count).tolist() if count > 0 else [[]] * len(logits)
    result = []
    for token_id, top, logprobs in zip(token_ids, tops, logprob_rows, strict=True):
        result.append(TokenLogprob(token_id, float(logprobs[token_id]), tuple((i, float(logprobs[i])) for i in top)))
    return tuple(result)
