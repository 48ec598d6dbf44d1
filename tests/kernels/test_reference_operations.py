"""The reference kernels against float64 formulas, and bit for bit independent of the pass around a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.kernels.operations import NULL_PAGE, RaggedBatch, load_operations
from outrider.kernels.reference.attention import KV_BLOCK
from outrider.kernels.reference.row_tiles import proven_row_counts, split_rows

OPS = load_operations("reference")


class DenseWeight:
    quantization = "F32"

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self.shape = tuple(values.shape)
        self.blocks = values.numpy().view(np.uint8)

    def dense(self) -> Tensor:
        return self._values


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("in_features", "out_features"), [(576, 960), (1536, 576), (100, 63), (48, 1000)])
def test_linear_is_the_product_and_keeps_each_rows_bits(in_features: int, out_features: int, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(n, in_features, generator=generator) for n in (out_features, 7)]
    bias = torch.randn(out_features + 7, generator=generator)
    packed = OPS.pack_linear([DenseWeight(w) for w in weights], bias)
    x = torch.randn(300, in_features, generator=generator)
    expected = x.double() @ torch.cat(weights).double().T + bias.double()
    together = OPS.linear(x, packed)
    assert torch.allclose(together.double(), expected, rtol=1e-4, atol=1e-4)
    for size in (1, 2, 3, 5, 8, 9, 16, 17, 100, 131):
        apart = torch.cat([OPS.linear(rows, packed) for rows in x.split(size)])
        assert torch.equal(apart, together), f"rows differ in passes of {size}"
    assert OPS.linear(x[:0], packed).shape == (0, out_features + 7)


def test_a_row_count_with_other_bits_is_found_out() -> None:
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))

    def product(rows: Tensor) -> Tensor:
        if len(rows) in (3, 64):  # adds the two halves in the other order
            return rows[:, 32:] @ weight[32:] + rows[:, :32] @ weight[:32]
        return torch.stack([(row[None].expand(16, -1) @ weight)[0] for row in rows])

    counts = proven_row_counts(product, 64, 32)
    assert 3 not in counts
    assert 64 not in counts
    assert {2, 16, 32} <= set(counts)


@pytest.mark.parametrize("row_counts", [(2, 3, 4, 8, 16, 32), (16,), (5, 16, 128)])
def test_tiles_cover_all_rows_once(row_counts: tuple[int, ...]) -> None:
    for num_rows in range(1, 400):
        tiles = split_rows(num_rows, row_counts)
        assert sum(used for used, _ in tiles) == num_rows
        assert all(used <= computed and computed in row_counts for used, computed in tiles)


@pytest.mark.parametrize("width", [63, 100, 576, 1536])
def test_row_operations_match_their_formulas_and_keep_bits(width: int, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x, other = (torch.randn(131, 2 * width, generator=generator) * 3 for _ in range(2))
    weight = torch.randn(2 * width, generator=generator)
    cos, sin = torch.randn(2, 131, width // 2, generator=generator)
    heads = x.view(131, 2, width)[:, :, : width // 2 * 2]

    def norm(rows: Tensor) -> Tensor:
        exact = rows.double()
        return exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    def rotated() -> Tensor:
        pairs = torch.complex(heads[..., : width // 2].double(), heads[..., width // 2 :].double())
        turned = pairs * torch.complex(cos.double(), sin.double())[:, None]
        return torch.cat([turned.real, turned.imag], dim=-1)

    gate, up = x.double().chunk(2, dim=-1)
    operations = {
        "rms_norm": (lambda s: OPS.rms_norm(x[s], weight, 1e-5), norm(x)),
        "add_rms_norm": (lambda s: OPS.add_rms_norm(x[s], other[s], weight, 1e-5)[0], norm(x + other)),
        "silu_mul": (lambda s: OPS.silu_mul(x[s]), gate * torch.sigmoid(gate) * up),
        "rotary": (lambda s: OPS.rotary(heads[s], cos[s], sin[s]), rotated()),
        "log_softmax": (lambda s: OPS.log_softmax(x[s]), torch.log_softmax(x.double(), -1)),
    }
    for name, (operation, expected) in operations.items():
        together = operation(slice(0, 131))
        assert torch.allclose(together.double(), expected, rtol=1e-5, atol=1e-5), name
        for size in (1, 2, 7, 16):
            apart = torch.cat([operation(slice(start, start + size)) for start in range(0, 131, size)])
            assert torch.equal(apart, together), f"{name}: rows differ in passes of {size}"


def test_silu_of_extremes_is_finite() -> None:
    gate_up = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert OPS.silu_mul(gate_up).tolist() == [[0.0, pytest.approx(-3.8e-42, abs=1e-41), 0.0, 100.0, 1e4]]


def test_argmax_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(3, 49152)
    logits[0, [7, 40_000]] = 1.0
    logits[1, [49_151]] = 1.0
    assert OPS.argmax(logits).tolist() == [7, 49151, 0]


class PagedCache:
    """Keys and values of several sequences in scattered pages, all that is not theirs poisoned with NaN."""

    page_size = 16

    def __init__(self, lengths: list[int], num_kv_heads: int, head_dim: int, seed: int = 4) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.keys = [torch.randn(n, num_kv_heads, head_dim, generator=generator) for n in lengths]
        self.values = [torch.randn(n, num_kv_heads, head_dim, generator=generator) for n in lengths]
        counts = [-(-n // self.page_size) for n in lengths]
        pages = (torch.randperm(sum(counts), generator=generator) + 1).split(counts)
        self.page_tables = np.full((len(lengths), max(counts) + 1), NULL_PAGE, dtype=np.int32)
        for table, own in zip(self.page_tables, pages, strict=True):
            table[: len(own)] = own.numpy()
        shape = (sum(counts) + 1, self.page_size, num_kv_heads, head_dim)
        self.key_cache, self.value_cache = (torch.full(shape, torch.nan) for _ in range(2))
        self.key_cache[NULL_PAGE] = self.value_cache[NULL_PAGE] = 0.0

    def slots(self, sequence: int, start: int, stop: int) -> list[int]:
        table, size = self.page_tables[sequence], self.page_size
        return [int(table[pos // size]) * size + pos % size for pos in range(start, stop)]

    def batch(self, runs: list[tuple[int, int, int]]) -> RaggedBatch:
        """Runs of (sequence, first position, end)."""
        return RaggedBatch(
            cu_seqlens_q=np.cumsum([0, *(stop - start for _, start, stop in runs)], dtype=np.int32),
            seq_lens=np.array([stop for _, _, stop in runs], dtype=np.int32),
            page_tables=self.page_tables[[sequence for sequence, _, _ in runs]],
            positions=np.concatenate([np.arange(start, stop) for _, start, stop in runs]),
            slot_mapping=np.array([s for run in runs for s in self.slots(*run)], dtype=np.int64),
        )

    def attend(self, queries: list[Tensor], runs: list[tuple[int, int, int]], window: int | None) -> list[Tensor]:
        """Write the runs' keys and values, then attend: one result a run."""
        batch = self.batch(runs)
        num_heads, head_dim = queries[0].shape[1:]
        num_kv_heads = self.key_cache.shape[2]
        plan = OPS.plan_attention(batch, self.page_size, num_heads, num_kv_heads, head_dim, window)
        keys = torch.cat([self.keys[sequence][start:stop] for sequence, start, stop in runs])
        values = torch.cat([self.values[sequence][start:stop] for sequence, start, stop in runs])
        OPS.write_kv(keys, values, self.key_cache, self.value_cache, plan)
        query = torch.cat([queries[sequence][start:stop] for sequence, start, stop in runs])
        result = OPS.paged_attention(query, self.key_cache, self.value_cache, head_dim**-0.5, plan)
        return list(result.split([stop - start for _, start, stop in runs]))

    def expected(self, query: Tensor, sequence: int, window: int | None) -> Tensor:
        """Textbook attention in float64: ``[length, num_heads, head_dim]``."""
        group = query.shape[1] // self.key_cache.shape[2]
        keys = self.keys[sequence].double().repeat_interleave(group, dim=1)
        values = self.values[sequence].double().repeat_interleave(group, dim=1)
        positions = torch.arange(len(query))
        hidden = positions[None, :] > positions[:, None]
        if window is not None:
            hidden |= positions[None, :] <= positions[:, None] - window
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * query.shape[2] ** -0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)


LENGTHS = [1, 15, 16, 17, KV_BLOCK - 1, KV_BLOCK, KV_BLOCK + 1, 3 * KV_BLOCK + 5]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 32), (2, 2, 12)], ids=str
)
@pytest.mark.parametrize("window", [None, 40, 300])
def test_attention_is_the_textbooks_and_keeps_each_rows_bits(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int | None
) -> None:
    cache = PagedCache(LENGTHS, num_kv_heads, head_dim)
    generator = torch.Generator().manual_seed(5)
    queries = [torch.randn(n, num_heads, head_dim, generator=generator) for n in LENGTHS]
    whole = cache.attend(queries, [(i, 0, n) for i, n in enumerate(LENGTHS)], window)
    for index, result in enumerate(whole):
        assert torch.allclose(result.double(), cache.expected(queries[index], index, window), atol=1e-5)

    last = len(LENGTHS) - 1
    for size in (1, 5, 16, 100):  # each alone, in chunks of every kind
        runs = [
            (last, start, min(start + size, LENGTHS[last]))
            for start in range(LENGTHS[last] - 3 * size, LENGTHS[last], size)
        ]
        apart = torch.cat([cache.attend(queries, [run], window)[0] for run in runs])
        assert torch.equal(apart, whole[last][-3 * size :]), f"rows differ in chunks of {size}"
    mixed = [(last, LENGTHS[last] - 5, LENGTHS[last]), (4, 100, 255), (3, 16, 17), (6, KV_BLOCK, KV_BLOCK + 1)]
    for (sequence, start, stop), result in zip(mixed, cache.attend(queries, mixed, window), strict=True):
        assert torch.equal(result, whole[sequence][start:stop]), f"rows of sequence {sequence} differ in a mixed pass"


def test_many_tiles_give_the_same_as_few() -> None:
    lengths = [700] * 6  # more (tile, block) pairs than go into one product
    cache = PagedCache(lengths, 1, 16)
    queries = [torch.randn(700, 2, 16, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    together = cache.attend(queries, [(i, 0, 700) for i in range(6)], None)
    for index in range(6):
        assert torch.equal(cache.attend(queries, [(index, 0, 700)], None)[0], together[index])


def test_unknown_kernels_are_named() -> None:
    with pytest.raises(ValueError, match="no kernels called 'magic'; there are: reference"):
        load_operations("magic")
