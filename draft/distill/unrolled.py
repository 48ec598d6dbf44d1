"""What a head is trained for: whole chains, each step on what the step before left (EAGLE-3's training-time test).

Rows keep their places: at unrolled step ``j`` (from 0), row ``r`` reads token ``r``, stands at position ``r`` and is
the ``j``-th guess of the chain that begins at row ``r - j``. So it reads what row ``r - 1`` left in step ``j - 1``, and
attends to the true rows (step 0) up to ``r - j`` and to its own chain: row ``r - j + i`` of step ``i``, for ``i`` from
1 to ``j``. Rows ``r < j`` belong to no chain; they see themselves alone and count nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outrider.draft.distill.head import KeysAndValues, ReadyHead


def unroll(
    head: ReadyHead, embeddings: Tensor, features: Tensor, rotary: tuple[Tensor, Tensor], num_steps: int
) -> Iterator[Tensor]:
    """The residual stream that each unrolled step leaves, ``[num_seqs, length, hidden]``.

    ``embeddings``: of the tokens, ``[num_seqs, length, hidden]``; ``features``: the target's at each position,
    ``[num_seqs, length, 3 * hidden]``. Row ``r`` reads the feature of ``r - 1``, row 0 zeros.
    """
    history: list[list[KeysAndValues]] = [[] for _ in range(head.shape.num_layers)]
    residual = head.fuse(features)
    for _ in range(num_steps):
        residual = _shifted(residual, 1)
        for layer, found in enumerate(history):
            query, key, value = head.qkv(layer, embeddings, residual, rotary)
            found.append((key, value))
            residual = head.finish(layer, residual, attend(query, found))
        yield residual


def attend(query: Tensor, history: Sequence[KeysAndValues]) -> Tensor:
    """Attention of the last step in ``history``; shapes as in ``KeysAndValues``, ``query``'s too."""
    (true_keys, true_values), *chain = history
    if not chain:
        return functional.scaled_dot_product_attention(query, true_keys, true_values, is_causal=True)
    length, step, scale = query.shape[2], len(chain), query.shape[3] ** -0.5
    place = torch.arange(length, device=query.device)
    hidden = place[None, :] > place[:, None] - step  # [length, length]
    scores = [(query @ true_keys.transpose(2, 3) * scale).masked_fill(hidden, float("-inf"))]
    values = []
    for number, (keys, step_values) in enumerate(chain, start=1):
        scores.append((query * _shifted(keys, step - number)).sum(dim=-1, keepdim=True) * scale)
        values.append(_shifted(step_values, step - number))
    weights = torch.cat(scores, dim=-1).float().softmax(dim=-1).to(query.dtype)  # [..., length, length + step]
    attended = weights[..., :length] @ true_values
    for number, step_values in enumerate(values):
        attended = attended + weights[..., length + number, None] * step_values
    return attended


def _shifted(rows: Tensor, distance: int) -> Tensor:
    """Rows ``[..., length, width]`` moved ``distance`` places on; zeros come in."""
    return functional.pad(rows[..., : rows.shape[-2] - distance, :], (0, 0, distance, 0)) if distance else rows


def acceptance_loss(logits: Tensor, target_probs: Tensor, row_weights: Tensor, directness: float) -> Tensor:
    """How much of what the target says a draft would lose: the total variation ``1 - sum(min(p, q))``, summed up.

    That is the probability that a token of the draft ``q`` is rejected by the target ``p``. Its own gradient is
    flat where the two lie far apart, so part of the gradient, ``1 - directness`` of it, is that of KL(p || q), which
    bounds it (Pinsker).

    ``logits`` ``[num_rows, draft_vocab]``; ``target_probs`` the same, float32, each row summing to 1; ``row_weights``
    ``[num_rows]``.
    """
    loss: Tensor = _AcceptanceLoss.apply(logits, target_probs, row_weights, directness)  # type: ignore[no-untyped-call]
    return loss


class _AcceptanceLoss(torch.autograd.Function):
    """Both gradients have closed forms, so no graph of the softmax over the vocabulary is kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target_probs: Tensor, row_weights: Tensor, directness: float) -> Tensor:
        probs = logits.float().softmax(dim=-1)
        loss = 1.0 - torch.minimum(target_probs, probs).sum(dim=-1)
        gradient = (probs - target_probs) * (1.0 - directness)
        if directness > 0.0:
            short = -torch.where(probs < target_probs, probs, 0.0)  # d loss / d q * q
            gradient += directness * (short - probs * short.sum(dim=-1, keepdim=True))
        ctx.save_for_backward((gradient * row_weights[:, None]).to(logits.dtype))
        return (loss * row_weights).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None, None, None
