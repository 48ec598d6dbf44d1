"""Where a head begins: the best linear guess at what the target will think next.

The hidden state with which the target predicts token ``q + 1`` is, to a good part, a linear function of its feature at
``q - 1`` and of token ``q``. That function has a closed form, and the head has room for it: the fusion holds the
feature's part; the attention of its first layer, made to look at the row itself, carries the token's. So training
begins from a head that guesses a third of the default model's tokens right, after as many seconds as this takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from outrider.draft.distill.batches import make_batch, plan_epoch
from outrider.draft.distill.conversations import Conversation
from outrider.draft.distill.dense_target import DenseTarget, rms_norm
from outrider.draft.distill.head import DraftHead, HeadShape

MAX_ROWS = 200_000  # more do not change the fit
NOISE = 0.02  # standard deviation of weights that nothing is known of
_RIDGE = 0.003  # of each input's mean square
_SELF_SCORE = 8.0  # what a row's attention gives the row itself, where all others are about 0


def fit_hidden_states(
    target: DenseTarget, conversations: Sequence[Conversation], batch_tokens: int, max_rows: int = MAX_ROWS
) -> Tensor:
    """The linear map from a row's inputs to the hidden state before the target's last norm has weighted it.

    Returns ``[hidden, num_taps * hidden + hidden]``: the feature of the row before, then the token's normalised
    embedding. Ridge regression over up to ``max_rows`` rows whose next token counts.
    """
    device, size = target.embedding.device, target.config.hidden_size
    num_inputs = (len(target.taps) + 1) * size
    squares = torch.zeros(num_inputs, num_inputs, dtype=torch.float64, device=device)
    products = torch.zeros(num_inputs, size, dtype=torch.float64, device=device)
    num_rows = 0
    for places in plan_epoch(conversations, batch_tokens, 0, 0):
        if num_rows >= max_rows:
            break
        batch = make_batch([conversations[place] for place in places], device)
        inputs, outputs = _rows(target, batch.token_ids, batch.weights)
        squares += (inputs.T @ inputs).double()
        products += (inputs.T @ outputs).double()
        num_rows += len(inputs)
    squares.diagonal().mul_(1 + _RIDGE).add_(1e-6)
    fit: Tensor = torch.linalg.solve(squares, products)
    return fit.T.float().contiguous()


def _rows(target: DenseTarget, token_ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and wanted outputs of the rows that count, float32; a sequence's first has no feature before it."""
    rows = target.forward(token_ids)
    counts = weights[:, 1:] > 0
    words = rms_norm(functional.embedding(token_ids[:, 1:], target.embedding), _ones(target), _eps(target))
    inputs = torch.cat([rows.features[:, :-1], words], dim=-1)[counts].float()
    norm = torch.where(target.norm == 0, 1.0, target.norm)
    return inputs, rows.hidden[:, 1:][counts].float() / norm


def begin_with_fit(shape: HeadShape, target: DenseTarget, token_map: Tensor, fit: Tensor, seed: int) -> DraftHead:
    """A head that computes ``fit``, a matrix of ``fit_hidden_states``, and has all else still to learn.

    ``token_map`` ``[draft_vocab]`` int64: the target's token for each word of the draft.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator) * NOISE

    hidden = shape.hidden_size
    fusion, words = fit.cpu().split([fit.shape[1] - hidden, hidden], dim=1)
    weights = {"fc.weight": fusion}
    for layer in range(shape.num_layers):
        prefix, width = f"layers.{layer}", 2 * hidden if layer == 0 else hidden
        for name, size in zip("qkv", (shape.attention_size, shape.key_value_size, shape.key_value_size), strict=True):
            weights[f"{prefix}.self_attn.{name}_proj.weight"] = noise(size, width) / 2
        weights |= {
            f"{prefix}.self_attn.o_proj.weight": torch.zeros(hidden, shape.attention_size),
            f"{prefix}.mlp.gate_proj.weight": noise(shape.intermediate_size, hidden),
            f"{prefix}.mlp.up_proj.weight": noise(shape.intermediate_size, hidden),
            f"{prefix}.mlp.down_proj.weight": torch.zeros(hidden, shape.intermediate_size),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
        }
    weights["layers.0.hidden_norm.weight"] = torch.ones(hidden)
    weights["norm.weight"] = target.norm.float().cpu()
    weights["lm_head.weight"] = target.head[token_map.to(target.head.device)].float().cpu()
    _carry_words(shape, weights, words, generator)
    device = target.head.device
    return DraftHead(shape, {name: weight.clone().to(device) for name, weight in weights.items()})


def _carry_words(shape: HeadShape, weights: dict[str, Tensor], words: Tensor, generator: torch.Generator) -> None:
    """Let the first layer's attention add ``words`` ``[hidden, hidden]`` times the row's own normalised embedding.

    Queries and keys are one random projection of the embedding, so that a row scores highest with its like. Values
    and outputs are the best factors of ``words`` that the width of the values has room for.
    """
    prefix, hidden, size = "layers.0.self_attn", shape.hidden_size, shape.key_value_size
    repeats = shape.num_heads // shape.num_kv_heads
    random = torch.randn(max(size, hidden), hidden, generator=generator)
    directions = torch.linalg.qr(random)[0][:size] if size <= hidden else random / hidden**0.5
    directions = directions * (_SELF_SCORE / shape.head_dim**0.5) ** 0.5
    weights[f"{prefix}.k_proj.weight"][:, :hidden] += directions
    weights[f"{prefix}.q_proj.weight"][:, :hidden] += _for_each_query_head(directions, shape, repeats)
    left, scales, right = torch.linalg.svd(words)
    rank = min(size, hidden)
    weights[f"{prefix}.v_proj.weight"][:rank, :hidden] += right[:rank]
    outputs = torch.zeros(size, hidden)
    outputs[:rank] = (left[:, :rank] * scales[:rank]).T / repeats
    weights[f"{prefix}.o_proj.weight"] += _for_each_query_head(outputs, shape, repeats).T


def _for_each_query_head(rows: Tensor, shape: HeadShape, repeats: int) -> Tensor:
    """``[num_kv_heads * head_dim, n]`` to ``[num_heads * head_dim, n]``: each for all query heads that share it."""
    return rows.view(shape.num_kv_heads, shape.head_dim, -1).repeat_interleave(repeats, dim=0).flatten(0, 1)


def _ones(target: DenseTarget) -> Tensor:
    return torch.ones(target.config.hidden_size, device=target.embedding.device)


def _eps(target: DenseTarget) -> float:
    return target.config.rms_norm_eps
