"""What quantisation costs: the same texts through the kernels and through float32, distribution against distribution.

torch is imported where it is used: the command line imports this file and need not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from outrider.server.engine.settings import EngineSettings
from outrider.verify.checkpoint.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.kernels.operations import Operations
    from outrider.verify.checkpoint.checkpoint import Checkpoint

ROWS_PER_PASS = 128
_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Quality:
    """How the distributions of the next token differ, over all positions of all texts."""

    num_tokens: int  # predicted: the first of each window is not
    kl_divergence: float  # mean of KL(reference || measured), nats
    kl_divergence_p99: float  # what 99 % of the positions stay below
    perplexity: float
    reference_perplexity: float
    same_top_token: float  # part of the positions where both find the same token likeliest

    @property
    def perplexity_ratio(self) -> float:
        return self.perplexity / self.reference_perplexity


class QualityMeter:
    """Adds up what ``Quality`` says."""

    def __init__(self) -> None:
        self._kl_divergences: list[float] = []
        self._log_likelihood = 0.0
        self._reference_log_likelihood = 0.0
        self._num_same_top = 0

    @property
    def num_tokens(self) -> int:
        return len(self._kl_divergences)

    def add(self, reference: Tensor, measured: Tensor, next_ids: Tensor) -> None:
        """Logits ``[num_tokens, vocab_size]`` of both for the same positions, and the ids that came next."""
        wanted, found = (logits.double().log_softmax(dim=-1) for logits in (reference, measured))
        # A token the reference rules out adds nothing, whatever the other says.
        terms = (wanted.exp() * (wanted - found)).where(wanted > -math.inf, 0.0)
        self._kl_divergences += terms.sum(dim=-1).tolist()
        self._log_likelihood += found.gather(1, next_ids[:, None]).sum().item()
        self._reference_log_likelihood += wanted.gather(1, next_ids[:, None]).sum().item()
        self._num_same_top += int((wanted.argmax(dim=-1) == found.argmax(dim=-1)).sum())

    def result(self) -> Quality:
        """Over all that was added, which must be one token at least."""
        return Quality(
            num_tokens=self.num_tokens,
            kl_divergence=float(np.mean(self._kl_divergences)),
            kl_divergence_p99=float(np.percentile(self._kl_divergences, 99)),
            perplexity=math.exp(-self._log_likelihood / self.num_tokens),
            reference_perplexity=math.exp(-self._reference_log_likelihood / self.num_tokens),
            same_top_token=self._num_same_top / self.num_tokens,
        )


class Scorer:
    """A model and the pages of one sequence of at most ``context`` tokens."""

    def __init__(self, checkpoint: Checkpoint, operations: Operations, context: int) -> None:
        from outrider.kvcache.storage import KVStorage
        from outrider.verify.transformer import Transformer

        self._model = Transformer(checkpoint, operations, context)
        self._storage = KVStorage([self._model.kv_layers], 1 + -(-context // _PAGE_SIZE), _PAGE_SIZE)

    def logits(self, token_ids: Tensor, start: int) -> Tensor:
        """``[num_tokens, vocab_size]`` for tokens at positions ``start``, ...; those before must have been given."""
        from outrider.kernels.operations import RaggedBatch

        stop = start + len(token_ids)
        positions = np.arange(start, stop, dtype=np.int64)
        batch = RaggedBatch(
            cu_seqlens_q=np.array([0, len(token_ids)], dtype=np.int32),
            seq_lens=np.array([stop], dtype=np.int32),
            page_tables=np.arange(1, 1 + -(-stop // _PAGE_SIZE), dtype=np.int32)[None],
            positions=positions,
            slot_mapping=positions + _PAGE_SIZE,  # page 0 is the null page
        )
        return self._model.logits(self._model.forward(token_ids, batch, self._storage))


def measure(
    settings: EngineSettings, texts: Sequence[str], context: int, max_tokens: int, report: Callable[[str], None]
) -> Quality:
    """Kernels, quantisation and cache of ``settings`` beside the reference kernels, on the weights of the checkpoint.

    Texts are cut into windows of ``context`` tokens, each read from an empty cache. ``max_tokens``: how many to
    predict, 0: all. ``report`` hears of the progress. Holds both models in memory, the one in float32.

    Raises:
        UnsupportedCheckpoint: the model cannot be loaded.
        ValueError: the kernels cannot do what the settings ask, the context is too long, or the texts too short.
    """
    import torch

    from outrider.kernels.operations import load_operations
    from outrider.verify.checkpoint.checkpoint import open_checkpoint

    settings = settings.resolved()
    path = Path(settings.model_path)
    checkpoint = open_checkpoint(path)
    longest = checkpoint.config.max_position_embeddings
    if not 2 <= context <= longest:
        raise ValueError(f"the context must be from 2 to {longest}, what the model was made for, not {context}")
    windows = list(cut(load_tokenizer(path), texts, context, max_tokens))
    if not windows:
        raise ValueError("the texts are too short: nothing follows a first token")
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    report("loading the model")
    operations = load_operations(
        settings.kernels,
        num_threads=settings.num_threads,
        quantize=settings.quantize,
        kv_cache_dtype=settings.kv_cache_dtype,
    )
    measured = Scorer(checkpoint, operations, context)
    report("loading it in float32")
    reference = Scorer(checkpoint, load_operations("reference"), context)
    meter, num_all = QualityMeter(), sum(len(window) - 1 for window in windows)
    with torch.inference_mode():
        for window in windows:
            token_ids = torch.tensor(window)
            for start in range(0, len(window) - 1, ROWS_PER_PASS):
                rows, next_ids = token_ids[start:-1][:ROWS_PER_PASS], token_ids[start + 1 :][:ROWS_PER_PASS]
                meter.add(reference.logits(rows, start), measured.logits(rows, start), next_ids)
                report(f"{meter.num_tokens} of {num_all} tokens, KL divergence {meter.result().kl_divergence:.5f}")
    return meter.result()


def cut(tokenizer: Tokenizer, texts: Sequence[str], context: int, max_tokens: int) -> Iterator[list[int]]:
    """Windows of 2 to ``context`` tokens, in which ``max_tokens`` are predicted (0: all). Control tokens are text."""
    left = max_tokens or math.inf
    for text in texts:
        token_ids = tokenizer.encode(text, allow_special=False)
        for start in range(0, len(token_ids) - 1, context):
            window = token_ids[start : start + int(min(context, left + 1))]
            if len(window) < 2 or left < 1:
                return
            left -= len(window) - 1
            yield window
