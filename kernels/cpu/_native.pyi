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
    ) -> PassPlan: ...
    def write_kv(self, key: _F32, value: _F32, keys: _U8, values: _U8, plan: PassPlan) -> None: ...
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
    ) -> None: ...
