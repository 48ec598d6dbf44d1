"""Native attention gives a row one result: on every instruction set, by any number of threads, in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged_cache import PagedCache, Run
from stored_weights import same_bits
from torch import Tensor

from outrider.kernels.cpu import _native
from outrider.kernels.cpu.operations import CpuOperations

INSTRUCTION_SETS = _native.instruction_sets()
KV_FORMATS = ["f32", "f16", "int8"]
HEADS = [(9, 3, 64, 16), (4, 4, 12, 20), (7, 1, 80, 64), (14, 2, 12, 1)]  # num_heads, num_kv_heads, head_dim, page_size
LENGTHS = [1, 63, 65, 256, 257, 700]  # the last has three splits of 256

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def operations(kv_format: str, isa: str = INSTRUCTION_SETS[0], num_threads: int = 2) -> CpuOperations:
    return CpuOperations(num_threads, kv_cache_dtype=kv_format, instruction_set=isa)


def random_queries(num_heads: int, head_dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(n, num_heads, head_dim, generator=generator) * 2 for n in LENGTHS]


def fresh_cache(ops: CpuOperations, heads: tuple[int, int, int, int]) -> PagedCache:
    _, num_kv_heads, head_dim, page_size = heads
    return PagedCache(ops, LENGTHS, num_kv_heads, head_dim, page_size)


def whole_runs() -> list[Run]:
    return [(index, 0, length) for index, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_threads_and_instruction_sets_give_the_same_bits(
    heads: tuple[int, int, int, int], kv_format: str, window: int | None
) -> None:
    queries = random_queries(heads[0], heads[2])
    # Prefill, then what decodes and verifies: there the work is cut finest.
    steps = [whole_runs(), [(5, 699, 700), (4, 256, 257), (1, 58, 63)], [(5, 695, 700)]]
    expected: list[Tensor] = []
    for isa, num_threads in [
        (INSTRUCTION_SETS[0], 1),
        *((isa, 2) for isa in INSTRUCTION_SETS),
        (INSTRUCTION_SETS[0], 3),
    ]:
        ops = operations(kv_format, isa, num_threads)
        cache = fresh_cache(ops, heads)
        results = [result for runs in steps for result in cache.attend(ops, queries, runs, window)]
        stored = [half.view(torch.uint8).numpy() for half in (cache.key_cache, cache.value_cache)]
        if not expected:
            expected, expected_cache = results, stored
        assert all(map(same_bits, results, expected)), (isa, num_threads)
        assert all(map(np.array_equal, stored, expected_cache)), f"{isa}: the caches differ"


@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_row_keeps_its_bits_in_any_company(
    heads: tuple[int, int, int, int], kv_format: str, window: int | None
) -> None:
    ops = operations(kv_format)
    queries = random_queries(heads[0], heads[2])
    cache = fresh_cache(ops, heads)
    whole = cache.attend(ops, queries, whole_runs(), window)

    last = len(LENGTHS) - 1
    for size in (1, 2, 5, 16, 47, 64, 100):  # alone, in chunks of every kind
        first = LENGTHS[last] - 3 * size if size > 1 else LENGTHS[last] - 60
        runs = [(last, start, min(start + size, LENGTHS[last])) for start in range(first, LENGTHS[last], size)]
        apart = torch.cat([cache.attend(ops, queries, [run], window)[0] for run in runs])
        assert same_bits(apart, whole[last][first:]), f"rows differ in chunks of {size}"
    mixed = [(last, 695, 700), (4, 100, 255), (3, 255, 256), (2, 0, 65), (4, 256, 257), (0, 0, 1), (last, 3, 90)]
    for order in (mixed, mixed[::-1]):
        for (sequence, start, stop), result in zip(order, cache.attend(ops, queries, order, window), strict=True):
            assert same_bits(result, whole[sequence][start:stop]), f"sequence {sequence} differs in a mixed pass"


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_64_sequences_decode_as_each_alone(kv_format: str) -> None:
    lengths = [*range(1, 65)]
    generator = torch.Generator().manual_seed(7)
    queries = [torch.randn(n, 6, 24, generator=generator) for n in lengths]
    for num_threads in (1, 2, 3):
        ops = operations(kv_format, num_threads=num_threads)
        cache = PagedCache(ops, lengths, 2, 24)
        cache.attend(ops, queries, [(index, 0, length) for index, length in enumerate(lengths)], None)
        runs = [(index, length - 1, length) for index, length in enumerate(lengths)]
        together = cache.attend(ops, queries, runs, None)
        for run, result in zip(runs, together, strict=True):
            assert same_bits(cache.attend(ops, queries, [run], None)[0], result), run


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_a_rows_bits_do_not_depend_on_where_its_pages_lie(kv_format: str) -> None:
    ops = operations(kv_format)
    queries = random_queries(6, 32)
    here, there = (PagedCache(ops, LENGTHS, 2, 32, seed=seed) for seed in (4, 5))
    there.keys, there.values = here.keys, here.values
    assert not np.array_equal(here.page_tables, there.page_tables)
    results = [cache.attend(ops, queries, whole_runs(), None) for cache in (here, there)]
    assert all(map(same_bits, *results))
