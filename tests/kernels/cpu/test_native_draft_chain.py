"""The fused chain is its small operations, bit for bit: tokens, confidences, and what it leaves in the cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from random_decoder import KINDS, DecoderKind
from random_draft import RandomDraft, chain_limits, some
from torch import Tensor

from outrider.kernels.cpu import _native
from outrider.kernels.cpu.operations import CpuOperations
from outrider.kernels.draft_chain import ComposedDraft
from outrider.kernels.draft_model import ChainLimits, DraftedTokens

INSTRUCTION_SETS = _native.instruction_sets()
KV_FORMATS = ["f32", "f16", "int8"]
NUM_TOKENS = [3, 40, 17, 1, 5, 60, 33, 260, 16]
DRAFTS: dict[str, tuple[DecoderKind, str]] = {
    "conditioned, int8": (KINDS["embeddings, int8"], "Q8_0"),
    "conditioned, one layer": (
        dataclasses.replace(KINDS["embeddings, int8"], formats=(("Q8_0", "Q4_1", "Q4_1", "Q8_0"),), windows=(False,)),
        "Q8_0",
    ),
    "conditioned, awkward": (KINDS["embeddings, awkward, biases"], "F32"),
    "model of its own, windows": (KINDS["mixed, windows, biases"], "Q4_1"),
    "all windows": (KINDS["all windows, norms"], "BF16"),
}

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def operations(kv_format: str, isa: str = INSTRUCTION_SETS[0], num_threads: int = 2) -> CpuOperations:
    return CpuOperations(num_threads, kv_cache_dtype=kv_format, instruction_set=isa)


def run(
    draft: RandomDraft, ops: CpuOperations, sequences: list[int], limits: ChainLimits, fused: bool = True
) -> tuple[DraftedTokens, Tensor]:
    """The chains of these sequences, and the cache afterwards as bytes."""
    model = draft.model(ops)
    pages, cache, hidden = draft.ready(ops, model)
    batch, (cos, sin) = draft.batch(pages, sequences), draft.angles(sequences)
    start = torch.cat([hidden[i] for i in sequences])
    if fused:
        drafted = ops.draft_chain(ops.pack_draft(model), start, batch, cos, sin, cache, limits)
    else:
        drafted = ComposedDraft(model).chain(ops, start, batch, cos, sin, cache, limits)
    return drafted, cache.view(torch.uint8)


def assert_same(one: DraftedTokens, other: DraftedTokens, where: object = "") -> None:
    assert one.counts.tolist() == other.counts.tolist(), where
    assert one.token_ids.tolist() == other.token_ids.tolist(), where
    assert np.array_equal(one.confidences.view(np.uint32), other.confidences.view(np.uint32)), where


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("name", DRAFTS)
def test_the_fused_chain_is_its_small_operations(name: str, kv_format: str) -> None:
    kind, head_format = DRAFTS[name]
    draft, everyone = RandomDraft(kind, NUM_TOKENS, head_format), [*range(len(NUM_TOKENS))]
    limits = chain_limits(len(everyone))
    composed, composed_cache = run(draft, operations(kv_format), everyone, limits, fused=False)
    for isa, num_threads in [
        (INSTRUCTION_SETS[0], 1),
        *((isa, 2) for isa in INSTRUCTION_SETS),
        (INSTRUCTION_SETS[0], 3),
    ]:
        fused, cache = run(draft, operations(kv_format, isa, num_threads), everyone, limits)
        assert_same(fused, composed, (isa, num_threads))
        assert torch.equal(cache, composed_cache), f"{isa}, {num_threads} threads: the caches differ"
    assert len(set(composed.counts)) > 3


@pytest.mark.parametrize("name", DRAFTS)
def test_a_chain_is_the_same_alone_and_in_company(name: str) -> None:
    kind, head_format = DRAFTS[name]
    draft = RandomDraft(kind, NUM_TOKENS, head_format, has_map=False)
    ops, limits = operations(KV_FORMATS[[*DRAFTS].index(name) % 3]), chain_limits(len(NUM_TOKENS), seed=8)
    together, _ = run(draft, ops, [*range(len(NUM_TOKENS))], limits)
    for chosen in ([0], [1], [7], [8, 2], [5, 4, 3, 2, 1], [*range(8, -1, -1)]):
        drafted, _ = run(draft, ops, chosen, some(limits, chosen))
        expected = DraftedTokens(together.token_ids[chosen], together.confidences[chosen], together.counts[chosen])
        assert_same(drafted, expected, chosen)


def test_one_draft_runs_chains_again_and_again() -> None:
    kind, head_format = DRAFTS["conditioned, int8"]
    draft, ops = RandomDraft(kind, NUM_TOKENS, head_format), operations("f16")
    model = draft.model(ops)
    packed = ops.pack_draft(model)
    pages, cache, hidden = draft.ready(ops, model)
    for seed in range(20):
        chosen = [*range(seed % 9 + 1)]
        limits = chain_limits(len(chosen), seed)
        batch, (cos, sin) = draft.batch(pages, chosen), draft.angles(chosen)
        start = torch.cat([hidden[i] for i in chosen])
        drafted = ops.draft_chain(packed, start, batch, cos, sin, cache, limits)
        assert_same(drafted, ComposedDraft(model).chain(ops, start, batch, cos, sin, cache, limits), seed)


def test_a_draft_quantised_apart_runs_on_the_targets_threads() -> None:
    kind, _ = DRAFTS["conditioned, awkward"]
    kind = dataclasses.replace(kind, hidden_size=64, intermediate_size=96)
    draft, ops = RandomDraft(kind, [9, 20], "F32", vocab_size=64), operations("f16")
    assert ops.quantized("int8").machine is ops.machine
    for quantize, forms in (
        ("none", {"F32"}),
        ("int8", {"Q8_0", "Q8_CHANNEL"}),
        ("int4", {"Q4_1", "Q8_CHANNEL", "Q8_0"}),
    ):
        own = ops.quantized(quantize)
        model = draft.model(own, is_native=False)
        layers = draft.decoder.layers_of(own)
        found = {_native.weight_format(linear) for layer in layers for linear in (layer.qkv, layer.gate_up, layer.down)}
        assert found | {_native.weight_format(model.head)} <= forms, quantize
        pages, cache, hidden = draft.ready(ops, model)
        batch, (cos, sin) = draft.batch(pages, [0, 1]), draft.angles([0, 1])
        limits = chain_limits(2, seed=3)
        packed = own.pack_draft(model)
        drafted = ops.draft_chain(packed, torch.cat(hidden), batch, cos, sin, cache, limits)
        assert_same(drafted, ComposedDraft(model).chain(own, torch.cat(hidden), batch, cos, sin, cache, limits))
