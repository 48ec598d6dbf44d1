// What is done to one row at a time: normalise, rotate, gate, quantise.
#pragma once

#include <cmath>

#include "rows.h"
#include "simd.h"

namespace outrider {
namespace OUTRIDER_ISA {

// x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019, eq. 4); `to` may be `x`.
inline void rms_norm_row(const float* x, const float* weight, int n, float eps, float* to) {
    F32x16 squares = splat(0.0f);
    for (int i = 0; i < n; i += kLanes) {
        const F32x16 lanes = load_first(x + i, n - i);
        squares = fma(lanes, lanes, squares);
    }
    const F32x16 scale = splat(1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(n) + eps));
    for (int i = 0; i < n; i += kLanes) {
        const F32x16 scaled = mul(load_first(x + i, n - i), scale);
        store_first(to + i, mul(scaled, load_first(weight + i, n - i)), n - i);
    }
}

inline void add_row(const float* x, int n, float* to) {
    for (int i = 0; i < n; i += kLanes) {
        store_first(to + i, add(load_first(to + i, n - i), load_first(x + i, n - i)), n - i);
    }
}

// Rotates the halves of one head in place (Su et al. 2021, in GPT-NeoX's half-split layout). cos, sin: [half].
inline void rotate_head(float* head, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; i += kLanes) {
        const int n = half - i;
        const F32x16 a = load_first(head + i, n), b = load_first(head + half + i, n);
        const F32x16 c = load_first(cos + i, n), s = load_first(sin + i, n);
        store_first(head + i, sub(mul(a, c), mul(b, s)), n);
        store_first(head + half + i, add(mul(b, c), mul(a, s)), n);
    }
}

inline void silu_mul_row(const float* gate, const float* up, int n, float* to) {
    for (int i = 0; i < n; i += kLanes) {
        store_first(to + i, mul(silu(load_first(gate + i, n - i)), load_first(up + i, n - i)), n - i);
    }
}

// The 32 values in two vectors as int8 with one scale. NaN and infinity have no int8: they make the scale NaN, so that
// whatever is computed from the group shows them. Below 2^-100 the quotient would leave the range of floats; such a
// group counts as zero.
OUTRIDER_HOT void quantize_group(F32x16 first, F32x16 second, const QuantizedRows& rows, size_t index) {
    const float largest = largest_lane(maximum(absolute(first), absolute(second)));
    const F32x16 zero = splat(0.0f);
    const float poison = sum_lanes(fma(first, zero, mul(second, zero)));
    const float scale = (largest + poison) / 127.0f;
    const F32x16 inverse = splat(largest >= 7.8886090522101181e-31f ? 127.0f / largest : 0.0f);
    const F32x16 lowest = splat(-127.0f);  // also what NaN becomes
    const I32x16 first_ints = round_to_int(maximum(mul(first, inverse), lowest));
    const I32x16 second_ints = round_to_int(maximum(mul(second, inverse), lowest));
    int8_t* values = rows.values + index * kGroupSize;
    store_i8(values, first_ints);
    store_i8(values + kLanes, second_ints);
    const int32_t sum = sum_lanes(add(first_ints, second_ints));
    rows.scales[index] = scale;
    rows.value_sums[index] = sum;
    rows.scaled_sums[index] = scale * static_cast<float>(sum);
}

inline void quantize_row(const float* x, int n, int row, const QuantizedRows& rows) {
    for (int group = 0; group < rows.num_groups; ++group) {
        const int i = group * kGroupSize, left = n - i;
        const F32x16 second = left > kLanes ? load_first(x + i + kLanes, left - kLanes) : splat(0.0f);
        quantize_group(load_first(x + i, left), second, rows, quantized_index(rows, row, group));
    }
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
