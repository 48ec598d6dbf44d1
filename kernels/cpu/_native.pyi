from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_F32 = npt.NDArray[np.float32]
_U8 = npt.NDArray[np.uint8]
_I32 = npt.NDArray[np.int32]
_I64 = npt.NDArray[np.int64]

def instruction_sets() -> list[str]: ...
def selected_instruction_set() -> str: ...
def advise_huge_pages(address: int, num_bytes: int) -> None: ...

class PackedLinear:
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def unpack_rows(self, channels: _I64, to: _F32) -> None: ...

def pack_linear(
    format: str, in_features: int, blocks: Sequence[_U8], channel_scales: _F32 | None = None, bias: _F32 | None = None
) -> PackedLinear: ...
def weight_format(linear: PackedLinear) -> str: ...

class PassPlan: ...

class Machine:
    def __init__(self, num_threads: int, instruction_set: str) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def instruction_set(self) -> str: ...
    def linear(self, x: _F32, packed: PackedLinear, to: _F32) -> None: ...
    def rms_norm(self, x: _F32, weight: _F32, eps: float, to: _F32) -> None: ...
    def rotary(self, x: _F32, cos: _F32, sin: _F32) -> None: ...
    def silu_mul(self, gate_up: _F32, to: _F32) -> None: ...
    def argmax(self, logits: _F32, to: _I64) -> None: ...
    def top_k(self, logits: _F32, values: _F32, ids: _I32) -> None: ...
    def race_candidates(
        self, logits: _F32, temperature: float, draw: int, ids: _I32, token_map: _I64 | None = None
    ) -> int: ...
    def probabilities(self, logits: _F32, indices: _I64, temperatures: _F32, to: _F32) -> None: ...
    def plan_pass(
        self,
        cu_seqlens_q: _I32,
        seq_lens: _I32,
        page_tables: _I32,
        slot_mapping: _I64,
        page_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int,
        kv_format: str,
        tree_masks: npt.NDArray[np.uint64] | None = None,
    ) -> PassPlan: ...
    def write_kv(self, key: _F32, value: _F32, keys: _U8, values: _U8, plan: PassPlan) -> None: ...
    def copy_kv(self, cache: _U8, kv_format: str, source_slots: _I64, destination_slots: _I64) -> None: ...
    def attention(self, query: _F32, keys: _U8, values: _U8, scale: float, plan: PassPlan, to: _F32) -> None: ...

class Decoder:
    def __init__(
        self,
        machine: Machine,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        scale: float,
        layers: list[Any],
    ) -> None: ...
    def run(
        self,
        residual: _F32,
        cos: _F32,
        sin: _F32,
        cache: _U8,
        full: PassPlan | None,
        window: PassPlan | None,
        first: int,
        last: int,
        embeddings: _F32 | None = None,
        taps: Sequence[int] = (),
        tapped: _F32 | None = None,
    ) -> None: ...

class DraftChain:
    def __init__(
        self,
        machine: Machine,
        decoder: Decoder,
        window: int,
        embedding: PackedLinear,
        norm: _F32,
        head: PackedLinear,
        token_map: _I64 | None,
        conditioned: bool,
    ) -> None: ...
    def run(
        self,
        hidden: _F32,
        positions: _I64,
        page_tables: _I32,
        cos: _F32,
        sin: _F32,
        cache: _U8,
        kv_format: str,
        limits: _I64,
        min_survival: npt.NDArray[np.float64],
        temperatures: npt.NDArray[np.float64],
        draws: npt.NDArray[np.uint64],
        token_ids: _I64,
        confidences: _F32,
        counts: _I64,
    ) -> None: ...

def read_memory(machine: Machine, data: _U8) -> None: ...
def multiply_int8(machine: Machine, num_steps: int) -> int: ...
def multiply_f32(machine: Machine, num_steps: int) -> int: ...
