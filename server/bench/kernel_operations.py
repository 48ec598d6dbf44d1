"""The native operations at the shapes of a model, one by one and all together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from outrider.server.bench.kernels import Operation, Work

if TYPE_CHECKING:  # torch comes with the model, not with the command line
    from outrider.kernels.cpu._native import PackedLinear, PassPlan
    from outrider.kernels.cpu.operations import CpuOperations
    from outrider.kernels.operations import DecoderLayer, Operations, RaggedBatch

LINEAR_ROWS = (1, 2, 4, 5, 8, 64, 512)
MAX_LOGIT_ROWS = 64  # no pass has logits for more
PASSES = ((1, 128), (5, 128), (8, 128), (512, 0))  # rows, tokens before them
ATTENTIONS = ((1, 128), (1, 1024), (1, 4000), (5, 1024), (64, 1024), (512, 0))
SMALL_ROWS = (1, 8, 512)
ARGMAX_ROWS = (1, 8)
PAGE_SIZE = 16
BYTES_A_SAMPLE = 64 << 20

Floats = npt.NDArray[np.float32]


class KernelModel:
    """A model on the native kernels. Needs torch; loading takes seconds.

    Raises:
        UnsupportedCheckpoint: the model cannot be served.
        ValueError: an option is out of range.
    """

    def __init__(self, path: Path, num_threads: int = 0, quantize: str = "none", kv_cache_dtype: str = "auto") -> None:
        from outrider.kernels.cpu import _native
        from outrider.kernels.cpu.operations import CpuOperations
        from outrider.kvcache.storage import KVStorage
        from outrider.verify.checkpoint.checkpoint import open_checkpoint
        from outrider.verify.transformer import Transformer

        checkpoint = open_checkpoint(path)
        self._config = checkpoint.config
        self._operations = CpuOperations(num_threads, quantize, kv_cache_dtype)
        self.machine: _native.Machine = self._operations.machine
        longest = max(sum(shape) for shape in (*ATTENTIONS, *PASSES))
        self._max_tokens = min(longest, self._config.max_position_embeddings)
        noted = _Noted(self._operations)
        self._model = Transformer(checkpoint, cast("Operations", noted), self._max_tokens)
        self._layers, self._head = noted.layers, noted.head
        self._format_of = _native.weight_format
        self._storage = KVStorage([self._model.kv_layers], 1 + -(-self._max_tokens // PAGE_SIZE), PAGE_SIZE)
        cache: npt.NDArray[np.uint8] = self._storage.layers(self._model.kv_layers.name).numpy().view(np.uint8)
        self._caches = [(layer[0], layer[1]) for layer in cache]  # keys, values
        self._random = np.random.default_rng(0)
        self._fill_caches()

    def operations(self) -> Iterator[Operation]:
        """All there is to measure, the matrices first."""
        for name, linears in self._matrices().items():
            for num_rows in LINEAR_ROWS:
                if name != "head" or num_rows <= MAX_LOGIT_ROWS:
                    yield self._linear(f"linear {name}", linears, num_rows)
        for num_rows, context in ATTENTIONS:
            if num_rows + context <= self._max_tokens:
                yield self._attention(num_rows, context)
        for num_rows in SMALL_ROWS:
            if num_rows <= self._max_tokens:
                yield from (self._norm(num_rows), self._rotary(num_rows), self._write_kv(num_rows))
        yield from map(self._argmax, ARGMAX_ROWS)
        for num_rows, context in PASSES:
            if num_rows + context <= self._max_tokens:
                yield self._pass(num_rows, context)

    def _matrices(self) -> dict[str, list[PackedLinear]]:
        names = ("qkv", "attention_output", "gate_up", "down")
        matrices = {name: [getattr(layer, name) for layer in self._layers] for name in names}
        return {**matrices, "head": [self._head]}

    def _linear(self, name: str, linears: Sequence[PackedLinear], num_rows: int) -> Operation:
        """Through the layers, as many as it takes to read much more than a moment's worth of memory."""
        used = linears[: max(1, math.ceil(BYTES_A_SAMPLE / linears[0].num_bytes))]
        x, to = self._floats(num_rows, used[0].in_features), np.empty((num_rows, used[0].out_features), np.float32)
        machine = self.machine

        def run() -> None:
            for linear in used:
                machine.linear(x, linear, to)

        formats = "/".join(sorted({self._format_of(linear) for linear in used}))
        weights = f"{formats} {used[0].out_features}x{used[0].in_features}"
        work = _mean([self._linear_work(linear, num_rows) for linear in used])
        return Operation(name, (work,), run, len(used), num_rows, weights=weights)

    def _linear_work(self, linear: PackedLinear, num_rows: int) -> Work:
        num_macs = num_rows * linear.in_features * linear.out_features
        if self._format_of(linear) in ("F32", "BF16"):
            return Work(num_bytes=linear.num_bytes, f32_macs=num_macs)
        return Work(num_bytes=linear.num_bytes, int8_macs=num_macs)

    def _attention(self, num_rows: int, context: int) -> Operation:
        config, machine = self._config, self.machine
        plan = self._plan(num_rows, context)
        query = self._floats(num_rows, config.num_heads, config.head_dim)
        to = np.empty_like(query)
        scale = float(config.head_dim**-0.5)

        def run() -> None:
            for keys, values in self._caches:
                machine.attention(query, keys, values, scale, plan, to)

        work = self._attention_work(num_rows, context)
        return Operation("attention", (work,), run, len(self._caches), num_rows, context)

    def _attention_work(self, num_rows: int, context: int) -> Work:
        seen = num_rows * context + num_rows * (num_rows + 1) // 2  # pairs of a row and a token that it sees
        return Work(
            num_bytes=(context + num_rows) * self._kv_bytes,
            f32_macs=2 * seen * self._config.num_heads * self._config.head_dim,
        )

    def _norm(self, num_rows: int) -> Operation:
        machine, eps = self.machine, self._config.rms_norm_eps
        x = self._floats(num_rows, self._config.hidden_size)
        to = np.empty_like(x)
        weights = [layer.input_norm.numpy().reshape(1, -1) for layer in self._layers]

        def run() -> None:
            for weight in weights:
                machine.rms_norm(x, weight, eps, to)

        work = Work(num_bytes=x.nbytes + to.nbytes, f32_macs=2 * x.size)
        return Operation("norm", (work,), run, len(weights), num_rows)

    def _rotary(self, num_rows: int) -> Operation:
        config = self._config
        x = self._floats(num_rows, config.num_heads + config.num_kv_heads, config.head_dim)
        angles = self._floats(num_rows, config.head_dim // 2)
        cos, sin = np.cos(angles), np.sin(angles)

        def run() -> None:
            for _ in self._layers:
                self.machine.rotary(x, cos, sin)

        work = Work(num_bytes=2 * x.nbytes + cos.nbytes + sin.nbytes, f32_macs=2 * x.size)
        return Operation("rotary", (work,), run, len(self._layers), num_rows)

    def _write_kv(self, num_rows: int) -> Operation:
        plan = self._plan(num_rows, 0)
        key, value = (self._floats(num_rows, self._config.num_kv_heads, self._config.head_dim) for _ in range(2))

        def run() -> None:
            for keys, values in self._caches:
                self.machine.write_kv(key, value, keys, values, plan)

        work = Work(num_bytes=key.nbytes + value.nbytes + num_rows * self._kv_bytes)
        return Operation("write_kv", (work,), run, len(self._caches), num_rows)

    def _argmax(self, num_rows: int) -> Operation:
        logits = self._floats(4, num_rows, self._config.vocab_size)
        to = np.empty(num_rows, np.int64)

        def run() -> None:
            for one in logits:
                self.machine.argmax(one, to)

        return Operation("argmax", (Work(num_bytes=logits[0].nbytes),), run, len(logits), num_rows)

    def _pass(self, num_rows: int, context: int) -> Operation:
        """All layers and the head, as the engine runs them."""
        import torch

        token_ids = torch.arange(num_rows) * 7919 % self._config.vocab_size
        batch = _batch(num_rows, context)
        num_logit_rows = num_rows if num_rows <= MAX_LOGIT_ROWS else 1

        # Decoding is one pass after the other; a single one would also pay for waking threads and for cold code. The
        # weights do not stay in the caches meanwhile, unless all of them fit.
        num_calls = 8 if num_rows <= 8 else 1

        def run() -> None:
            for _ in range(num_calls):
                hidden = self._model.forward(token_ids, batch, self._storage)
                self._model.logits(hidden[-num_logit_rows:])

        parts = [self._attention_work(num_rows, context) for _ in self._layers]
        for name, linears in self._matrices().items():
            parts += [self._linear_work(linear, num_logit_rows if name == "head" else num_rows) for linear in linears]
        return Operation("pass", tuple(parts), run, num_calls, num_rows, context)

    @property
    def _kv_bytes(self) -> int:
        """Of one token in one layer."""
        return self._model.kv_layers.bytes_per_token // self._config.num_layers

    def _floats(self, *shape: int) -> Floats:
        return self._random.standard_normal(shape, np.float32)

    def _plan(self, num_rows: int, context: int) -> PassPlan:
        config = self._config
        return self._operations.plan_attention(
            _batch(num_rows, context), PAGE_SIZE, config.num_heads, config.num_kv_heads, config.head_dim, None
        )

    def _fill_caches(self) -> None:
        key, value = (self._floats(self._max_tokens, self._config.num_kv_heads, self._config.head_dim) for _ in "kv")
        plan = self._plan(self._max_tokens, 0)
        for keys, values in self._caches:
            self.machine.write_kv(key, value, keys, values, plan)


class _Noted:
    """Kernels that note which layers and which head a transformer packs, and pass all on."""

    def __init__(self, operations: CpuOperations) -> None:
        self._operations = operations
        self.layers: Sequence[DecoderLayer] = ()
        self.head: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operations, name)

    def pack_decoder(self, layers: Sequence[DecoderLayer], shape: Any) -> Any:
        self.layers = layers
        return self._operations.pack_decoder(layers, shape)

    def tied_head(self, table: Any) -> Any:
        self.head = self._operations.tied_head(table)
        return self.head

    def pack_head(self, weight: Any) -> Any:
        self.head = self._operations.pack_head(weight)
        return self.head


def _mean(works: Sequence[Work]) -> Work:
    def mean(share: Callable[[Work], int]) -> int:
        return sum(map(share, works)) // len(works)

    return Work(mean(lambda w: w.num_bytes), mean(lambda w: w.int8_macs), mean(lambda w: w.f32_macs))


def _batch(num_rows: int, context: int) -> RaggedBatch:
    """Rows of one sequence after ``context`` tokens, in the pages from the first on."""
    from outrider.kernels.operations import RaggedBatch

    positions = np.arange(context, context + num_rows, dtype=np.int64)
    num_pages = -(-(context + num_rows) // PAGE_SIZE)
    return RaggedBatch(
        cu_seqlens_q=np.array([0, num_rows], np.int32),
        seq_lens=np.array([context + num_rows], np.int32),
        page_tables=np.arange(1, num_pages + 1, dtype=np.int32)[None],
        positions=positions,
        slot_mapping=positions + PAGE_SIZE,  # page 1 holds the first positions
    )
