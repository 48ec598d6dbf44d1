"""Keys and values of several sequences in scattered pages, and the attention over them that textbooks describe."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.operations import NULL_PAGE, Operations, RaggedBatch

Run = tuple[int, int, int]  # a sequence, the first position of its rows, their end
Trees = dict[int, list[int]]  # by sequence, the masks of its rows


class PagedCache:
    """Pages in random order; all that is nobody's, or not yet written, is poisoned with NaN."""

    def __init__(
        self,
        ops: Operations,
        lengths: list[int],
        num_kv_heads: int,
        head_dim: int,
        page_size: int = 16,
        seed: int = 4,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.page_size = page_size
        self.keys = [torch.randn(n, num_kv_heads, head_dim, generator=generator) for n in lengths]
        self.values = [torch.randn(n, num_kv_heads, head_dim, generator=generator) for n in lengths]
        counts = [-(-n // page_size) for n in lengths]
        pages = (torch.randperm(sum(counts), generator=generator) + 1).split(counts)
        self.page_tables = np.full((len(lengths), max(counts) + 1), NULL_PAGE, dtype=np.int32)
        for table, own in zip(self.page_tables, pages, strict=True):
            table[: len(own)] = own.numpy()
        dtype, width = ops.kv_layout(head_dim)
        shape = (sum(counts) + 1, page_size, num_kv_heads, width)
        self.key_cache, self.value_cache = (torch.empty(shape, dtype=dtype) for _ in range(2))
        self.poison()

    def poison(self) -> None:
        for cache in (self.key_cache, self.value_cache):
            cache.view(torch.uint8).fill_(0xFF)  # NaN in float32, in half precision, and as a scale of int8
            cache[NULL_PAGE] = 0

    def slots(self, sequence: int, start: int, stop: int) -> list[int]:
        table, size = self.page_tables[sequence], self.page_size
        return [int(table[pos // size]) * size + pos % size for pos in range(start, stop)]

    def batch(self, runs: list[Run], trees: Trees | None = None) -> RaggedBatch:
        """The rows of ``runs``. Those of a sequence in ``trees`` have these masks: they stand where they are stored
        in ``keys`` and ``values``, one after the other, and at the positions of their depths."""
        masks, positions = [], []
        for sequence, start, stop in runs:
            own = (trees or {}).get(sequence)
            masks += own or [0] * (stop - start)
            positions += [start + mask.bit_count() - 1 for mask in own] if own else range(start, stop)
        return RaggedBatch(
            cu_seqlens_q=np.cumsum([0, *(stop - start for _, start, stop in runs)], dtype=np.int32),
            seq_lens=np.array([stop for _, _, stop in runs], dtype=np.int32),
            page_tables=self.page_tables[[sequence for sequence, _, _ in runs]],
            positions=np.array(positions, dtype=np.int64),
            slot_mapping=np.array([slot for run in runs for slot in self.slots(*run)], dtype=np.int64),
            tree_masks=None if trees is None else np.array(masks, dtype=np.uint64),
        )

    def attend(
        self,
        ops: Operations,
        queries: list[Tensor],
        runs: list[Run],
        window: int | None,
        trees: Trees | None = None,
    ) -> list[Tensor]:
        """Write the runs' keys and values, then attend: one result a run. ``queries``: of each whole sequence."""
        num_heads, head_dim = queries[0].shape[1:]
        num_kv_heads = self.key_cache.shape[2]
        plan = ops.plan_attention(self.batch(runs, trees), self.page_size, num_heads, num_kv_heads, head_dim, window)
        keys = torch.cat([self.keys[sequence][start:stop] for sequence, start, stop in runs])
        values = torch.cat([self.values[sequence][start:stop] for sequence, start, stop in runs])
        ops.write_kv(keys, values, self.key_cache, self.value_cache, plan)
        query = torch.cat([queries[sequence][start:stop] for sequence, start, stop in runs])
        result = ops.paged_attention(query, self.key_cache, self.value_cache, head_dim**-0.5, plan)
        return list(result.split([stop - start for _, start, stop in runs]))


def kept(x: Tensor, kv_format: str) -> Tensor:
    """What a cache of ``f32``, ``f16`` or ``int8`` keeps of keys or values ``[..., head_dim]``, in float64."""
    if kv_format == "f32":
        return x.double()
    if kv_format == "f16":
        return x.half().double()
    largest = x.abs().amax(-1, keepdim=True)  # one scale for each token and head
    inverse = torch.full_like(largest, 127) / largest  # `127 / largest` would multiply by a rounded 1 / largest
    return torch.round(x * inverse).double() * (largest / 127).double()


def textbook_attention(
    query: Tensor, keys: Tensor, values: Tensor, window: int | None, positions: Tensor | None = None
) -> Tensor:
    """Causal attention of one sequence's rows at ``positions`` (None: of all) in float64.

    ``query``: ``[length, num_heads, head_dim]``; ``keys``, ``values``: ``[length, num_kv_heads, head_dim]``.
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    everywhere = torch.arange(len(query))
    positions = everywhere if positions is None else positions
    hidden = everywhere[None, :] > positions[:, None]
    if window is not None:
        hidden |= everywhere[None, :] <= positions[:, None] - window
    scores = torch.einsum("qhd,khd->hqk", query[positions].double(), keys) * query.shape[2] ** -0.5
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
