"""Native paged attention against the textbook's in float64, in every cache format, over pages full of poison."""

from __future__ import annotations

import pytest
import torch
from paged_cache import PagedCache, kept, textbook_attention
from stored_weights import same_bits
from torch import Tensor

from outrider.kernels.cpu import _native
from outrider.kernels.cpu.operations import CpuOperations

INSTRUCTION_SETS = _native.instruction_sets()
KV_FORMATS = ["f32", "f16", "int8"]
OPERATIONS = {
    (isa, kv): CpuOperations(2, kv_cache_dtype=kv, instruction_set=isa) for isa in INSTRUCTION_SETS for kv in KV_FORMATS
}
SPLIT = 256  # keys that one partial result covers; see attention_plan.h
# num_heads, num_kv_heads, head_dim, page_size: every group, head and page that is treated differently
HEADS = [
    (9, 3, 64, 16),
    (4, 4, 12, 16),
    (7, 1, 80, 20),
    (2, 2, 128, 64),
    (3, 1, 64, 1),
    (14, 2, 12, 4),
    (60, 1, 20, 16),
]

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def random_queries(lengths: list[int], num_heads: int, head_dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(n, num_heads, head_dim, generator=generator) * 2 for n in lengths]


def assert_is_the_textbooks(
    ops: CpuOperations,
    kv_format: str,
    heads: tuple[int, int, int, int],
    lengths: list[int],
    window: int | None,
    chunk: int,
) -> None:
    num_heads, num_kv_heads, head_dim, page_size = heads
    cache = PagedCache(ops, lengths, num_kv_heads, head_dim, page_size)
    queries = random_queries(lengths, num_heads, head_dim)
    results: list[list[Tensor]] = [[] for _ in lengths]
    for start in range(0, max(lengths), chunk):  # all sequences side by side, a chunk a pass
        runs = [(i, start, min(start + chunk, n)) for i, n in enumerate(lengths) if start < n]
        for (sequence, _, _), result in zip(runs, cache.attend(ops, queries, runs, window), strict=True):
            results[sequence].append(result)
    for index, parts in enumerate(results):
        keys, values = (kept(x[index], kv_format) for x in (cache.keys, cache.values))
        chosen = torch.arange(lengths[index]).flip(0)[::23] if lengths[index] > 200 else torch.arange(lengths[index])
        expected = textbook_attention(queries[index], keys, values, window, chosen)
        result = torch.cat(parts)
        assert result.isfinite().all()
        assert torch.allclose(result[chosen].double(), expected, rtol=1e-5, atol=5e-6), lengths[index]


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_short_attention_is_the_textbooks(heads: tuple[int, int, int, int], kv_format: str, isa: str) -> None:
    for window in (None, 1, 20):
        assert_is_the_textbooks(OPERATIONS[isa, kv_format], kv_format, heads, [1, 15, 17, 63, 64, 65, 130], window, 40)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("window", [None, 100, 300, 1000])
@pytest.mark.parametrize("heads", [(9, 3, 64, 16), (7, 1, 12, 20)], ids=str)
def test_long_attention_is_the_textbooks(heads: tuple[int, int, int, int], window: int | None, kv_format: str) -> None:
    lengths = [SPLIT - 1, SPLIT, SPLIT + 1, 3 * SPLIT + 5, 1500]
    for isa in INSTRUCTION_SETS[:2]:
        assert_is_the_textbooks(OPERATIONS[isa, kv_format], kv_format, heads, lengths, window, 600)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_one_score_far_above_all_takes_everything(isa: str) -> None:
    ops = OPERATIONS[isa, "f32"]
    cache = PagedCache(ops, [700], 1, 16)
    queries = [torch.zeros(700, 2, 16)]
    queries[0][:, :, 0] = 1e4
    for place in (0, 63, 300, 650):  # within a block, across blocks, across splits
        cache.keys[0][:] = 0.0
        cache.keys[0][place, 0, 0] = 1.0  # a score 2,500 above the others
        result = cache.attend(ops, queries, [(0, 0, 700)], None)[0]
        for row in (place, 699):
            assert torch.equal(result[row], cache.values[0][place].expand(2, -1))


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("heads", [(6, 2, 32, 16), (6, 2, 20, 4)], ids=str)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_where_it_is_seen_and_nowhere_else(
    poison: float, heads: tuple[int, int, int, int], kv_format: str, isa: str
) -> None:
    num_heads, num_kv_heads, head_dim, page_size = heads
    ops, lengths = OPERATIONS[isa, kv_format], [70, 40, 90]
    queries = random_queries(lengths, num_heads, head_dim)
    runs = [(0, 30, 70), (1, 0, 40), (2, 85, 90)]

    def attend(change: str) -> list[Tensor]:
        cache = PagedCache(ops, lengths, num_kv_heads, head_dim, page_size)
        cache.attend(ops, queries, [(0, 0, 30), (2, 0, 85)], None)
        if change != "nothing":
            getattr(cache, change)[1][25, 1, 3] = poison
        return cache.attend(ops, queries, runs, None)

    expected = attend("nothing")
    for change in ("keys", "values"):
        first, second, third = attend(change)
        assert same_bits(first, expected[0])
        assert same_bits(third, expected[2])
        assert same_bits(second[:25], expected[1][:25])  # rows that do not see it
        assert same_bits(second[:, :3], expected[1][:, :3])  # the other KV head
        if change == "values":
            seen = second[25:, 3:] if kv_format == "int8" else second[25:, 3:, 3]  # in int8, a head shares a scale
            assert not seen.isfinite().any()
        elif kv_format == "int8" or poison != poison:
            assert second[25:, 3:].isnan().all()
        else:  # an infinite key: +infinity where the query agrees, else no weight at all
            agrees = (queries[1][25:, 3:, 3] * poison > 0)[..., None].expand(-1, -1, head_dim)
            assert second[25:, 3:][agrees].isnan().all()
            assert second[25:, 3:][~agrees].isfinite().any()
            assert not torch.isinf(second).any()


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("page_size", [4, 16])
def test_what_a_page_held_before_is_forgotten(page_size: int, kv_format: str) -> None:
    ops = OPERATIONS[INSTRUCTION_SETS[0], kv_format]
    lengths = [150, 30]
    queries = random_queries(lengths, 4, 32)
    cache = PagedCache(ops, lengths, 2, 32, page_size)
    fresh = cache.attend(ops, queries, [(0, 0, 150), (1, 0, 30)], None)
    cache.attend(ops, queries, [(0, 0, 150), (1, 0, 30)], None)
    cache.page_tables[[0, 1], 0] = cache.page_tables[[1, 0], 0]  # first pages change owners
    again = cache.attend(ops, queries, [(0, 0, 150), (1, 0, 30)], None)
    for old, new in zip(fresh, again, strict=True):
        assert same_bits(old, new)


def test_a_pass_of_nobody_is_empty() -> None:
    ops = OPERATIONS[INSTRUCTION_SETS[0], "f32"]
    cache = PagedCache(ops, [5], 1, 16)
    queries = random_queries([5], 2, 16)
    assert cache.attend(ops, queries, [(0, 3, 3)], None)[0].shape == (0, 2, 16)
