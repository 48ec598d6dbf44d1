"""What does not fit is a TypeError or ValueError that says so, never a crash or a quiet wrong result."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.kernels.cpu import _native
from outrider.kernels.cpu.operations import CpuOperations
from outrider.kernels.operations import RaggedBatch, load_operations

MACHINE = _native.Machine(2, _native.instruction_sets()[0])


def floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.float32)


def linear(in_features: int, *stacked: int) -> _native.PackedLinear:
    return _native.pack_linear("F32", in_features, [np.zeros((n, 4 * in_features), dtype=np.uint8) for n in stacked])


def pack_q4_1(in_features: int = 64, num_bytes: int = 40, **more: Any) -> _native.PackedLinear:
    return _native.pack_linear("Q4_1", in_features, [np.zeros((3, num_bytes), dtype=np.uint8)], **more)


def plan(**changes: Any) -> _native.PassPlan:
    """One row of one sequence, at position 2 of page 1; pages of 4 tokens, 2 heads of 8 on one KV head."""
    values: dict[str, Any] = {
        "cu_seqlens_q": [0, 1],
        "seq_lens": [3],
        "page_tables": [[1, 0]],
        "slot_mapping": [6],
        "page_size": 4,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "window": 0,
        "kv_format": "f32",
        **changes,
    }
    for name in ("cu_seqlens_q", "seq_lens", "page_tables", "slot_mapping"):
        values[name] = np.array(values[name], dtype=np.int64 if name == "slot_mapping" else np.int32)
    if "tree_masks" in values:
        values["tree_masks"] = np.array(values["tree_masks"], dtype=np.uint64)
    return MACHINE.plan_pass(**values)


def tree(masks: list[int]) -> _native.PassPlan:
    n = len(masks)
    slots = [*range(4, 4 + n)]
    return plan(cu_seqlens_q=[0, n], seq_lens=[n], page_tables=[[1] * 20], slot_mapping=slots, tree_masks=masks)


def move(sources: list[int], destinations: list[int], kv_format: str = "f32", width: int = 32) -> None:
    own = np.zeros((1, 2, 2, 4, 1, width), dtype=np.uint8)
    MACHINE.copy_kv(own, kv_format, np.array(sources), np.array(destinations))


def cache(num_pages: int = 2, width: int = 32) -> np.ndarray:
    return np.zeros((num_pages, 4, 1, width), dtype=np.uint8)


def attend(query: np.ndarray | None = None, **changes: Any) -> None:
    arguments = {"keys": cache(), "values": cache(), "scale": 1.0, "plan": plan(), "to": floats(1, 2, 8), **changes}
    MACHINE.attention(query=floats(1, 2, 8) if query is None else query, **arguments)


def write_kv(**changes: Any) -> None:
    row = floats(1, 1, 8)
    MACHINE.write_kv(**{"key": row, "value": row, "keys": cache(), "values": cache(), "plan": plan(), **changes})


def layer(**changes: Any) -> SimpleNamespace:
    parts = {
        "input_norm": floats(16),
        "qkv": linear(16, 16, 8, 8),
        "query_key_norm": None,
        "attention_output": linear(16, 16),
        "mlp_norm": floats(16),
        "gate_up": linear(16, 10, 10),
        "down": linear(10, 16),
        "has_window": False,
        "embedding_norm": None,
        "norm_before_residual": False,
    }
    return SimpleNamespace(**{**parts, **changes})


def decoder(*layers: Any, **changes: Any) -> _native.Decoder:
    shape = {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "eps": 1e-5, "scale": 1.0, **changes}
    return _native.Decoder(MACHINE, layers=list(layers), **shape)


def decode(*layers: Any, **changes: Any) -> None:
    arguments = {
        "residual": floats(1, 16),
        "cos": floats(1, 4),
        "sin": floats(1, 4),
        "cache": np.zeros((len(layers), 2, 2, 4, 1, 32), dtype=np.uint8),
        "full": plan(),
        "window": None,
        "first": 0,
        "last": len(layers),
        **changes,
    }
    decoder(*layers).run(**arguments)


def wide_layer() -> SimpleNamespace:
    return layer(qkv=linear(32, 16, 8, 8), embedding_norm=floats(16))


def draft(**changes: Any) -> _native.DraftChain:
    """A table of 5 tokens, a head over 3 of them."""
    parts = {
        "decoder": decoder(wide_layer()),
        "window": 0,
        "embedding": linear(16, 5),
        "norm": floats(16),
        "head": linear(16, 3),
        "token_map": np.array([4, 0, 2]),
        "conditioned": True,
    }
    return _native.DraftChain(MACHINE, **{**parts, **changes})


def chain(**changes: Any) -> None:
    """Of 2 tokens, from position 6 on."""
    arguments = {
        "hidden": floats(1, 16),
        "positions": np.array([6]),
        "page_tables": np.array([[0, 1]], np.int32),
        "cos": floats(1, 2, 4),
        "sin": floats(1, 2, 4),
        "cache": np.zeros((1, 2, 2, 4, 1, 32), np.uint8),
        "kv_format": "f32",
        "limits": np.array([2]),
        "min_survival": np.zeros(1),
        "temperatures": np.zeros(1),
        "draws": np.zeros((1, 2), np.uint64),
        "token_ids": np.zeros((1, 2), np.int64),
        "confidences": floats(1, 2),
        "counts": np.zeros(1, np.int64),
        **changes,
    }
    draft().run(**arguments)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def test_what_fits_is_taken() -> None:
    pack_q4_1(bias=floats(3))
    attend()
    write_kv()
    decode(layer(), layer(query_key_norm=floats(3, 8), has_window=True), window=plan(window=2))
    decode(wide_layer(), layer(), embeddings=floats(1, 16), taps=[2, 0], tapped=floats(1, 32))
    tree([1, 3, 5, 11])
    move([4, 5], [6, 4])
    chain()
    chain(limits=np.array([1]), page_tables=np.array([[0, 0]], np.int32))  # a single token writes nothing


VALUE_ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "unknown format": (lambda: _native.pack_linear("Q3_K", 32, []), "no weight format called Q3_K"),
    "broken group": (lambda: pack_q4_1(63), "groups of 32 inputs, and 63 are not whole groups"),
    "no inputs": (lambda: pack_q4_1(0), "in_features must be positive"),
    "other bytes": (lambda: pack_q4_1(num_bytes=36), r"blocks must be \[3, 40\], not \[3, 36\]"),
    "flat blocks": (lambda: _native.pack_linear("F32", 1, [np.zeros(4, dtype=np.uint8)]), "blocks must be"),
    "long bias": (lambda: pack_q4_1(bias=floats(4)), r"bias must be \[3\], not \[4\]"),
    "scales for groups": (lambda: pack_q4_1(channel_scales=floats(3)), "channel_scales are for Q8_CHANNEL"),
    "no scales": (lambda: _native.pack_linear("Q8_CHANNEL", 4, [np.zeros((3, 4), np.uint8)]), "channel_scales"),
    "other inputs": (lambda: MACHINE.linear(floats(2, 5), linear(4, 3), floats(2, 3)), r"x must be \[2, 4\]"),
    "no rows": (lambda: MACHINE.linear(floats(4), linear(4, 3), floats(1, 3)), "x must be"),
    "other outputs": (lambda: MACHINE.linear(floats(2, 4), linear(4, 3), floats(2, 4)), r"to must be \[2, 3\]"),
    "read-only result": (lambda: MACHINE.linear(floats(2, 4), linear(4, 3), read_only(floats(2, 3))), "writeable"),
    "row beyond": (lambda: linear(4, 3).unpack_rows(np.array([3]), floats(1, 4)), "row 3 of a table with 3"),
    "row before": (lambda: linear(4, 3).unpack_rows(np.array([-1]), floats(1, 4)), "row -1 of a table with 3"),
    "row of two": (lambda: linear(4, 10, 10).unpack_rows(np.array([12]), floats(1, 4)), "stacks several weights"),
    "long norm": (lambda: MACHINE.rms_norm(floats(2, 4), floats(1, 5), 1e-5, floats(2, 4)), "weight must be"),
    "no norm": (lambda: MACHINE.rms_norm(floats(2, 4), floats(0, 4), 1e-5, floats(2, 4)), "weight must"),
    "odd heads": (lambda: MACHINE.rotary(floats(2, 1, 5), floats(2, 2), floats(2, 2)), "head_dim even"),
    "short angles": (lambda: MACHINE.rotary(floats(2, 1, 6), floats(2, 2), floats(2, 3)), "cos must be"),
    "odd gate": (lambda: MACHINE.silu_mul(floats(2, 5), floats(2, 2)), "gate_up must be"),
    "no vocabulary": (lambda: MACHINE.argmax(floats(2, 0), np.zeros(2, np.int64)), "logits must be"),
    "none of the largest": (lambda: MACHINE.top_k(floats(2, 3), floats(2, 0), np.zeros((2, 0), np.int32)), "k must be"),
    "more than there are": (lambda: MACHINE.top_k(floats(2, 3), floats(2, 4), np.zeros((2, 4), np.int32)), "k must be"),
    "cold race": (lambda: MACHINE.race_candidates(floats(3), 0.0, 1, np.zeros(3, np.int32)), "temperature must be"),
    "race of none": (lambda: MACHINE.race_candidates(floats(0), 1.0, 1, np.zeros(0, np.int32)), "not be empty"),
    "race of others": (
        lambda: MACHINE.race_candidates(floats(3), 1.0, 1, np.zeros(3, np.int32), np.zeros(4, np.int64)),
        r"token_map must be \[3\]",
    ),
    "probability of none": (
        lambda: MACHINE.probabilities(floats(1, 3), np.array([3]), floats(1), floats(1)),
        "there are 3 logits, and no 3",
    ),
    "page of nothing": (lambda: plan(page_size=0), "page_size must be positive"),
    "negative window": (lambda: plan(window=-1), "window must be 0"),
    "uneven heads": (lambda: plan(num_heads=3, num_kv_heads=2), "3 query heads cannot share 2 KV heads"),
    "no heads": (lambda: plan(num_heads=0), "0 query heads"),
    "no KV heads": (lambda: plan(num_kv_heads=0), "0 KV heads"),
    "flat heads": (lambda: plan(head_dim=0), "head_dim must be positive"),
    "unknown cache": (lambda: plan(kv_format="fp8"), "no KV cache format called fp8"),
    "too many tokens": (lambda: plan(seq_lens=[9]), "longer than its page table"),
    "more rows than tokens": (lambda: plan(seq_lens=[0]), "more rows than tokens"),
    "falling rows": (
        lambda: plan(cu_seqlens_q=[0, 2, 1], seq_lens=[3, 3], page_tables=[[1], [1]]),
        "cu_seqlens_q must not fall",
    ),
    "late start": (lambda: plan(cu_seqlens_q=[1, 2], slot_mapping=[6, 7]), "must start with 0"),
    "missing sequence": (lambda: plan(cu_seqlens_q=[0]), "cu_seqlens_q must be"),
    "missing table": (lambda: plan(page_tables=np.zeros((0, 2))), "page_tables must be"),
    "missing slot": (lambda: plan(slot_mapping=[]), "slot_mapping must be"),
    "negative page": (lambda: plan(page_tables=[[-1, 0]]), "negative page"),
    "negative slot": (lambda: plan(slot_mapping=[-1]), "negative slot"),
    "mask of few rows": (lambda: plan(tree_masks=[1, 1]), r"tree_masks must be \[1\]"),
    "mask without itself": (lambda: plan(tree_masks=[2]), "must be its own bit and all of its parent's"),
    "tree of orphans": (lambda: tree([1, 2, 5, 12]), "row 3 of sequence 0 has tree mask 12; it must be"),
    "tree of too many": (lambda: tree([1] * 65), "a tree of 65 rows; 64 are the most"),
    "move from nowhere": (lambda: move([8], [4]), "slots 0 to 7, not 8"),
    "move to nowhere": (lambda: move([4], [-1]), "slots 0 to 7, not -1"),
    "move into nothing": (lambda: move([4], [3]), "the null page is never written"),
    "move of two to one": (lambda: move([4, 5], [6]), r"destination_slots must be \[2\]"),
    "move in another format": (lambda: move([4], [5], "int8", 3), "of another format than int8"),
    "move in a flat cache": (
        lambda: MACHINE.copy_kv(np.zeros(8, np.uint8), "f32", np.array([4]), np.array([5])),
        "cache must have six axes",
    ),
    "other query": (lambda: attend(floats(1, 3, 8)), "query must be"),
    "page beyond": (lambda: attend(plan=plan(page_tables=[[1, 2]])), "needs page 2, and the cache has 2 pages"),
    "slot beyond": (lambda: write_kv(plan=plan(slot_mapping=[8])), "needs page 2, and the cache has 2 pages"),
    "other key": (lambda: write_kv(key=floats(1, 2, 8)), "key must be"),
    "cache of another format": (lambda: attend(plan=plan(kv_format="f16")), r"keys must be \[2, 4, 1, 16\]"),
    "cache of few pages": (lambda: attend(values=cache(1)), "the cache has 1 pages"),
    "no layers": (lambda: decoder(), "at least one layer"),
    "missing linear": (lambda: decoder(layer(down=None)), "lacks one of its linear layers"),
    "other hidden size": (lambda: decoder(layer(), hidden_size=32), "do not fit each other"),
    "other intermediate size": (
        lambda: decoder(layer(), layer(gate_up=linear(16, 8, 8), down=linear(8, 16))),
        "do not fit each other",
    ),
    "one head norm": (lambda: decoder(layer(query_key_norm=floats(1, 8))), "do not fit each other"),
    "gate and up in one": (lambda: decoder(layer(gate_up=linear(16, 20))), "must stack two weights"),
    "odd rotation": (lambda: decoder(layer(), head_dim=7), "head_dim even"),
    "other rows": (lambda: decode(layer(), residual=floats(2, 16)), "residual must be"),
    "other angles": (lambda: decode(layer(), cos=floats(1, 8)), "cos must be"),
    "no plan": (lambda: decode(layer(), full=None), "a pass needs a plan"),
    "no window's plan": (lambda: decode(layer(has_window=True)), "layer 0 needs a plan with a window"),
    "no full plan": (lambda: decode(layer(), full=None, window=plan()), "layer 0 needs a plan without a window"),
    "plan of other heads": (lambda: decode(layer(), full=plan(num_heads=4)), "other heads than the decoder's"),
    "plans of two passes": (lambda: decode(layer(), window=plan(slot_mapping=[5])), "not of one pass"),
    "layers beyond": (lambda: decode(layer(), last=2), "layers 0 to 1, not 0 to 2"),
    "layers before": (lambda: decode(layer(), first=-1), "layers 0 to 1, not -1 to 1"),
    "cache of more layers": (lambda: decode(layer(), cache=np.zeros((2, 2, 2, 4, 1, 32), np.uint8)), "cache must be"),
    "page beyond all caches": (lambda: decode(layer(), full=plan(page_tables=[[1, 2]])), "needs page 2"),
    "narrow wide layer": (lambda: decoder(layer(embedding_norm=floats(16))), "do not fit each other"),
    "other embedding norm": (
        lambda: decoder(layer(qkv=linear(32, 16, 8, 8), embedding_norm=floats(32))),
        "do not fit each other",
    ),
    "no embeddings": (lambda: decode(layer(), wide_layer()), "layer 1 reads embeddings, and the pass has none"),
    "other embeddings": (lambda: decode(wide_layer(), embeddings=floats(2, 16)), "embeddings must be"),
    "tap beyond": (lambda: decode(layer(), taps=[2], tapped=floats(1, 16)), "taps are layers 0 to 1, not 2"),
    "taps without room": (lambda: decode(layer(), taps=[1]), "taps need room"),
    "taps of little room": (lambda: decode(layer(), taps=[0, 1], tapped=floats(1, 16)), r"tapped must be \[1, 32\]"),
    "head of another size": (lambda: draft(head=linear(8, 3)), "must have one hidden_size"),
    "map of another size": (lambda: draft(token_map=np.array([1])), r"token_map must be \[3\]"),
    "map beyond": (lambda: draft(token_map=np.array([4, 5, 0])), "output 1 stands for token 5, and the table has 5"),
    "head beyond": (lambda: draft(head=linear(16, 6), token_map=None), "output 5 stands for token 5"),
    "unconditioned wide layer": (lambda: draft(conditioned=False), "must be conditioned"),
    "window of no width": (lambda: draft(decoder=decoder(layer(has_window=True))), "does not say how wide"),
    "long chain": (lambda: chain(limits=np.array([3])), "may have 3 tokens, and there is room for 2"),
    "chain of few pages": (lambda: chain(positions=np.array([8])), "needs 9 positions, and its page table has 8"),
    "chain into nowhere": (lambda: chain(page_tables=np.array([[1, 0]], np.int32)), "null page"),
    "chain beyond the cache": (lambda: chain(page_tables=np.array([[0, 2]], np.int32)), "page 2, and the cache has 2"),
    "chain before the start": (lambda: chain(positions=np.array([-1])), "must not be negative"),
    "chain of other rows": (lambda: chain(hidden=floats(2, 16)), "hidden must be"),
    "chain in another cache": (lambda: chain(kv_format="f16"), "cache must be"),
    "chain in a flat cache": (lambda: chain(cache=np.zeros(8, np.uint8)), "cache must have six axes"),
}


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_what_does_not_fit_is_a_sentence(name: str) -> None:
    attempt, sentence = VALUE_ERRORS[name]
    with pytest.raises(ValueError, match=sentence):
        attempt()


TYPE_ERRORS: dict[str, Callable[[], object]] = {
    "float64 rows": lambda: MACHINE.linear(np.zeros((2, 4)), linear(4, 3), floats(2, 3)),  # type: ignore[arg-type]
    "float64 result": lambda: MACHINE.linear(floats(2, 4), linear(4, 3), np.zeros((2, 3))),  # type: ignore[arg-type]
    "rows apart": lambda: MACHINE.linear(floats(2, 8)[:, ::2], linear(4, 3), floats(2, 3)),
    "columns first": lambda: MACHINE.linear(floats(4, 2).T, linear(4, 3), floats(2, 3)),
    "no layer": lambda: MACHINE.linear(floats(2, 4), None, floats(2, 3)),  # type: ignore[arg-type]
    "no rows": lambda: MACHINE.linear(None, linear(4, 3), floats(2, 3)),  # type: ignore[arg-type]
    "float blocks": lambda: _native.pack_linear("F32", 4, [floats(3, 16)]),  # type: ignore[list-item]
    "int32 ids": lambda: linear(4, 3).unpack_rows(np.zeros(1, np.int32), floats(1, 4)),  # type: ignore[arg-type]
    "int32 choices": lambda: MACHINE.argmax(floats(2, 3), np.zeros(2, np.int32)),  # type: ignore[arg-type]
    "negative draw": lambda: MACHINE.race_candidates(floats(3), 1.0, -1, np.zeros(3, np.int32)),
    "no plan": lambda: attend(plan=None),
    "plan of nothing": lambda: write_kv(plan="plan"),
    "float cache": lambda: attend(keys=floats(2, 4, 1, 8)),
    "no machine": lambda: _native.Decoder(None, 16, 2, 1, 8, 1e-5, 1.0, [layer()]),  # type: ignore[arg-type]
    "no threads": lambda: _native.Machine("2", "scalar"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_what_is_of_another_type_is_refused(name: str) -> None:
    with pytest.raises(TypeError):
        TYPE_ERRORS[name]()


def test_the_operations_hand_on_what_the_bindings_say() -> None:
    ops = load_operations("cpu", num_threads=1)
    assert isinstance(ops, CpuOperations)
    with pytest.raises(ValueError, match=r"x must be \[2, 4\], not \[2, 5\]"):
        ops.linear(torch.zeros(2, 5), linear(4, 3))
    with pytest.raises(ValueError, match="row 3 of a table with 3"):
        ops.embedding(torch.tensor([0, 3]), linear(4, 3))
    batch = RaggedBatch(
        cu_seqlens_q=np.array([0, 1], np.int32),
        seq_lens=np.array([17], np.int32),
        page_tables=np.array([[1]], np.int32),
        positions=np.array([16]),
        slot_mapping=np.array([16]),
    )
    with pytest.raises(ValueError, match="longer than its page table"):
        ops.plan_attention(batch, 16, 2, 1, 8, None)


def test_a_plan_of_nobody_is_none_too_few() -> None:
    empty = plan(cu_seqlens_q=[0], seq_lens=[], page_tables=np.zeros((0, 0)), slot_mapping=[])
    attend(floats(0, 2, 8), plan=empty, to=floats(0, 2, 8))
    decode(layer(), residual=floats(0, 16), cos=floats(0, 4), sin=floats(0, 4), full=empty)
