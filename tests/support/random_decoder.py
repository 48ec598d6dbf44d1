"""A decoder of random layers for the native kernels, in every shape and mixture of weight forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from paged_cache import PagedCache, Run, Trees, textbook_attention
from stored_weights import FormedWeight, pack, random_weight
from torch import Tensor

from outrider.kernels.operations import NULL_PAGE, DecoderLayer, DecoderPass, DecoderShape, Operations

MATRICES = ("qkv", "attention_output", "gate_up", "down")


@dataclass(frozen=True)
class DecoderKind:
    hidden_size: int = 96
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 160
    formats: Sequence[Sequence[str]] = (("Q4_1",) * 4, ("Q4_1",) * 4)  # of MATRICES, layer by layer
    windows: Sequence[bool] = (False, False)
    has_biases: bool = False
    has_query_key_norm: bool = False
    is_wide: bool = False  # its first layer
    norm_before_residual: bool = False

    @property
    def shape(self) -> DecoderShape:
        return DecoderShape(self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim, 1e-5)

    def stacked(self, layer: int) -> dict[str, tuple[int, list[int]]]:
        """in_features, and the out_features of what is stacked, of each of MATRICES."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "qkv": (self.hidden_size * (2 if self.is_wide and layer == 0 else 1), [query, key, key]),
            "attention_output": (query, [self.hidden_size]),
            "gate_up": (self.hidden_size, [self.intermediate_size] * 2),
            "down": (self.intermediate_size, [self.hidden_size]),
        }


def _mixed(*formats: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(formats[(layer + i) % len(formats)] for i in range(4)) for layer in range(len(formats)))


def _all(format: str) -> tuple[tuple[str, ...], ...]:
    return ((format,) * 4,) * 2


AWKWARD = {"hidden_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12, "intermediate_size": 100}
KINDS = {
    "Q4_1": DecoderKind(),
    "Q4_0, multi-query": DecoderKind(num_kv_heads=1, formats=_all("Q4_0")),
    "Q8_0, multi-head": DecoderKind(num_kv_heads=6, formats=_all("Q8_0")),
    "F32, awkward": DecoderKind(**AWKWARD, formats=_all("F32")),
    "BF16, awkward, biases": DecoderKind(**AWKWARD, formats=_all("BF16"), has_biases=True),
    "Q8_CHANNEL, awkward, norms, biases": DecoderKind(
        **AWKWARD, formats=_all("Q8_CHANNEL"), has_biases=True, has_query_key_norm=True
    ),
    "mixed, windows, biases": DecoderKind(
        formats=_mixed("Q4_1", "Q8_0", "F32", "Q4_0", "Q8_CHANNEL", "BF16"),
        windows=(False, True, True, False, True, False),
        has_biases=True,
    ),
    "all windows, norms": DecoderKind(windows=(True, True), has_query_key_norm=True),
    "embeddings, int8": DecoderKind(is_wide=True, formats=_all("Q8_0")),
    "embeddings, awkward, biases": DecoderKind(
        **AWKWARD, formats=_all("F32"), has_biases=True, is_wide=True, norm_before_residual=True
    ),
    "large": DecoderKind(hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536),
}
WINDOW = 40


class RandomDecoder:
    """Layers and sequences to run them on. ``lengths``: tokens of each sequence."""

    def __init__(self, kind: DecoderKind, lengths: list[int], seed: int = 1) -> None:
        self.kind = kind
        self.lengths = lengths
        random = np.random.default_rng(seed)

        def vector(*shape: int) -> Tensor:
            return torch.from_numpy(random.standard_normal(shape).astype(np.float32))

        self.matrices: list[dict[str, list[FormedWeight]]] = []
        self.biases: list[dict[str, Tensor]] = []
        self.layers: list[DecoderLayer] = []
        for index, (formats, has_window) in enumerate(zip(kind.formats, kind.windows, strict=True)):
            layer = kind.stacked(index)
            is_wide = kind.is_wide and index == 0
            matrices = {
                name: [random_weight(format, n, in_features, int(random.integers(2**31))) for n in stacked]
                for (name, (in_features, stacked)), format in zip(layer.items(), formats, strict=True)
            }
            biases = {name: vector(sum(layer[name][1])) for name in MATRICES} if kind.has_biases else {}
            norms = vector(kind.num_heads + kind.num_kv_heads, kind.head_dim) if kind.has_query_key_norm else None
            packed = {name: pack(matrices[name], biases[name].numpy() if biases else None) for name in MATRICES}
            self.layers.append(
                DecoderLayer(
                    input_norm=vector(kind.hidden_size),
                    query_key_norm=norms,
                    mlp_norm=vector(kind.hidden_size),
                    has_window=has_window,
                    embedding_norm=vector(kind.hidden_size) if is_wide else None,
                    norm_before_residual=is_wide and kind.norm_before_residual,
                    **packed,
                )
            )
            self.matrices.append(matrices)
            self.biases.append(biases)
        self.residuals = [vector(n, kind.hidden_size) for n in lengths]
        self.embeddings = [vector(n, kind.hidden_size) for n in lengths]
        angles = [vector(n, kind.head_dim // 2) for n in lengths]
        self.cos, self.sin = [a.cos() for a in angles], [a.sin() for a in angles]

    def layers_of(self, ops: Operations) -> list[DecoderLayer]:
        """The layers, packed by other kernels than the native ones; not Q8_CHANNEL, which no file holds."""
        return [
            dataclasses.replace(
                layer,
                **{
                    name: ops.pack_linear([weight.stored for weight in matrices[name]], biases.get(name))
                    for name in MATRICES
                },
            )
            for layer, matrices, biases in zip(self.layers, self.matrices, self.biases, strict=True)
        ]

    def pages(self, ops: Operations, page_size: int = 16) -> PagedCache:
        return PagedCache(ops, self.lengths, self.kind.num_kv_heads, self.kind.head_dim, page_size)

    def fresh_cache(self, pages: PagedCache) -> Tensor:
        """Of all layers, everything poisoned but the null page."""
        cache = torch.empty((len(self.layers), 2, *pages.key_cache.shape), dtype=pages.key_cache.dtype)
        cache.view(torch.uint8).fill_(0xFF)
        cache[:, :, NULL_PAGE] = 0
        return cache

    def inputs(
        self,
        ops: Operations,
        pages: PagedCache,
        runs: list[Run],
        taps: tuple[int, ...] = (),
        trees: Trees | None = None,
    ) -> tuple[Tensor, DecoderPass]:
        """The rows of ``runs``, and what their layers share."""
        residual, embeddings, cos, sin = (
            torch.cat([rows[sequence][start:stop] for sequence, start, stop in runs])
            for rows in (self.residuals, self.embeddings, self.cos, self.sin)
        )
        kind, batch = self.kind, pages.batch(runs, trees)
        full, window = (
            ops.plan_attention(batch, pages.page_size, kind.num_heads, kind.num_kv_heads, kind.head_dim, size)
            if wanted in kind.windows
            else None
            for wanted, size in ((False, None), (True, WINDOW))
        )
        tapped = torch.empty(len(residual), len(taps) * kind.hidden_size) if taps else None
        embeddings = embeddings if kind.is_wide else None
        return residual, DecoderPass(cos, sin, full, window, embeddings, taps, tapped)

    def exact(self, sequence: int, residual: Tensor | None = None, embeddings: Tensor | None = None) -> Tensor:
        """What all layers make of one sequence in float64, where no activation is quantised.

        ``residual``, ``embeddings``: other rows in place of its own, ``[length, hidden_size]``.
        """
        kind, residual = self.kind, (self.residuals[sequence] if residual is None else residual).double()
        embeddings = (self.embeddings[sequence] if embeddings is None else embeddings).double()
        cos, sin = (angles[sequence][: len(residual), None].double() for angles in (self.cos, self.sin))
        for layer, matrices, biases in zip(self.layers, self.matrices, self.biases, strict=True):

            def linear(name: str, x: Tensor, matrices: dict = matrices, biases: dict = biases) -> Tensor:
                matrix = torch.from_numpy(np.concatenate([weight.values for weight in matrices[name]]))
                return x @ matrix.T + (biases[name].double() if biases else 0)

            def norm(x: Tensor, weight: Tensor) -> Tensor:
                return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

            normed = norm(residual, layer.input_norm)
            residual = normed if layer.norm_before_residual else residual
            if layer.embedding_norm is not None:
                normed = torch.cat([norm(embeddings, layer.embedding_norm), normed], dim=-1)
            qkv = linear("qkv", normed).view(len(residual), -1, kind.head_dim)
            rotated, value = qkv[:, : -kind.num_kv_heads], qkv[:, -kind.num_kv_heads :]
            if layer.query_key_norm is not None:
                rotated = norm(rotated, layer.query_key_norm)
            first, second = rotated.chunk(2, dim=-1)
            rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
            query, key = rotated[:, : kind.num_heads], rotated[:, kind.num_heads :]
            attended = textbook_attention(query, key, value, WINDOW if layer.has_window else None)
            residual = residual + linear("attention_output", attended.flatten(1))
            gate, up = linear("gate_up", norm(residual, layer.mlp_norm)).chunk(2, dim=-1)
            residual = residual + linear("down", gate * torch.sigmoid(gate) * up)
        return residual
