"""Native norms, rotations, gates, lookups and choices: float64's results, and each row's own bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from stored_weights import FORMATS, random_weight, same_bits
from torch import Tensor

from outrider.kernels.cpu import _native
from outrider.kernels.cpu.operations import CpuOperations

INSTRUCTION_SETS = _native.instruction_sets()
OPERATIONS = {isa: CpuOperations(2, instruction_set=isa) for isa in INSTRUCTION_SETS}
BEST = OPERATIONS[INSTRUCTION_SETS[0]]
NUM_ROWS = 131
WIDTHS = [1, 16, 17, 63, 100, 576, 1000]

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

Operation = Callable[[CpuOperations, slice], Tensor]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


def row_operations(width: int) -> dict[str, tuple[Operation, Tensor]]:
    """Every operation over ``NUM_ROWS`` rows: how some of them are computed, and all results in float64."""
    x, weight, head_weights = random(NUM_ROWS, width), random(width, seed=1), random(3, width, seed=2)
    heads = random(NUM_ROWS, 3, width, seed=3)
    gate_up = random(NUM_ROWS, 2 * width, seed=4)
    gate, up = gate_up.double().chunk(2, dim=-1)
    halves = random(NUM_ROWS, 2, 2 * width, seed=5)
    cos, sin = random(NUM_ROWS, width, seed=6), random(NUM_ROWS, width, seed=7)
    turned = torch.complex(*halves.double().chunk(2, dim=-1)) * torch.complex(cos.double(), sin.double())[:, None]
    return {
        "rms_norm": (lambda ops, rows: ops.rms_norm(x[rows], weight, 1e-5), exact_norm(x, weight)),
        "rms_norm of heads": (
            lambda ops, rows: ops.rms_norm(heads[rows], head_weights, 1e-5),
            exact_norm(heads, head_weights),
        ),
        "silu_mul": (lambda ops, rows: ops.silu_mul(gate_up[rows]), gate / (1 + (-gate).exp()) * up),
        "rotary": (
            lambda ops, rows: ops.rotary(halves[rows], cos[rows], sin[rows]),
            torch.cat([turned.real, turned.imag], dim=-1),
        ),
        "log_softmax": (lambda ops, rows: ops.log_softmax(x[rows]), x.double().log_softmax(-1)),
    }


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("width", WIDTHS)
def test_row_operations_match_their_formulas(width: int, isa: str) -> None:
    for name, (compute, expected) in row_operations(width).items():
        result = compute(OPERATIONS[isa], slice(None))
        assert torch.allclose(result.double(), expected, rtol=2e-6, atol=2e-6), name


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_have_the_same_bits_everywhere(width: int) -> None:
    threes = CpuOperations(3, instruction_set=INSTRUCTION_SETS[0])
    for name, (compute, _) in row_operations(width).items():
        together = compute(BEST, slice(None))
        for ops in (*OPERATIONS.values(), threes, CpuOperations(1)):
            assert same_bits(compute(ops, slice(None)), together), name
        for size in (1, 2, 3, 4, 5, 7, 16, 31, 64, 100):
            parts = [compute(BEST, slice(start, start + size)) for start in range(0, NUM_ROWS, size)]
            assert same_bits(torch.cat(parts), together), f"{name}: rows differ in passes of {size}"


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_what_is_not_finite_stays_in_its_row(isa: str) -> None:
    ops = OPERATIONS[isa]
    x, weight, angles = random(5, 2, 100), torch.ones(100), random(5, 50)
    operations = {
        "rms_norm": lambda rows: ops.rms_norm(rows.reshape(5, 200), torch.ones(200), 1e-5),
        "rms_norm of heads": lambda rows: ops.rms_norm(rows, weight.expand(2, -1), 1e-5),
        "silu_mul": lambda rows: ops.silu_mul(rows.reshape(5, 200)),
        "rotary": lambda rows: ops.rotary(rows, angles, angles),
    }
    for name, compute in operations.items():
        expected = compute(x)
        for value in (torch.nan, torch.inf):
            poisoned = x.clone()
            poisoned[2, 1, 70] = value
            result = compute(poisoned)
            assert not result[2].isfinite().all(), name
            others = [0, 1, 3, 4]
            assert same_bits(result[others], expected[others]), name


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_silu_is_exact_where_it_bends_and_flat_where_it_ends(isa: str) -> None:
    gate = torch.cat([torch.linspace(-110, 110, 20001), torch.tensor([-1e4, -1e10, 1e4, 1e10, 0.0, -0.0, 1e-40])])
    result = OPERATIONS[isa].silu_mul(torch.stack([gate, torch.ones_like(gate)]).flatten()[None])[0]
    exact = gate.double() * torch.sigmoid(gate.double())
    assert torch.allclose(result.double(), exact, rtol=3e-7, atol=1e-28)
    assert OPERATIONS[isa].silu_mul(torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]])).isnan().all()


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("width", [*WIDTHS, 49152])
def test_argmax_takes_the_lowest_of_the_largest(width: int, isa: str) -> None:
    logits = random(40, width).round()  # many equals
    logits[-1] = -torch.inf
    logits[-1, width // 2] = torch.finfo().min
    logits[-2] = -logits[-2].abs() - 1
    expected = [int(np.argmax(row)) for row in logits.numpy()]  # numpy's documented: the first occurrence
    assert OPERATIONS[isa].argmax(logits).tolist() == expected
    assert OPERATIONS[isa].argmax(logits[:0]).tolist() == []


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("width", [1, 17, 64, 1000])
def test_argmax_chooses_nothing_from_a_row_that_is_not_sound(width: int, isa: str) -> None:
    logits = random(8, width)
    for row, (value, place) in enumerate([(torch.nan, 0), (torch.nan, -1), (torch.inf, 0), (torch.inf, width // 2)]):
        logits[row, place] = value
    logits[4] = -torch.inf
    logits[5, 1:] = -torch.inf
    sound = logits[[5, 6, 7]].argmax(dim=-1).tolist()
    assert OPERATIONS[isa].argmax(logits).tolist() == [-1] * 5 + sound


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "Q8_CHANNEL"])
def test_an_embedding_and_a_head_read_one_table(format: str) -> None:
    weight = random_weight(format, 259, 96, seed=1)
    table = BEST.pack_embedding(weight.stored)
    token_ids = torch.tensor([0, 258, 17, 17, 100, 16, 15])
    assert same_bits(BEST.embedding(token_ids, table), weight.values[token_ids].astype(np.float32))
    head, x = BEST.tied_head(table), random(3, 96)
    assert (head.in_features, head.out_features) == (96, 259)
    assert same_bits(BEST.linear(x, head), BEST.linear(x, BEST.pack_linear([weight.stored])))
