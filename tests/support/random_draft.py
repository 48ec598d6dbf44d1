"""A random draft, sequences it has seen the beginnings of, and the chains that it makes of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from paged_cache import PagedCache
from random_decoder import WINDOW, DecoderKind, RandomDecoder
from stored_weights import random_weight
from torch import Tensor

from outrider.kernels.draft_model import ChainLimits, DraftModel
from outrider.kernels.operations import Operations, RaggedBatch

MAX_STEPS = 7
TABLE_SIZE = 300


class RandomDraft:
    """``num_tokens``: of each sequence, those whose rows are computed before its chain."""

    def __init__(
        self, kind: DecoderKind, num_tokens: list[int], head_format: str, vocab_size: int = 77, has_map: bool = True
    ) -> None:
        self.num_tokens = num_tokens
        self.decoder = RandomDecoder(kind, [n + MAX_STEPS for n in num_tokens])
        self.head = random_weight(head_format, vocab_size, kind.hidden_size, 3)
        self.table = random_weight(head_format, TABLE_SIZE, kind.hidden_size, 4)
        generator = torch.Generator().manual_seed(5)
        self.norm = 4 * torch.rand(kind.hidden_size, generator=generator)  # so that some tokens are likely
        self.token_map = torch.randperm(TABLE_SIZE, generator=generator)[:vocab_size] if has_map else None

    def model(self, ops: Operations, is_native: bool = True) -> DraftModel:
        kind = self.decoder.kind
        layers = self.decoder.layers if is_native else self.decoder.layers_of(ops)
        return DraftModel(
            decoder=ops.pack_decoder(layers, kind.shape),
            shape=kind.shape,
            sliding_window=WINDOW if True in kind.windows else None,
            embedding=ops.pack_embedding(self.table.stored),
            norm=self.norm,
            head=ops.pack_head(self.head.stored),
            token_map=self.token_map,
            conditioned=kind.is_wide,
        )

    def ready(self, ops: Operations, model: DraftModel) -> tuple[PagedCache, Tensor, list[Tensor]]:
        """Pages and cache with the beginnings of all sequences, and what the layers left of each one's last row."""
        pages = self.decoder.pages(ops)
        cache = self.decoder.fresh_cache(pages)
        hidden = []
        for sequence, num_tokens in enumerate(self.num_tokens):
            residual, decoder_pass = self.decoder.inputs(ops, pages, [(sequence, 0, num_tokens)])
            hidden.append(ops.decode(residual, model.decoder, cache, decoder_pass)[-1:])
        return pages, cache, hidden

    def batch(self, pages: PagedCache, sequences: list[int]) -> RaggedBatch:
        """The first row of each one's chain."""
        return pages.batch([(i, self.num_tokens[i], self.num_tokens[i] + 1) for i in sequences])

    def angles(self, sequences: list[int]) -> tuple[Tensor, Tensor]:
        """Of the chains' rows: ``[num_seqs, MAX_STEPS, head_dim // 2]``, cosines and sines."""
        cos, sin = (
            torch.stack([rows[i][self.num_tokens[i] : self.num_tokens[i] + MAX_STEPS] for i in sequences])
            for rows in (self.decoder.cos, self.decoder.sin)
        )
        return cos, sin

    def exact_chain(self, sequence: int, hidden: Tensor, num_steps: int) -> Iterator[tuple[Tensor, int]]:
        """Logits of each step in float64 and the likeliest token, always of the whole sequence anew.

        ``hidden``: ``[1, hidden_size]``, what the layers left of the last row before the chain.
        """
        num_tokens, conditioned = self.num_tokens[sequence], self.decoder.kind.is_wide
        residual = self.decoder.residuals[sequence][:num_tokens].double()
        embeddings = self.decoder.embeddings[sequence][:num_tokens].double()
        hidden = hidden.double()
        for _ in range(num_steps):
            normed = hidden / (hidden.square().mean() + 1e-5).sqrt() * self.norm
            logits = (normed @ torch.from_numpy(self.head.values).T)[0]
            token_id = int(logits.argmax() if self.token_map is None else self.token_map[logits.argmax()])
            yield logits, token_id
            embedding = torch.from_numpy(self.table.values[token_id])[None]
            residual = torch.cat([residual, hidden if conditioned else embedding])
            embeddings = torch.cat([embeddings, embedding])
            hidden = self.decoder.exact(sequence, residual, embeddings)[-1:]


def chain_limits(num_seqs: int, seed: int = 6) -> ChainLimits:
    """Short and long ones, some that end early, half at a temperature."""
    random = np.random.default_rng(seed)
    return ChainLimits(
        limits=random.integers(0, MAX_STEPS + 1, num_seqs),
        min_survival=random.choice([0.0, 0.0, 0.01, 0.2], num_seqs),
        temperatures=random.choice([0.0, 0.0, 0.7, 1.3], num_seqs),
        draws=random.integers(0, 2**64, (num_seqs, MAX_STEPS), dtype=np.uint64),
    )


def some(limits: ChainLimits, sequences: list[int]) -> ChainLimits:
    """The limits of these sequences."""
    return ChainLimits(
        limits.limits[sequences],
        limits.min_survival[sequences],
        limits.temperatures[sequences],
        limits.draws[sequences],
    )
