"""The reference kernels against float64 formulas, and bit for bit independent of the pass around a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged_cache import PagedCache, textbook_attention
from torch import Tensor

from outrider.kernels.operations import load_operations
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
    x = torch.randn(131, 2 * width, generator=generator) * 3
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


def test_argmax_chooses_nothing_from_a_row_that_is_not_sound() -> None:
    logits = torch.zeros(6, 1000)
    logits[0, 999] = torch.nan
    logits[1, 500] = torch.inf
    logits[2] = -torch.inf
    logits[3, 1:] = -torch.inf
    logits[4] = torch.finfo().min
    logits[5, [3, 4]] = torch.finfo().max
    assert OPS.argmax(logits).tolist() == [-1, -1, -1, 0, 0, 3]


def test_an_embedding_and_a_head_read_one_table() -> None:
    weight = DenseWeight(torch.randn(259, 48, generator=torch.Generator().manual_seed(8)))
    table, x = OPS.pack_embedding(weight), torch.randn(3, 48, generator=torch.Generator().manual_seed(9))
    assert torch.equal(OPS.embedding(torch.tensor([258, 0, 17]), table), weight.dense()[[258, 0, 17]])
    assert torch.equal(OPS.linear(x, OPS.tied_head(table)), OPS.linear(x, OPS.pack_linear([weight])))


LENGTHS = [1, 15, 16, 17, KV_BLOCK - 1, KV_BLOCK, KV_BLOCK + 1, 3 * KV_BLOCK + 5]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 32), (2, 2, 12)], ids=str
)
@pytest.mark.parametrize("window", [None, 40, 300])
def test_attention_is_the_textbooks_and_keeps_each_rows_bits(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int | None
) -> None:
    cache = PagedCache(OPS, LENGTHS, num_kv_heads, head_dim)
    generator = torch.Generator().manual_seed(5)
    queries = [torch.randn(n, num_heads, head_dim, generator=generator) for n in LENGTHS]
    whole = cache.attend(OPS, queries, [(i, 0, n) for i, n in enumerate(LENGTHS)], window)
    for index, result in enumerate(whole):
        expected = textbook_attention(queries[index], cache.keys[index], cache.values[index], window)
        assert torch.allclose(result.double(), expected, atol=1e-5)

    last = len(LENGTHS) - 1
    for size in (1, 5, 16, 100):  # each alone, in chunks of every kind
        runs = [
            (last, start, min(start + size, LENGTHS[last]))
            for start in range(LENGTHS[last] - 3 * size, LENGTHS[last], size)
        ]
        apart = torch.cat([cache.attend(OPS, queries, [run], window)[0] for run in runs])
        assert torch.equal(apart, whole[last][-3 * size :]), f"rows differ in chunks of {size}"
    mixed = [(last, LENGTHS[last] - 5, LENGTHS[last]), (4, 100, 255), (3, 16, 17), (6, KV_BLOCK, KV_BLOCK + 1)]
    for (sequence, start, stop), result in zip(mixed, cache.attend(OPS, queries, mixed, window), strict=True):
        assert torch.equal(result, whole[sequence][start:stop]), f"rows of sequence {sequence} differ in a mixed pass"


def test_many_tiles_give_the_same_as_few() -> None:
    lengths = [700] * 6  # more (tile, block) pairs than go into one product
    cache = PagedCache(OPS, lengths, 1, 16)
    queries = [torch.randn(700, 2, 16, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    together = cache.attend(OPS, queries, [(i, 0, 700) for i in range(6)], None)
    for index in range(6):
        assert torch.equal(cache.attend(OPS, queries, [(index, 0, 700)], None)[0], together[index])


def test_unknown_kernels_are_named() -> None:
    with pytest.raises(ValueError, match="no kernels called 'magic'; there are: reference, cpu"):
        load_operations("magic")
