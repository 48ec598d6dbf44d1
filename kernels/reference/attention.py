"""Paged attention of ragged rows in plain torch, bit for bit independent of the pass around a row.

Rows are cut into tiles of R consecutive positions of one sequence, keys into blocks of ``KV_BLOCK`` positions
counted from the sequence's start. Each (tile, block) pair is a small softmax attention of one fixed shape;
the blocks of a tile are merged in ascending order by their log-sum-exp (Dao et al. 2023, FlashAttention-2, 3.1).
A row is thus reduced in an order that its own position fixes. A block or key that a row must not see
contributes exact zeros, which change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.kernels.operations import MAX_TREE_ROWS, RaggedBatch
from outrider.kernels.reference.row_tiles import CANONICAL_ROWS, proven_row_counts
from outrider.kernels.token_trees import TreePaths, tree_paths

KV_BLOCK = 256
MAX_PAIRS_AT_ONCE = 64
"""(tile, block) pairs per matrix product: bounds the gathered keys to a few tens of MB."""


@dataclass(frozen=True, slots=True)
class PairGroup:
    """(tile, block) pairs that are computed together, and what they read."""

    tiles: Tensor | None  # [num_pairs], index of the tile; None: one pair for each tile, in order
    kv_rows: Tensor  # [num_pairs * num_kv_heads * KV_BLOCK], rows of a cache seen as [pages * page_size * kv_heads, d]
    hidden: Tensor  # [num_pairs, 1, R, 1, KV_BLOCK], True where a row must not see a key


@dataclass(frozen=True, slots=True)
class ReferenceAttentionPlan:
    """One pass's tiles and pairs, shared by all layers."""

    slot_mapping: Tensor  # [num_tokens]
    tile_rows: Tensor  # [num_tiles * R], rows of the pass; pads repeat a row, their results are dropped
    row_places: Tensor  # [num_tokens], where each row stands in the tiles
    rows_per_tile: int
    groups: tuple[PairGroup, ...]
    merge_order: tuple[tuple[Tensor, Tensor], ...]  # by block: (tiles that have it, their pairs)


@lru_cache(maxsize=64)
def proven_tile_rows(group_size: int, head_dim: int, num_threads: int) -> tuple[int, ...]:
    """Tokens a tile may hold on this machine: all give a row the bits of ``CANONICAL_ROWS`` tokens.

    ``num_threads`` is part of the key because the products' blocking may follow it.
    """
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(head_dim, KV_BLOCK, generator=generator)
    values = torch.randn(KV_BLOCK, head_dim, generator=generator)
    proven = set(range(1, CANONICAL_ROWS + 1))
    for matrix in (keys, values):

        def product(rows: Tensor, matrix: Tensor = matrix) -> Tensor:
            # [tokens, group * in] -> [tokens, group * out]: the rows of one token are the query heads of a KV head
            tall = rows.view(1, -1, matrix.shape[0])
            return torch.bmm(tall, matrix[None]).view(len(rows), -1)

        candidates = range(1, CANONICAL_ROWS)
        proven &= set(
            proven_row_counts(product, group_size * matrix.shape[0], group_size * matrix.shape[1], candidates)
        )
    return tuple(sorted(proven))


def plan_attention(
    batch: RaggedBatch,
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    sliding_window: int | None,
) -> ReferenceAttentionPlan:
    """Cut the pass into tiles and pairs; see the module's docstring."""
    num_rows = np.diff(batch.cu_seqlens_q)  # [num_seqs]
    allowed = proven_tile_rows(num_heads // num_kv_heads, head_dim, torch.get_num_threads())
    longest = int(num_rows.max(initial=1))
    tile_size = next((size for size in allowed if size >= longest), CANONICAL_ROWS)

    paths = tree_paths(batch)
    rows_used = np.where(paths.is_tree, 1, tile_size)  # rows of a tree attend to different keys
    tile_seqs, tile_starts = _tiles(num_rows, rows_used)
    places = np.arange(tile_size)
    tile_rows = (batch.cu_seqlens_q[tile_seqs] + tile_starts)[:, None] + places  # [num_tiles, R]
    in_sequence = (tile_rows < batch.cu_seqlens_q[tile_seqs + 1][:, None]) & (places < rows_used[tile_seqs][:, None])
    row_places = np.empty(batch.num_tokens, dtype=np.int64)
    row_places[tile_rows[in_sequence]] = np.flatnonzero(in_sequence)
    tile_rows = np.where(in_sequence, tile_rows, tile_rows[:, :1])

    positions = batch.positions[tile_rows]  # [num_tiles, R]
    pair_tiles, pair_blocks = _pairs(positions, sliding_window)
    groups = tuple(
        _pair_group(batch, paths, page_size, num_kv_heads, sliding_window, tile_seqs, tile_rows, tiles, blocks)
        for tiles, blocks in _in_groups(pair_tiles, pair_blocks)
    )
    return ReferenceAttentionPlan(
        slot_mapping=torch.from_numpy(batch.slot_mapping),
        tile_rows=torch.from_numpy(tile_rows.reshape(-1)),
        row_places=torch.from_numpy(row_places),
        rows_per_tile=tile_size,
        groups=groups,
        merge_order=_merge_order(pair_tiles),
    )


def _tiles(
    num_rows: npt.NDArray[np.int32], tile_size: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Each tile's sequence and its first row within it. ``tile_size``: ``[num_seqs]``."""
    tiles_per_seq = -(-num_rows // tile_size)
    tile_seqs = np.repeat(np.arange(len(num_rows)), tiles_per_seq)
    first_tile = np.cumsum(tiles_per_seq) - tiles_per_seq
    return tile_seqs, (np.arange(len(tile_seqs)) - first_tile[tile_seqs]) * tile_size[tile_seqs]


def _pairs(
    positions: npt.NDArray[np.int64], sliding_window: int | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Every (tile, block) in which some row of the tile sees a key, tile by tile, blocks ascending."""
    last_block = positions.max(axis=1) // KV_BLOCK
    first_block = np.zeros_like(last_block)
    if sliding_window is not None:
        first_block = np.maximum(positions.min(axis=1) - sliding_window + 1, 0) // KV_BLOCK
    count = last_block - first_block + 1
    pair_tiles = np.repeat(np.arange(len(positions)), count)
    first_pair = np.cumsum(count) - count
    return pair_tiles, np.arange(len(pair_tiles)) - first_pair[pair_tiles] + first_block[pair_tiles]


def _in_groups(
    pair_tiles: npt.NDArray[np.int64], pair_blocks: npt.NDArray[np.int64]
) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    cuts = range(0, len(pair_tiles), MAX_PAIRS_AT_ONCE)
    return [(pair_tiles[c : c + MAX_PAIRS_AT_ONCE], pair_blocks[c : c + MAX_PAIRS_AT_ONCE]) for c in cuts]


def _pair_group(
    batch: RaggedBatch,
    paths: TreePaths,
    page_size: int,
    num_kv_heads: int,
    sliding_window: int | None,
    tile_seqs: npt.NDArray[np.int64],
    tile_rows: npt.NDArray[np.int64],
    tiles: npt.NDArray[np.int64],
    blocks: npt.NDArray[np.int64],
) -> PairGroup:
    seqs = tile_seqs[tiles]
    kv_positions = blocks[:, None] * KV_BLOCK + np.arange(KV_BLOCK)  # [num_pairs, KV_BLOCK]
    exists = kv_positions < batch.seq_lens[seqs][:, None]
    pages_index = np.minimum(kv_positions // page_size, batch.page_tables.shape[1] - 1)
    pages = batch.page_tables[seqs[:, None], pages_index].astype(np.int64)
    slots = pages * page_size + kv_positions % page_size
    on_path = kv_positions - paths.num_cached[seqs][:, None]  # how far down the tree, for its rows
    path_slots = np.take_along_axis(paths.slots[tile_rows[tiles, 0]], on_path.clip(0, MAX_TREE_ROWS - 1), axis=1)
    slots = np.where(paths.is_tree[seqs][:, None] & (on_path >= 0), path_slots, slots)
    slots = np.where(exists, slots, 0)  # 0: in the null page
    kv_rows = slots[:, None, :] * num_kv_heads + np.arange(num_kv_heads)[:, None]  # [num_pairs, kv_heads, KV_BLOCK]

    row_positions = batch.positions[tile_rows[tiles]][:, :, None]  # [num_pairs, R, 1]
    hidden = kv_positions[:, None, :] > row_positions
    if sliding_window is not None:
        hidden |= kv_positions[:, None, :] <= row_positions - sliding_window
    return PairGroup(
        tiles=None if np.array_equal(tiles, np.arange(len(tile_seqs))) else torch.from_numpy(tiles),
        kv_rows=torch.from_numpy(kv_rows.reshape(-1)),
        hidden=torch.from_numpy(hidden)[:, None, :, None, :],
    )


def _merge_order(pair_tiles: npt.NDArray[np.int64]) -> tuple[tuple[Tensor, Tensor], ...]:
    """The n-th pair of every tile that has one, for n = 0, 1, ..."""
    count = np.bincount(pair_tiles)
    first_pair = np.cumsum(count) - count
    return tuple(
        (torch.from_numpy(tiles), torch.from_numpy(first_pair[tiles] + n))
        for n in range(int(count.max(initial=0)))
        for tiles in [np.flatnonzero(count > n)]
    )


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float, plan: ReferenceAttentionPlan
) -> Tensor:
    """See ``Operations.paged_attention``."""
    _, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    tile_size = plan.rows_per_tile
    heads = (num_kv_heads, tile_size, num_heads // num_kv_heads)  # K, R, G

    tiles = (query * scale).index_select(0, plan.tile_rows).view(-1, tile_size, num_kv_heads, heads[2], head_dim)
    tiles = tiles.transpose(1, 2).contiguous()  # [num_tiles, K, R, G, d]
    parts = [_attend(tiles, key_cache, value_cache, heads, group) for group in plan.groups]
    output, weight_sum, maximum = (torch.cat(part) if len(parts) > 1 else part[0] for part in zip(*parts, strict=True))

    if len(plan.merge_order) > 1:
        output, weight_sum = _merge(output, weight_sum, maximum, plan)
    output = output / weight_sum  # [num_tiles, K, R, G, d]
    rows = output.transpose(1, 2).reshape(-1, num_heads, head_dim)
    return rows.index_select(0, plan.row_places)


def _attend(
    tiles: Tensor, key_cache: Tensor, value_cache: Tensor, heads: tuple[int, int, int], group: PairGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Unnormalised attention of each pair: output ``[num_pairs, K, R, G, d]``, sum and maximum ``[..., 1]``."""
    head_dim = tiles.shape[-1]
    _, tile_size, group_size = heads
    query = tiles if group.tiles is None else tiles.index_select(0, group.tiles)
    query = query.view(-1, tile_size * group_size, head_dim)  # [num_pairs * K, R * G, d]
    keys = key_cache.view(-1, head_dim).index_select(0, group.kv_rows).view(-1, KV_BLOCK, head_dim)
    values = value_cache.view(-1, head_dim).index_select(0, group.kv_rows).view(-1, KV_BLOCK, head_dim)

    scores = torch.bmm(query, keys.transpose(1, 2)).view(-1, *heads, KV_BLOCK)
    scores.masked_fill_(group.hidden, float("-inf"))
    maximum = scores.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)  # a row may see no key here
    weights = scores.sub_(maximum).exp_()
    weight_sum = weights.sum(dim=-1, keepdim=True)
    output = torch.bmm(weights.view(-1, tile_size * group_size, KV_BLOCK), values).view(-1, *heads, head_dim)
    return output, weight_sum, maximum


def _merge(output: Tensor, weight_sum: Tensor, maximum: Tensor, plan: ReferenceAttentionPlan) -> tuple[Tensor, Tensor]:
    """Add each tile's pairs up in ascending order of blocks, rescaled to the tile's own maximum."""
    _, first_pairs = plan.merge_order[0]  # every tile has a first pair
    total_max = maximum.index_select(0, first_pairs)
    for tiles, pairs in plan.merge_order[1:]:
        total_max[tiles] = torch.maximum(total_max[tiles], maximum[pairs])
    rescale = (maximum[first_pairs] - total_max).exp_()
    merged, merged_sum = output[first_pairs] * rescale, weight_sum[first_pairs] * rescale
    for tiles, pairs in plan.merge_order[1:]:
        rescale = (maximum[pairs] - total_max[tiles]).exp_()
        merged[tiles] += output[pairs] * rescale
        merged_sum[tiles] += weight_sum[pairs] * rescale
    return merged, merged_sum
