"""Small GGUF files, written by the ``gguf`` package's own writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from outrider.verify.checkpoint.download import pull_default_model

WriteGGUF = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGGUF:
    """``write_gguf(architecture, metadata, tensors)``; a tensor is an array or ``(bytes array, type)``."""

    def write(architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Any], name: str = "m.gguf") -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in metadata.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        for tensor_name, value in tensors.items():
            array, raw_type = value if isinstance(value, tuple) else (value, None)
            writer.add_tensor(tensor_name, np.ascontiguousarray(array), raw_dtype=raw_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="session")
def default_model() -> Path:
    return pull_default_model(progress=False)


def tiny_metadata(architecture: str, **changes: Any) -> dict[str, Any]:
    """A model of one layer: hidden size 256, 4 query and 2 KV heads of 64; ``None`` in ``changes`` drops a key."""
    values = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": 256,
        "feed_forward_length": 256,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    values.update({key.replace("__", "."): value for key, value in changes.items()})
    return {f"{architecture}.{key}": value for key, value in values.items() if value is not None}


def tiny_tensors(architecture: str = "llama") -> dict[str, Any]:
    """Random F32 tensors for ``tiny_metadata``."""
    random = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (32, 256),
        "output_norm.weight": (256,),
        "blk.0.attn_norm.weight": (256,),
        "blk.0.ffn_norm.weight": (256,),
        "blk.0.attn_q.weight": (256, 256),
        "blk.0.attn_k.weight": (128, 256),
        "blk.0.attn_v.weight": (128, 256),
        "blk.0.attn_output.weight": (256, 256),
        "blk.0.ffn_gate.weight": (256, 256),
        "blk.0.ffn_up.weight": (256, 256),
        "blk.0.ffn_down.weight": (256, 256),
    }
    if architecture == "qwen2":
        shapes |= {"blk.0.attn_q.bias": (256,), "blk.0.attn_k.bias": (128,), "blk.0.attn_v.bias": (128,)}
    if architecture == "qwen3":
        shapes |= {"blk.0.attn_q_norm.weight": (64,), "blk.0.attn_k_norm.weight": (64,)}
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


@pytest.fixture
def tiny() -> Any:
    class Tiny:
        metadata = staticmethod(tiny_metadata)
        tensors = staticmethod(tiny_tensors)

    return Tiny
