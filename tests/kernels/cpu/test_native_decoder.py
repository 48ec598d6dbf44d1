"""The fused decoder computes what its small operations do, bit for bit, and each row by itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from paged_cache import Run
from random_decoder import KINDS, RandomDecoder
from stored_weights import same_bits
from torch import Tensor

from outrider.kernels.composed_decoder import ComposedDecoder
from outrider.kernels.cpu import _native
from outrider.kernels.cpu.operations import CpuOperations
from outrider.kernels.operations import DecoderPass, PackedDecoder

INSTRUCTION_SETS = _native.instruction_sets()
KV_FORMATS = ["f32", "f16", "int8"]
LENGTHS = [3, 70, 21, 300]
# Passes of one row, of few (at most 4 are handled apart), of 5, of many sequences, and of more than fit one block.
STEPS: list[list[Run]] = [
    [(1, 0, 1)],
    [(1, 1, 4)],
    [(0, 0, 3), (1, 4, 6)],
    [(1, 6, 50), (2, 0, 20), (3, 0, 30)],
    [(1, 50, 70), (2, 20, 21), (3, 30, 299)],
    [(3, 299, 300)],
]

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def operations(kv_format: str, isa: str = INSTRUCTION_SETS[0], num_threads: int = 2) -> CpuOperations:
    return CpuOperations(num_threads, kv_cache_dtype=kv_format, instruction_set=isa)


def run_steps(
    model: RandomDecoder, ops: CpuOperations, steps: list[list[Run]] = STEPS, fused: bool = True, page_size: int = 16
) -> tuple[list[Tensor], Tensor]:
    """The residuals after each step, and the cache at the end as bytes."""
    pages = model.pages(ops, page_size)
    cache = model.fresh_cache(pages)
    decoder = ops.pack_decoder(model.layers, model.kind.shape)
    results = []
    for runs in steps:
        residual, decoder_pass = model.inputs(ops, pages, runs)
        if fused:
            results.append(ops.decode(residual, decoder, cache, decoder_pass))
        else:
            composed = ComposedDecoder(model.layers, model.kind.shape)
            results.append(composed.run(ops, residual, cache, decoder_pass))
    return results, cache.view(torch.uint8)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_fused_decoder_is_its_small_operations(kind: str, kv_format: str) -> None:
    model = RandomDecoder(KINDS[kind], LENGTHS)
    composed, composed_cache = run_steps(model, operations(kv_format), fused=False)
    ways = [(INSTRUCTION_SETS[0], 1), *((isa, 2) for isa in INSTRUCTION_SETS), (INSTRUCTION_SETS[0], 3)]
    for isa, num_threads in ways:
        if isa == "scalar" and kind == "large":
            continue  # takes seconds
        results, cache = run_steps(model, operations(kv_format, isa, num_threads))
        assert all(map(same_bits, results, composed)), (isa, num_threads)
        assert torch.equal(cache, composed_cache), f"{isa}, {num_threads} threads: the caches differ"
    assert all(result.isfinite().all() for result in composed)


@pytest.mark.parametrize("kind", ["F32, awkward", "embeddings, awkward, biases"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_before_residual": False}, {"windows": (False, True)}, {"has_biases": True, "has_query_key_norm": True}],
)
def test_the_decoder_is_float64s(kind: str, changes: dict[str, object]) -> None:
    model = RandomDecoder(dataclasses.replace(KINDS[kind], **changes), LENGTHS)
    for isa in INSTRUCTION_SETS:
        results, _ = run_steps(model, operations("f32", isa), [[(1, 0, 70)], [(3, 0, 130)], [(3, 130, 300)]])
        for sequence, result in ((1, results[0]), (3, torch.cat(results[1:]))):
            exact = model.exact(sequence)
            assert torch.allclose(result.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("kind", ["Q4_1", "mixed, windows, biases", "Q8_CHANNEL, awkward, norms, biases"])
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_layers_run_in_two_calls_as_in_one(kind: str, kv_format: str) -> None:
    model, ops = RandomDecoder(KINDS[kind], LENGTHS), operations(kv_format)
    expected, expected_cache = run_steps(model, ops)
    num_layers = len(model.layers)
    decoder = ops.pack_decoder(model.layers, model.kind.shape)
    for middle in range(num_layers + 1):
        pages = model.pages(ops)
        cache = model.fresh_cache(pages)
        for runs, whole in zip(STEPS, expected, strict=True):
            residual, decoder_pass = model.inputs(ops, pages, runs)
            residual = ops.decode(residual, decoder, cache, decoder_pass, 0, middle)
            residual = ops.decode(residual, decoder, cache, decoder_pass, middle)
            assert same_bits(residual, whole), f"cut before layer {middle}"
        assert torch.equal(cache.view(torch.uint8), expected_cache)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_keeps_its_bits_in_any_company(kind: str) -> None:
    kv_format = KV_FORMATS[list(KINDS).index(kind) % 3]
    model, ops = RandomDecoder(KINDS[kind], [*range(1, 65)]), operations(kv_format)
    alone = [torch.cat(run_steps(model, ops, [[(i, 0, i)], [(i, i, i + 1)]])[0]) for i in range(64)]
    prefill = [(index, 0, index) for index in range(64)]
    for chosen in ([*range(64)], [*range(63, -1, -1)], [5, 60], [7, 33, 2], [1, 2, 3, 4, 5, 40], [*range(10, 41)]):
        together = run_steps(model, ops, [prefill, [(i, i, i + 1) for i in chosen]])[0]
        for row, index in zip(together[1], chosen, strict=True):
            assert same_bits(row[None], alone[index][-1:]), f"sequence {index} differs among {len(chosen)}"
    for size in (1, 3, 8, 13):  # a sequence in chunks, as drafts are verified
        chunks: list[list[Run]] = [[(63, start, min(start + size, 64))] for start in range(0, 64, size)]
        assert same_bits(torch.cat(run_steps(model, ops, chunks)[0]), alone[63]), f"chunks of {size}"


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("page_size", [1, 4, 20, 64])
def test_bits_do_not_depend_on_pages(page_size: int, kv_format: str) -> None:
    model, ops = RandomDecoder(KINDS["all windows, norms"], LENGTHS), operations(kv_format)
    expected, _ = run_steps(model, ops)
    results, _ = run_steps(model, ops, page_size=page_size)
    assert all(map(same_bits, results, expected))


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_sequence(poison: float, isa: str) -> None:
    """Whatever is not finite in a row ends as NaN or infinity there, through int8 activations and caches too."""
    for kv_format in KV_FORMATS:
        model, ops = RandomDecoder(KINDS["Q4_1"], [20, 30, 25]), operations(kv_format, isa)
        runs = [(0, 0, 20), (1, 0, 30), (2, 0, 25)]
        expected = run_steps(model, ops, [runs])[0][0].split([20, 30, 25])
        model.residuals[1][11, 40] = poison
        first, second, third = run_steps(model, ops, [runs])[0][0].split([20, 30, 25])
        assert same_bits(first, expected[0])
        assert same_bits(third, expected[2])
        assert same_bits(second[:11], expected[1][:11])
        assert not second[11:].isfinite().any()


def test_a_decoder_runs_passes_of_growing_and_falling_size() -> None:
    model, ops = RandomDecoder(KINDS["Q4_1"], [400] * 3), operations("f16")
    expected = torch.cat(run_steps(model, ops, [[(0, 0, 400)]])[0])
    ends = np.cumsum([1, 100, 2, 200, 5, 92])
    steps: list[list[Run]] = [[(0, int(a), int(b))] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    assert same_bits(torch.cat(run_steps(model, ops, steps)[0]), expected)


@pytest.mark.parametrize("kind", ["mixed, windows, biases", "embeddings, int8", "embeddings, awkward, biases"])
def test_taps_are_the_residual_stream_between_layers(kind: str) -> None:
    model, ops = RandomDecoder(KINDS[kind], LENGTHS), operations("f16")
    num_layers = len(model.layers)
    taps = (num_layers, 0, 1, num_layers - 1)
    decoder, pages = ops.pack_decoder(model.layers, model.kind.shape), model.pages(ops)
    tapped_cache, cut_cache = model.fresh_cache(pages), model.fresh_cache(pages)
    for runs in STEPS:
        residual, decoder_pass = model.inputs(ops, pages, runs, taps)
        whole = ops.decode(residual.clone(), decoder, tapped_cache, decoder_pass)
        between = [residual.clone()]
        untapped = dataclasses.replace(decoder_pass, taps=(), tapped=None)
        for layer in range(num_layers):
            between.append(ops.decode(between[-1].clone(), decoder, cut_cache, untapped, layer, layer + 1))
        assert decoder_pass.tapped is not None
        assert same_bits(whole, between[-1])
        assert same_bits(decoder_pass.tapped, torch.cat([between[tap] for tap in taps], dim=1))

        residual, in_parts = model.inputs(ops, pages, runs, taps)  # taps of layers that run in several calls
        for layer in range(num_layers):
            residual = ops.decode(residual, decoder, cut_cache, in_parts, layer, layer + 1)
        assert in_parts.tapped is not None
        assert same_bits(in_parts.tapped, decoder_pass.tapped)
        residual, composed = model.inputs(ops, pages, runs, taps)
        ComposedDecoder(model.layers, model.kind.shape).run(ops, residual, cut_cache, composed)
        assert composed.tapped is not None
        assert same_bits(composed.tapped, decoder_pass.tapped)


@pytest.mark.parametrize("kind", ["Q4_1", "mixed, windows, biases"])
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_token_trees_go_through_the_fused_decoder(kind: str, kv_format: str) -> None:
    """Rows of a tree, a chain written as a tree, and a run, in one pass, on every instruction set."""
    model = RandomDecoder(KINDS[kind], LENGTHS)
    trees = {1: [1, 3, 5, 11, 21, 43, 1 << 6], 3: [(2 << row) - 1 for row in range(6)]}
    runs: list[Run] = [(0, 0, 3), (1, 60, 67), (2, 0, 20), (3, 290, 296)]

    def tree_pass(isa: str, num_threads: int, fused: bool) -> tuple[Tensor, Tensor]:
        ops = operations(kv_format, isa, num_threads)
        pages = model.pages(ops)
        cache, decoder = model.fresh_cache(pages), ops.pack_decoder(model.layers, model.kind.shape)
        ops.decode(*_around(model.inputs(ops, pages, [(1, 0, 60), (3, 0, 290)]), decoder, cache))
        arguments = _around(model.inputs(ops, pages, runs, trees=trees), decoder, cache)
        if fused:
            return ops.decode(*arguments), cache.view(torch.uint8)
        residual, _, _, decoder_pass = arguments
        composed = ComposedDecoder(model.layers, model.kind.shape)
        return composed.run(ops, residual, cache, decoder_pass), cache.view(torch.uint8)

    expected, expected_cache = tree_pass(INSTRUCTION_SETS[0], 2, fused=False)
    for isa, num_threads in [(INSTRUCTION_SETS[0], 1), *((isa, 2) for isa in INSTRUCTION_SETS)]:
        result, cache = tree_pass(isa, num_threads, fused=True)
        assert same_bits(result, expected), (isa, num_threads)
        assert torch.equal(cache, expected_cache), (isa, num_threads)
    _, causal = run_steps(model, operations(kv_format), [[(1, 0, 60), (3, 0, 290)], runs])[0]
    assert same_bits(expected[-6:], causal[-6:]), "a chain written as a tree"
    assert same_bits(expected[:3], causal[:3])
    assert same_bits(expected[10:30], causal[10:30])
    assert not same_bits(expected[3:10], causal[3:10])


def _around(
    inputs: tuple[Tensor, DecoderPass], decoder: PackedDecoder, cache: Tensor
) -> tuple[Tensor, PackedDecoder, Tensor, DecoderPass]:
    residual, decoder_pass = inputs
    return residual, decoder, cache, decoder_pass
