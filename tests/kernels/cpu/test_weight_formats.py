"""What a checkpoint's weights become for the native kernels, beside what gguf and torch say they are."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from outrider.kernels.cpu import _native
from outrider.kernels.cpu.operations import CpuOperations
from outrider.kernels.cpu.weight_formats import PackedForm, packed_form
from outrider.verify.checkpoint.weights import StoredWeight

Floats = npt.NDArray[np.float32]
OTHER_FAMILIES = ("Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
# Where the f16 scales of a block lie: random bytes there would be numbers of any size, or none.
SCALE_BYTES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}


def random_floats(out_features: int, in_features: int, seed: int = 0) -> Floats:
    """Normal values as a layer's weights have them, a few large ones among them."""
    random = np.random.default_rng([seed, out_features, in_features])
    floats = random.standard_normal((out_features, in_features)) * 0.03
    floats[random.random(floats.shape) < 0.002] *= 10
    return floats.astype(np.float32)


def stored(floats: Floats, quantization: str = "F32") -> StoredWeight:
    """The values as a file of that kind holds them."""
    if quantization == "F32":
        blocks = floats.view(np.uint8)
    elif quantization == "F16":
        blocks = floats.astype(np.float16).view(np.uint8)
    elif quantization == "BF16":
        blocks = torch.from_numpy(floats).bfloat16().view(torch.int16).numpy().view(np.uint8)
    elif quantization in SCALE_BYTES or quantization == "IQ4_NL":
        blocks = random_blocks(floats, quantization)
    else:
        blocks = gguf.quantize(floats, gguf.GGMLQuantizationType[quantization])
    return StoredWeight(floats.shape, quantization, blocks)


def random_blocks(floats: Floats, quantization: str) -> npt.NDArray[np.uint8]:
    """Blocks that gguf can read and not write: any bits will do, but for scales of the size that weights have."""
    random = np.random.default_rng(len(floats))
    values_per_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quantization]]
    blocks = random.integers(0, 256, (floats.size // values_per_block, block_bytes), dtype=np.uint8)
    for start in SCALE_BYTES.get(quantization, (0,)):
        scales = random.uniform(1e-4, 1e-3, (len(blocks), 1)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8)
    return blocks.reshape(len(floats), -1)


def values(form: PackedForm, in_features: int) -> list[Floats]:
    """What the blocks of each weight stand for, read by gguf."""
    if form.format == "Q8_CHANNEL":
        assert form.channel_scales is not None
        rows = np.concatenate([blocks.view(np.int8) for blocks in form.blocks]) * form.channel_scales[:, None]
        return np.split(rows, np.cumsum([len(blocks) for blocks in form.blocks])[:-1])
    kind = gguf.GGMLQuantizationType[form.format]
    return [gguf.dequantize(blocks, kind).reshape(-1, in_features) for blocks in form.blocks]


def native_values(form: PackedForm, in_features: int) -> Floats:
    """What the native kernels make of the blocks of the only weight."""
    packed = _native.pack_linear(form.format, in_features, form.blocks, form.channel_scales, None)
    rows = np.full((packed.out_features, in_features), np.nan, dtype=np.float32)
    packed.unpack_rows(np.arange(packed.out_features), rows)
    return rows


def group_largest(floats: Floats) -> Floats:
    """For each value the largest magnitude of its group of 32."""
    groups = np.abs(floats).reshape(len(floats), -1, 32).max(axis=-1)
    return np.repeat(groups, 32, axis=1)


def lost(found: Floats, wanted: Floats) -> float:
    """Squared error to sum of squares."""
    difference = found.astype(np.float64) - wanted
    return float((difference**2).sum() / (wanted.astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_1", "Q8_0", "F32", "BF16"])
def test_forms_the_kernels_read_are_kept_to_the_byte(quantization: str) -> None:
    weights = [stored(random_floats(rows, 64), quantization) for rows in (17, 100)]
    form = packed_form(weights, "none")
    assert form.format == quantization
    for blocks, weight in zip(form.blocks, weights, strict=True):
        assert np.array_equal(blocks, weight.blocks)
    alone = packed_form(weights[:1], "none")
    assert np.array_equal(native_values(alone, 64), weights[0].dense().numpy())


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_1", "Q8_0"])
def test_weights_quantised_in_the_file_are_not_quantised_again(quantization: str, quantize: str) -> None:
    weight = stored(random_floats(17, 64), quantization)
    form = packed_form([weight], quantize)
    assert form.format == quantization
    assert np.array_equal(form.blocks[0], weight.blocks)


@pytest.mark.parametrize("in_features", [100, 48, 64])
def test_half_precision_stays_exact(in_features: int) -> None:
    weight = stored(random_floats(33, in_features), "F16")
    form = packed_form([weight], "none")
    assert form.format == "F32"
    assert np.array_equal(native_values(form, in_features), weight.dense().numpy())


@pytest.mark.parametrize("quantization", OTHER_FAMILIES)
def test_other_families_lose_nothing_measurable(quantization: str) -> None:
    weight = stored(random_floats(40, 512), quantization)
    wanted = weight.dense().numpy()
    form = packed_form([weight], "none")
    found = values(form, 512)[0]
    assert np.array_equal(found, native_values(form, 512))
    assert lost(found, wanted) < 1e-4, "a 6-bit form itself loses some 4e-4"
    assert (np.abs(found - wanted) <= group_largest(wanted) / 127 * 0.501).all()


@pytest.mark.parametrize(("quantization", "loss"), [("Q5_0", 0), ("IQ4_NL", 1e-4), ("Q4_K", 1e-6)])
def test_what_another_form_can_hold_is_not_rounded(quantization: str, loss: float) -> None:
    weight = stored(random_floats(40, 512), quantization)
    found = values(packed_form([weight], "none"), 512)[0]
    assert lost(found, weight.dense().numpy()) <= loss


def test_4_bits_of_the_larger_family_stay_4_bits() -> None:
    """Q4_K's scales and minima are products; nothing but their rounding to f16 may differ."""
    weight = stored(random_floats(40, 512), "Q4_K")
    form = packed_form([weight], "none")
    assert form.format == "Q4_1"
    wanted = weight.dense().numpy()
    groups = wanted.reshape(40, -1, 32)
    span = np.repeat(np.abs(groups.min(axis=-1)) + np.ptp(groups, axis=-1), 32, axis=1)
    # Where random scales are 0 or next to it, f16 counts in steps of 2^-24.
    assert (np.abs(values(form, 512)[0] - wanted) <= span * 2.0**-10 + 16 * 2.0**-25).all()


@pytest.mark.parametrize(
    ("quantizations", "quantize", "format"),
    [
        (("Q4_0", "Q4_1"), "none", "Q4_1"),
        (("Q4_0", "Q8_0"), "none", "Q8_0"),
        (("Q4_1", "Q8_0", "Q4_0"), "none", "Q8_0"),
        (("Q4_K", "Q4_1"), "none", "Q4_1"),
        (("Q4_K", "Q4_K", "Q6_K"), "none", "Q8_0"),
        (("Q4_1", "F16"), "none", "F32"),
        (("Q8_0", "BF16"), "none", "F32"),
        (("BF16", "F32"), "none", "F32"),
        (("BF16", "F16"), "none", "F32"),
        (("BF16", "F16"), "int8", "Q8_0"),
        (("Q8_0", "BF16"), "int4", "Q8_0"),
        (("Q4_0", "BF16"), "int4", "Q4_1"),
        (("F32", "BF16", "F16"), "int4", "Q4_1"),
    ],
)
def test_a_stack_takes_the_most_precise_of_its_forms(
    quantizations: tuple[str, ...], quantize: str, format: str
) -> None:
    weights = [stored(random_floats(rows, 256), kind) for rows, kind in zip((5, 17, 40), quantizations, strict=False)]
    form = packed_form(weights, quantize)
    assert form.format == format
    for found, weight in zip(values(form, 256), weights, strict=True):
        exact = format == "F32" or (weight.quantization in ("Q4_0", "Q8_0", format) and quantize == "none")
        is_4_bit = format == "Q4_1" and weight.quantization in ("F32", "F16", "BF16")
        assert lost(found, weight.dense().numpy()) <= (0 if exact else 0.02 if is_4_bit else 2e-4)


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("in_features", [32, 96, 576])
def test_8_bits_are_off_by_half_a_step_of_their_group_at_most(in_features: int, quantization: str) -> None:
    weight = stored(random_floats(33, in_features), quantization)
    form = packed_form([weight], "int8")
    assert form.format == "Q8_0"
    wanted = weight.dense().numpy()
    found = values(form, in_features)[0]
    assert (np.abs(found - wanted) <= group_largest(wanted) / 127 * 0.5005).all()
    assert np.array_equal(found, native_values(form, in_features))


def test_8_bits_keep_weights_whose_scales_f16_holds_badly() -> None:
    """A thousandth of a usual weight: the scale has 3 or 4 bits left, and whoever ignores that is off by a tenth."""
    floats = random_floats(33, 576) / 1000
    found = values(packed_form([stored(floats)], "int8"), 576)[0]
    assert (np.abs(found - floats) <= group_largest(floats) / 127 * 0.5 + 2.0**-25).all()


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("in_features", [100, 48, 1])
def test_rows_that_are_no_whole_groups_take_8_bits_with_a_scale_a_row(in_features: int, quantize: str) -> None:
    floats = [random_floats(rows, in_features) for rows in (33, 16, 3)]
    form = packed_form([stored(part) for part in floats], quantize)
    assert form.format == "Q8_CHANNEL"
    for found, wanted in zip(values(form, in_features), floats, strict=True):
        assert (np.abs(found - wanted) <= np.abs(wanted).max(axis=1, keepdims=True) / 127 * 0.5005).all()
    alone = packed_form([stored(floats[0])], quantize)
    assert np.array_equal(native_values(alone, in_features), values(alone, in_features)[0])


@pytest.mark.parametrize("shape", ["normal", "heavy tails", "all of one sign", "two values", "constant", "zero"])
def test_4_bits_lose_less_than_the_range_cut_in_15(shape: str) -> None:
    random = np.random.default_rng(3)
    size = (64, 576)
    floats = {
        "normal": random.standard_normal(size),
        "heavy tails": random.standard_t(2, size),
        "all of one sign": np.abs(random.standard_normal(size)) + 3,
        "two values": random.integers(0, 2, size) * 2.0 - 0.75,
        "constant": np.full(size, 0.3),
        "zero": np.zeros(size),
    }[shape].astype(np.float32)
    form = packed_form([stored(floats)], "int4")
    assert form.format == "Q4_1"
    found = values(form, 576)[0]
    assert np.array_equal(found, native_values(form, 576))
    ours = float(((found - floats) ** 2).sum(dtype=np.float64))
    kind = gguf.GGMLQuantizationType.Q4_1
    theirs = float(((gguf.dequantize(gguf.quantize(floats, kind), kind) - floats) ** 2).sum(dtype=np.float64))
    spread = shape in ("normal", "heavy tails", "all of one sign")
    assert ours <= theirs * (0.88 if spread else 1)


def test_what_f16_scales_cannot_hold_takes_a_more_precise_form() -> None:
    floats = random_floats(17, 64)
    for factor, quantize, format in [
        (1e7, "int4", "Q8_0"),  # minima above 65504, while a 127th of the largest is below
        (1e9, "int4", "F32"),
        (1e9, "int8", "F32"),
        (1e-7, "int4", "F32"),
        (1e-7, "int8", "F32"),
    ]:
        scaled = floats * np.float32(factor)
        form = packed_form([stored(scaled)], quantize)
        assert form.format == format
        assert lost(values(form, 64)[0], scaled) < 1e-3
    half = np.full((3, 1), 60000, dtype=np.float16)  # as Q4_0 it is a number, and its minimum in Q4_1 is none
    weight = stored(floats[:3, :32], "Q4_0")
    weight.blocks[:, :2] = half.view(np.uint8)
    form = packed_form([weight, stored(floats[:, :32], "Q4_1")], "none")
    assert form.format == "Q8_0"
    assert np.array_equal(values(form, 32)[0], weight.dense().numpy())


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("in_features", [64, 100])
@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16"])
def test_floats_that_are_no_numbers_are_refused(
    quantization: str, in_features: int, value: float, quantize: str
) -> None:
    floats = random_floats(300, in_features)
    floats[299, 7] = value
    with pytest.raises(ValueError, match=rf"300 x {in_features}, stored as {quantization}, holds NaN or infinity"):
        packed_form([stored(random_floats(5, in_features), quantization), stored(floats, quantization)], quantize)


@pytest.mark.parametrize(
    ("quantization", "start"), [("Q4_0", 0), ("Q4_1", 0), ("Q4_1", 2), ("Q8_0", 0), ("Q5_0", 0), ("Q4_K", 2)]
)
def test_scales_that_are_no_numbers_are_refused(quantization: str, start: int) -> None:
    weight = stored(random_floats(5, 512), quantization)
    weight.blocks[4, start : start + 2] = np.float16([np.nan]).view(np.uint8)
    with (
        np.errstate(invalid="ignore"),
        pytest.raises(ValueError, match=f"5 x 512, stored as {quantization}, holds NaN"),
    ):
        packed_form([weight], "none")


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("in_features", [576, 100])
def test_a_row_becomes_the_same_however_many_others_there_are(in_features: int, quantize: str) -> None:
    """Weights are converted in chunks of rows by several threads."""
    floats = random_floats(2000, in_features)
    form = packed_form([stored(floats, "BF16")], quantize)
    parts = [packed_form([stored(floats[start : start + 100], "BF16")], quantize) for start in range(0, 2000, 100)]
    assert np.array_equal(form.blocks[0], np.concatenate([part.blocks[0] for part in parts]))
    scales = [part.channel_scales for part in parts if part.channel_scales is not None]
    assert form.channel_scales is None or np.array_equal(form.channel_scales, np.concatenate(scales))


def test_embedding_and_head_keep_8_bits_where_layers_take_4() -> None:
    operations = CpuOperations(num_threads=1, quantize="int4")
    floats = random_floats(160, 64)
    weight, ids = stored(floats), torch.arange(160)
    table = operations.pack_embedding(weight)
    half_a_step = group_largest(floats) / 127 * 0.5005
    assert (np.abs(operations.embedding(ids, table).numpy() - floats) <= half_a_step).all()
    assert operations.pack_head(weight).num_bytes == table.num_bytes == operations.tied_head(table).num_bytes
    assert operations.pack_linear([weight]).num_bytes < table.num_bytes
