// Rows times panels: the one loop that reads the model.
//
// A row and a channel are always added up the same way: within a group in integers, exactly; then the groups in
// ascending order, each by one fused multiply-add (Q4_1: two). How many rows share the panel, which thread
// computes it and how wide the registers are changes nothing.
#pragma once

#include "row_kernels.h"
#include "rows.h"
#include "simd.h"

namespace outrider {
namespace OUTRIDER_ISA {

// How far ahead of its use a weight is asked for, into the second-level cache. Panels lie end to end, so the next
// panel's come in time as well. The hardware's own prefetchers give up where one stream of a panel ends.
constexpr size_t kPrefetchBytes = 8192;

// sums[r] += the panel's 16 channels for R quantised rows. `index` is that of (first row, group 0).
template <WeightFormat F, int R>
OUTRIDER_HOT void multiply_quantized(const Panels& linear, const uint8_t* panel, const QuantizedRows& rows,
                               size_t index, F32x16 (&sums)[R]) {
    constexpr bool k4Bit = F == WeightFormat::Q4_0 || F == WeightFormat::Q4_1;
    constexpr size_t kQuants = (k4Bit ? kGroupSize / 2 : kGroupSize) * kPanelChannels;
    constexpr size_t kScales = F == WeightFormat::Q4_1 ? 32 : F == WeightFormat::Q8_CHANNEL ? 0 : 16;
    const int8_t* values = rows.values + index * kGroupSize;
    const float* scales = rows.scales + index;
    const float* scaled_sums = rows.scaled_sums + index;
    const int32_t* value_sums = rows.value_sums + index;
    const uint8_t* quants = panel;
    const uint8_t* ahead = panel + kPrefetchBytes;
    constexpr size_t kGroupBytes = kQuants + kScales * sizeof(uint16_t);
    const uint8_t* weight_scales = panel + linear.quants_bytes;
    for (int group = 0; group < linear.num_groups; ++group) {
        for (size_t line = 0; line < kGroupBytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
        ahead += kGroupBytes;
        I32x16 dots[R];
        for (int r = 0; r < R; ++r) dots[r] = splat_int(F == WeightFormat::Q4_0 ? -8 * value_sums[r] : 0);
        if constexpr (k4Bit) {
            dot_group_4bit<R>(quants, values, dots);
        } else {
            dot_group_8bit<R>(quants, values, value_sums, dots);
        }
        if constexpr (F == WeightFormat::Q8_CHANNEL) {
            for (int r = 0; r < R; ++r) sums[r] = fma(to_float(dots[r]), splat(scales[r]), sums[r]);
        } else {
            const uint16_t* halves = reinterpret_cast<const uint16_t*>(weight_scales);
            const F32x16 weight_scale = load_f16(halves);
            for (int r = 0; r < R; ++r) {
                sums[r] = fma(to_float(dots[r]), mul(weight_scale, splat(scales[r])), sums[r]);
            }
            if constexpr (F == WeightFormat::Q4_1) {
                const F32x16 minimum_of_weights = load_f16(halves + kLanes);
                for (int r = 0; r < R; ++r) sums[r] = fma(minimum_of_weights, splat(scaled_sums[r]), sums[r]);
            }
        }
        quants += kQuants;
        weight_scales += kScales * sizeof(uint16_t);
        values += R * kGroupSize;
        scales += R;
        scaled_sums += R;
        value_sums += R;
    }
    if constexpr (F == WeightFormat::Q8_CHANNEL) {
        const F32x16 channel_scales = load(reinterpret_cast<const float*>(panel + linear.quants_bytes));
        for (int r = 0; r < R; ++r) sums[r] = mul(sums[r], channel_scales);
    }
}

// The same for float rows, one fused multiply-add for each input in ascending order.
template <WeightFormat F, int R>
OUTRIDER_HOT void multiply_floats(const Panels& linear, const uint8_t* panel, const float* x, int stride,
                            F32x16 (&sums)[R]) {
    for (int k = 0; k < linear.in_features; ++k) {
        F32x16 weights;
        if constexpr (F == WeightFormat::BF16) {
            weights = load_bf16(reinterpret_cast<const uint16_t*>(panel) + static_cast<size_t>(k) * kLanes);
        } else {
            weights = load(reinterpret_cast<const float*>(panel) + static_cast<size_t>(k) * kLanes);
        }
        for (int r = 0; r < R; ++r) sums[r] = fma(weights, splat(x[static_cast<size_t>(r) * stride + k]), sums[r]);
    }
}

template <WeightFormat F, int R>
OUTRIDER_HOT void multiply_rows(const Panels& linear, int panel, const LinearInput& input, int tile, float* to) {
    F32x16 sums[R];
    for (int r = 0; r < R; ++r) sums[r] = splat(0.0f);
    if constexpr (is_quantized(F)) {
        const size_t index = static_cast<size_t>(tile) * kRowTile * input.quantized.num_groups;
        multiply_quantized<F, R>(linear, panel_data(linear, panel), input.quantized, index, sums);
    } else {
        const float* x = input.floats + static_cast<size_t>(tile) * kRowTile * input.stride;
        multiply_floats<F, R>(linear, panel_data(linear, panel), x, input.stride, sums);
    }
    if (linear.bias != nullptr) {
        const F32x16 bias = load(linear.bias + static_cast<size_t>(panel) * kLanes);
        for (int r = 0; r < R; ++r) sums[r] = add(sums[r], bias);
    }
    for (int r = 0; r < R; ++r) store(to + r * kLanes, sums[r]);
}

template <WeightFormat F, int R = kRowTile>
OUTRIDER_HOT void multiply_format(const Panels& linear, int panel, const LinearInput& input, int tile, int num_rows,
                            float* to) {
    if (num_rows == R) return multiply_rows<F, R>(linear, panel, input, tile, to);
    if constexpr (R > 1) multiply_format<F, R - 1>(linear, panel, input, tile, num_rows, to);
}

// One panel for one tile of rows: `to` [num_rows][16], bias added.
inline void multiply_tile(const Panels& linear, int panel, const LinearInput& input, int tile, int num_rows,
                          float* to) {
    switch (linear.format) {
        case WeightFormat::Q4_0:
            return multiply_format<WeightFormat::Q4_0>(linear, panel, input, tile, num_rows, to);
        case WeightFormat::Q4_1:
            return multiply_format<WeightFormat::Q4_1>(linear, panel, input, tile, num_rows, to);
        case WeightFormat::Q8_0:
            return multiply_format<WeightFormat::Q8_0>(linear, panel, input, tile, num_rows, to);
        case WeightFormat::Q8_CHANNEL:
            return multiply_format<WeightFormat::Q8_CHANNEL>(linear, panel, input, tile, num_rows, to);
        case WeightFormat::BF16:
            return multiply_format<WeightFormat::BF16>(linear, panel, input, tile, num_rows, to);
        case WeightFormat::F32:
            return multiply_format<WeightFormat::F32>(linear, panel, input, tile, num_rows, to);
    }
}

// Columns of panels begin..end-1 for tiles first_tile..last_tile-1: to[row][column] = or += the result.
inline void linear_panels(const Panels& linear, const LinearInput& input, int begin, int end, int first_tile,
                          int last_tile, bool accumulate, float* to, int to_stride) {
    float result[kRowTile * kLanes];
    for (int panel = begin; panel < end; ++panel) {
        const int column = linear.first_columns[panel], num_columns = linear.num_columns[panel];
        for (int tile = first_tile; tile < last_tile; ++tile) {
            const int num_rows = rows_of_tile(input.num_rows, kRowTile, tile);
            multiply_tile(linear, panel, input, tile, num_rows, result);
            float* row = to + static_cast<size_t>(tile) * kRowTile * to_stride + column;
            for (int r = 0; r < num_rows; ++r, row += to_stride) {
                F32x16 sums = load(result + r * kLanes);
                if (accumulate) sums = add(load_first(row, num_columns), sums);
                store_first(row, sums, num_columns);
            }
        }
    }
}

// Units begin..end-1, of 32 channels each, of silu(gate) * up, where `gate_up` stacks two weights of
// `intermediate` rows. Goes straight into the form the next layer reads: quantised, or else floats [row][stride].
inline void swiglu_units(const Panels& gate_up, const LinearInput& input, int intermediate, int begin, int end,
                         int first_tile, int last_tile, const QuantizedRows* quantized, float* floats, int stride) {
    const int half = gate_up.num_panels / 2;
    float gate[kRowTile * kLanes], up[kRowTile * kLanes];
    float hidden[kRowTile * kGroupSize];
    for (int unit = begin; unit < end; ++unit) {
        const int column = unit * kGroupSize, left = intermediate - column;
        const int num_columns = left < kGroupSize ? left : kGroupSize;
        for (int tile = first_tile; tile < last_tile; ++tile) {
            const int num_rows = rows_of_tile(input.num_rows, kRowTile, tile);
            for (int side = 0; side < 2; ++side) {
                const int panel = 2 * unit + side;
                if (panel < half) {  // channels a panel lacks are zero weights, and silu(0) * 0 is 0
                    multiply_tile(gate_up, panel, input, tile, num_rows, gate);
                    multiply_tile(gate_up, half + panel, input, tile, num_rows, up);
                }
                for (int r = 0; r < num_rows; ++r) {
                    const F32x16 product = mul(silu(load(gate + r * kLanes)), load(up + r * kLanes));
                    store(hidden + r * kGroupSize + side * kLanes, panel < half ? product : splat(0.0f));
                }
            }
            for (int r = 0; r < num_rows; ++r) {
                const float* values = hidden + r * kGroupSize;
                const int row = tile * kRowTile + r;
                if (quantized != nullptr) {
                    quantize_group(load(values), load(values + kLanes), *quantized, quantized_index(*quantized, row, unit));
                } else {
                    for (int i = 0; i < num_columns; i += kLanes) {
                        store_first(floats + static_cast<size_t>(row) * stride + column + i, load(values + i),
                                    num_columns - i);
                    }
                }
            }
        }
    }
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
