"""A row of a token tree attends to its own path, and has the bits of that path run as a chain."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged_cache import PagedCache, Trees, kept, textbook_attention
from torch import Tensor

from outrider.kernels.operations import Operations, RaggedBatch, load_operations
from outrider.kernels.token_trees import tree_paths

OPERATIONS = {
    "reference": ("reference", "auto", "f32"),
    "cpu, f32": ("cpu", "f32", "f32"),
    "cpu, f16": ("cpu", "f16", "f16"),
    "cpu, int8": ("cpu", "int8", "int8"),
}
CHAIN = [(2 << row) - 1 for row in range(7)]
# Parents of rows, -1 for a root: a bush, several roots, a chain, the most rows there may be.
PARENTS = {
    "bush": [-1, 0, 0, 1, 1, 2, 3, 3, 6, 8],
    "roots": [-1, -1, 0, 1, 1, -1, 4],
    "chain": [-1, 0, 1, 2, 3, 4, 5],
    "one": [-1],
    "64 rows": [-1, *(row // 3 for row in range(63))],
}


def masks(parents: list[int]) -> list[int]:
    result: list[int] = []
    for row, parent in enumerate(parents):
        result.append(1 << row | (result[parent] if parent >= 0 else 0))
    return result


def path(mask: int) -> list[int]:
    return [row for row in range(64) if mask >> row & 1]


@pytest.fixture(params=OPERATIONS)
def kernels(request: pytest.FixtureRequest) -> tuple[Operations, str]:
    name, kv_cache_dtype, kv_format = OPERATIONS[request.param]
    return load_operations(name, num_threads=2, kv_cache_dtype=kv_cache_dtype), kv_format


def random_queries(lengths: list[int], num_heads: int, head_dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(n, num_heads, head_dim, generator=generator) for n in lengths]


def along(cache: PagedCache, sequence: int, num_cached: int, mask: int) -> Tensor:
    """Where the tokens that a row sees are stored in its sequence's keys and values."""
    return torch.tensor([*range(num_cached), *(num_cached + row for row in path(mask))])


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 32), (2, 2, 12)])
@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("page_size", [16, 5, 64])
def test_rows_of_a_tree_see_their_paths(
    kernels: tuple[Operations, str],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    page_size: int,
) -> None:
    ops, kv_format = kernels
    trees: Trees = {index: masks(parents) for index, parents in enumerate(PARENTS.values())}
    cached = [60, 250, 255, 256, 300]
    lengths = [*(n + len(trees[index]) for index, n in enumerate(cached)), 90]  # the last is a run beside them
    queries = random_queries(lengths, num_heads, head_dim)
    cache = PagedCache(ops, lengths, num_kv_heads, head_dim, page_size)
    cache.attend(ops, queries, [(index, 0, n) for index, n in enumerate(cached)], window)
    runs = [(5, 0, 90), *((index, n, lengths[index]) for index, n in enumerate(cached))]
    run, *results = cache.attend(ops, queries, runs, window, trees)
    assert torch.allclose(
        run.double(),
        textbook_attention(queries[5], kept(cache.keys[5], kv_format), kept(cache.values[5], kv_format), window),
        atol=1e-5,
    )
    for index, result in enumerate(results):
        for row, mask in enumerate(trees[index]):
            seen = along(cache, index, cached[index], mask)
            expected = textbook_attention(
                queries[index][seen],
                kept(cache.keys[index][seen], kv_format),
                kept(cache.values[index][seen], kv_format),
                window,
                torch.tensor([len(seen) - 1]),
            )[0]
            assert torch.allclose(result[row].double(), expected, atol=1e-5), f"row {row} of tree {index}"


@pytest.mark.parametrize("tree", PARENTS)
@pytest.mark.parametrize(("window", "page_size"), [(None, 16), (None, 64), (40, 16), (40, 7)])
def test_a_row_of_a_tree_has_the_bits_of_its_path_as_a_chain(
    kernels: tuple[Operations, str], tree: str, window: int | None, page_size: int
) -> None:
    ops, _ = kernels
    own = masks(PARENTS[tree])
    for num_cached in (0, 13, 250, 300):
        lengths = [num_cached + len(own)]
        queries = random_queries(lengths, 9, 64)
        cache = PagedCache(ops, lengths, 3, 64, page_size)
        if num_cached:
            cache.attend(ops, queries, [(0, 0, num_cached)], window)
        result = cache.attend(ops, queries, [(0, num_cached, lengths[0])], window, {0: own})[0]
        for row in {0, len(own) // 2, len(own) - 1}:
            seen = along(cache, 0, num_cached, own[row])
            chain = PagedCache(ops, [len(seen)], 3, 64, seed=9)
            chain.keys, chain.values = [cache.keys[0][seen]], [cache.values[0][seen]]
            expected = chain.attend(ops, [queries[0][seen]], [(0, 0, len(seen))], window)[0]
            assert torch.equal(result[row], expected[-1]), f"row {row} after {num_cached} tokens"


def test_what_is_no_tree_is_refused() -> None:
    def batch(own: list[int]) -> RaggedBatch:
        num_rows = len(own)
        return RaggedBatch(
            cu_seqlens_q=np.array([0, num_rows], dtype=np.int32),
            seq_lens=np.array([num_rows], dtype=np.int32),
            page_tables=np.ones((1, 9), dtype=np.int32),
            positions=np.arange(num_rows),
            slot_mapping=np.arange(16, 16 + num_rows),
            tree_masks=np.array(own, dtype=np.uint64),
        )

    assert tree_paths(batch(CHAIN)).slots[6, :8].tolist() == [16, 17, 18, 19, 20, 21, 22, 0]
    for own in ([1, 3, 6], [1, 1], [0, 2], [1, 2, 7], [1, 2 | 1 << 5]):
        with pytest.raises(ValueError, match="must be its own bit and all of its parent's"):
            tree_paths(batch(own))
    with pytest.raises(ValueError, match="a tree of 65 rows; 64 are the most"):
        tree_paths(batch([1] * 65))


def test_tokens_move_as_if_all_were_read_first(kernels: tuple[Operations, str]) -> None:
    ops, _ = kernels
    dtype, width = ops.kv_layout(8)
    random = np.random.default_rng(1)
    shape = (2, 2, 4, 5, 3, width)
    cache = torch.from_numpy(random.integers(0, 100, (*shape, dtype.itemsize), dtype=np.uint8)).view(dtype).view(shape)
    keys, values = (torch.randn(10, 3, 8, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    written, moved = ([5, 6, 7, 8, 9, 12, 13, 14, 16, 19], [6, 5, 13, 8, 9, 10, 11, 19, 7, 15])
    expected = cache.clone()

    def write(cache: Tensor, layer: int, slots: list[int], rows: list[int]) -> None:
        batch = RaggedBatch(
            np.array([0, len(slots)], dtype=np.int32),
            np.array([len(slots)], dtype=np.int32),
            np.array([[1, 2, 3]], dtype=np.int32),
            np.arange(len(slots)),
            np.array(slots),
        )
        plan = ops.plan_attention(batch, 5, 3, 3, 8, None)
        ops.write_kv(keys[rows] + layer, values[rows] - layer, cache[layer, 0], cache[layer, 1], plan)

    for layer in range(2):
        write(cache, layer, written, [*range(10)])
        write(expected, layer, written, [*range(10)])
        write(expected, layer, moved, [*range(10)])
    ops.copy_kv(cache, written, moved)
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))
