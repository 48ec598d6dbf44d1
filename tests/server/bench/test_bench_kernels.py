"""`outrider bench kernels`: what it calls the limit, and that it measures all it names."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outrider.kernels.cpu.availability import native_problem
from outrider.server.bench.ceilings import MachineCeilings
from outrider.server.bench.kernel_operations import ATTENTIONS, LINEAR_ROWS, MAX_LOGIT_ROWS, KernelModel
from outrider.server.bench.kernels import Ceilings, Measured, Operation, Work, as_json, ceilings_text, measure, table
from outrider.server.cli import bench_kernels
from outrider.server.cli.main import HelpFormatter

CEILINGS = Ceilings(bytes_per_s=10e9, int8_macs_per_s=100e9, f32_macs_per_s=20e9)
LINEAR = Operation(
    "linear", (Work(num_bytes=10_000_000, int8_macs=50_000_000),), lambda: None, 1, num_rows=5, weights="Q4_1 8x8"
)

needs_native = pytest.mark.skipif(native_problem() is not None, reason="the native kernels are not built")


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> KernelModel:
    return KernelModel(tiny_model, num_threads=1)


def test_the_limit_is_the_slower_of_memory_and_processor() -> None:
    assert CEILINGS.limit_s([Work(num_bytes=10_000_000, int8_macs=50_000_000)]) == pytest.approx(1e-3)
    assert CEILINGS.limit_s([Work(num_bytes=10_000_000, int8_macs=200_000_000)]) == pytest.approx(2e-3)
    assert CEILINGS.limit_s([Work(int8_macs=100_000_000, f32_macs=20_000_000)]) == pytest.approx(2e-3)


def test_parts_follow_each_other_and_each_has_its_own_limit() -> None:
    reading, multiplying = Work(num_bytes=10_000_000), Work(int8_macs=100_000_000)
    assert CEILINGS.limit_s([reading, multiplying]) == pytest.approx(2e-3)
    assert CEILINGS.limit_s([]) == 0.0


@pytest.mark.parametrize(
    ("parts", "bound"),
    [
        ((Work(num_bytes=10_000, int8_macs=1),), "memory"),
        ((Work(num_bytes=10_000, int8_macs=200_000),), "int8"),
        ((Work(num_bytes=10_000, f32_macs=40_000),), "f32"),
        ((Work(num_bytes=30_000), Work(int8_macs=200_000)), "memory"),
    ],
)
def test_what_bounds_an_operation_is_what_would_need_the_longest(parts: tuple[Work, ...], bound: str) -> None:
    assert CEILINGS.bound(parts) == bound


def test_memory_counts_as_it_usually_was_and_the_processor_as_it_was_at_its_best() -> None:
    readings = [Ceilings(float(i), 10.0 * i, 100.0 - i) for i in (1, 2, 9)]
    assert Ceilings.of(readings) == Ceilings(2.0, 90.0, 99.0)


def test_a_percentage_is_the_limit_of_its_own_round_over_the_time_taken() -> None:
    slower = replace(CEILINGS, bytes_per_s=5e9)
    measured = Measured(LINEAR, seconds=[2e-3, 4e-3, 1e-3], ceilings=[CEILINGS, slower, CEILINGS])
    assert measured.percents == pytest.approx([50.0, 50.0, 100.0])
    assert measured.median_s == 2e-3
    assert measured.bound == "memory"


def test_the_table_says_what_was_measured() -> None:
    measured = [
        Measured(LINEAR, seconds=[2e-3, 2e-3, 1.25e-3], ceilings=[CEILINGS] * 3),
        Measured(replace(LINEAR, name="attention", num_context_tokens=128), [1e-3] * 3, [CEILINGS] * 3),
    ]
    header, first, second = [line.split() for line in table(measured).splitlines()]
    assert header[:4] == ["operation", "weights", "rows", "context"]
    assert " ".join(first) == "linear Q4_1 8x8 5 - 2.000 5.0 25.0 memory 50 50 to 80"
    assert second[:5] == ["attention", "Q4_1", "8x8", "5", "128"]
    assert ceilings_text(measured).startswith("memory 10.0 GB/s (10.0 to 10.0), int8 100.0 GMAC/s")
    figures = json.loads(json.dumps(as_json(measured)))
    assert [one["name"] for one in figures["operations"]] == ["linear", "attention"]
    assert figures["operations"][0]["percents"] == pytest.approx([50.0, 50.0, 80.0])
    assert len(figures["ceilings"]) == 3


def test_each_round_runs_everything_right_after_a_reading_and_the_first_round_does_not_count() -> None:
    events: list[str] = []

    def read() -> Ceilings:
        events.append("read")
        return CEILINGS

    def operation(name: str) -> Operation:
        return replace(LINEAR, name=name, run=lambda: events.append(name), num_calls=4)

    measured = measure([operation("a"), operation("b")], read, 2, lambda _: None)
    assert events == ["read", "a", "read", "b"] * 3
    assert [len(one.seconds) for one in measured] == [2, 2]
    assert [one.ceilings for one in measured] == [[CEILINGS] * 2] * 2


@needs_native
def test_the_ceilings_are_read_and_positive() -> None:
    from outrider.kernels.cpu import _native

    for instruction_set in _native.instruction_sets():
        ceilings = MachineCeilings(_native.Machine(1, instruction_set), num_bytes=1 << 20)()
        assert min(ceilings.bytes_per_s, ceilings.int8_macs_per_s, ceilings.f32_macs_per_s) > 0


@needs_native
def test_what_cannot_be_read_or_multiplied_is_refused() -> None:
    from outrider.kernels.cpu import _native

    machine = _native.Machine(1, "scalar")
    with pytest.raises(ValueError, match="multiple of 1024"):
        _native.read_memory(machine, np.zeros(1025, np.uint8))
    with pytest.raises(ValueError, match="num_steps must be positive, not 0"):
        _native.multiply_int8(machine, 0)
    for multiply in (_native.multiply_int8, _native.multiply_f32):
        assert multiply(machine, 100) >= 100


@needs_native
def test_every_matrix_is_measured_at_every_number_of_rows(model: KernelModel) -> None:
    rows: dict[str, list[int]] = {}
    for operation in model.operations():
        rows.setdefault(operation.name, []).append(operation.num_rows)
    for name in ("qkv", "attention_output", "gate_up", "down"):
        assert rows[f"linear {name}"] == list(LINEAR_ROWS)
    assert rows["linear head"] == [n for n in LINEAR_ROWS if n <= MAX_LOGIT_ROWS]
    assert {"attention", "norm", "rotary", "write_kv", "argmax", "pass"} <= rows.keys()
    contexts = [(o.num_rows, o.num_context_tokens) for o in model.operations() if o.name == "attention"]
    assert contexts == [(n, context) for n, context in ATTENTIONS if n + context <= 1024]  # the model's longest


@needs_native
def test_the_work_of_an_operation_is_what_its_shape_says(model: KernelModel) -> None:
    operations = {(o.name, o.num_rows): o for o in model.operations() if o.num_context_tokens in (None, 0, 128)}
    gate_up = operations["linear gate_up", 5]  # hidden 48, intermediate 100, floats; panels of 16 channels
    assert gate_up.weights == "F32 200x48"
    assert gate_up.num_calls == 2
    assert gate_up.parts == (Work(num_bytes=2 * 112 * 48 * 4, f32_macs=5 * 200 * 48),)
    attention = operations["attention", 1]  # 2 KV heads of 12 in f16, 4 query heads
    assert attention.parts == (Work(num_bytes=129 * 2 * 2 * 12 * 2, f32_macs=129 * 2 * 4 * 12),)
    chunk = operations["attention", 512]
    assert chunk.num_macs == sum(range(1, 513)) * 2 * 4 * 12
    # A pass reads each weight and each layer's keys and values once.
    single = operations["pass", 1]
    linears = [o for o in operations.values() if o.name.startswith("linear") and o.num_rows == 1]
    layers = sum(o.num_bytes * (1 if o.name == "linear head" else 2) for o in linears)
    assert single.num_bytes == layers + 2 * attention.num_bytes


@needs_native
@pytest.mark.parametrize(("quantize", "form"), [("none", "F32"), ("int8", "Q8")])
def test_everything_runs_and_quantised_weights_are_held_against_int8(
    tiny_model: Path, quantize: str, form: str
) -> None:
    model = KernelModel(tiny_model, num_threads=2, quantize=quantize, kv_cache_dtype="int8")
    ceilings = MachineCeilings(model.machine, num_bytes=1 << 20)
    measured = measure(list(model.operations()), ceilings, 1, lambda _: None)
    for one in measured:
        assert one.seconds[0] > 0
        assert one.percents[0] > 0
    linears = [one.operation for one in measured if one.operation.name.startswith("linear")]
    assert all(operation.weights.startswith(form) for operation in linears)
    assert all((operation.parts[0].int8_macs > 0) == (quantize != "none") for operation in linears)


@pytest.fixture
def arguments(tiny_model: Path, tmp_path: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=HelpFormatter)
    bench_kernels.add_arguments(parser)
    return parser.parse_args(
        ["--model", str(tiny_model), "--rounds", "1", "--num-threads", "1", "--json", str(tmp_path / "figures.json")]
    )


@needs_native
def test_the_command_prints_the_table_and_writes_the_figures(
    arguments: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_kernels.run(arguments) == 0
    printed = capsys.readouterr().out
    figures = json.loads(arguments.json.read_text())
    assert figures["machine"]["num_threads"] == 1
    for operation in figures["operations"]:
        assert operation["name"] in printed
        assert len(operation["seconds"]) == len(figures["ceilings"]) == 1
    assert "limits    memory " in printed
