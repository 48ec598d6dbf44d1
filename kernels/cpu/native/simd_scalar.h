// F32x16 and I32x16 as arrays: runs everywhere, and says what the other instruction sets must compute.
#pragma once

#include <cmath>

#include "float_formats.h"

namespace outrider {
namespace scalar {

constexpr const char* kIsaName = "scalar";

struct F32x16 {
    float v[16];
};
struct I32x16 {
    int32_t v[16];
};

template <typename Result, typename Function>
inline Result each_lane(Function function) {
    Result result;
    for (int i = 0; i < 16; ++i) result.v[i] = function(i);
    return result;
}

OUTRIDER_HOT F32x16 load(const float* from) {
    return each_lane<F32x16>([&](int i) { return from[i]; });
}
inline void store(float* to, F32x16 x) {
    for (int i = 0; i < 16; ++i) to[i] = x.v[i];
}
OUTRIDER_HOT F32x16 splat(float x) {
    return each_lane<F32x16>([&](int) { return x; });
}
OUTRIDER_HOT F32x16 add(F32x16 a, F32x16 b) {
    return each_lane<F32x16>([&](int i) { return a.v[i] + b.v[i]; });
}
OUTRIDER_HOT F32x16 sub(F32x16 a, F32x16 b) {
    return each_lane<F32x16>([&](int i) { return a.v[i] - b.v[i]; });
}
OUTRIDER_HOT F32x16 mul(F32x16 a, F32x16 b) {
    return each_lane<F32x16>([&](int i) { return a.v[i] * b.v[i]; });
}
OUTRIDER_HOT F32x16 div(F32x16 a, F32x16 b) {
    return each_lane<F32x16>([&](int i) { return a.v[i] / b.v[i]; });
}
OUTRIDER_HOT F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    return each_lane<F32x16>([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
OUTRIDER_HOT F32x16 maximum(F32x16 a, F32x16 b) {
    return each_lane<F32x16>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
OUTRIDER_HOT F32x16 minimum(F32x16 a, F32x16 b) {
    return each_lane<F32x16>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
OUTRIDER_HOT F32x16 absolute(F32x16 a) {
    return each_lane<F32x16>([&](int i) { return std::fabs(a.v[i]); });
}
OUTRIDER_HOT F32x16 select_less(F32x16 a, F32x16 b, F32x16 x, F32x16 y) {
    return each_lane<F32x16>([&](int i) { return a.v[i] < b.v[i] ? x.v[i] : y.v[i]; });
}
OUTRIDER_HOT F32x16 lane_numbers() {
    return each_lane<F32x16>([](int i) { return static_cast<float>(i); });
}

OUTRIDER_HOT F32x16 load_f16(const uint16_t* from) {
    return each_lane<F32x16>([&](int i) { return f16_to_f32(from[i]); });
}
inline void store_f16(uint16_t* to, F32x16 x) {
    for (int i = 0; i < 16; ++i) to[i] = f32_to_f16(x.v[i]);
}
OUTRIDER_HOT F32x16 load_bf16(const uint16_t* from) {
    return each_lane<F32x16>([&](int i) { return bf16_to_f32(from[i]); });
}
OUTRIDER_HOT F32x16 load_i8(const int8_t* from) {
    return each_lane<F32x16>([&](int i) { return static_cast<float>(from[i]); });
}

OUTRIDER_HOT I32x16 splat_int(int32_t x) {
    return each_lane<I32x16>([&](int) { return x; });
}
OUTRIDER_HOT I32x16 add(I32x16 a, I32x16 b) {
    return each_lane<I32x16>([&](int i) {
        return static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i]));
    });
}
OUTRIDER_HOT I32x16 shift_left_23(I32x16 a) {
    return each_lane<I32x16>([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << 23); });
}
OUTRIDER_HOT I32x16 as_int(F32x16 x) {
    return each_lane<I32x16>([&](int i) { return static_cast<int32_t>(to_bits(x.v[i])); });
}
OUTRIDER_HOT F32x16 as_float(I32x16 x) {
    return each_lane<F32x16>([&](int i) { return from_bits(static_cast<uint32_t>(x.v[i])); });
}
OUTRIDER_HOT F32x16 to_float(I32x16 x) {
    return each_lane<F32x16>([&](int i) { return static_cast<float>(x.v[i]); });
}
OUTRIDER_HOT I32x16 round_to_int(F32x16 x) {
    // What x86 gives for NaN and what does not fit; a plain cast of those would be undefined.
    return each_lane<I32x16>([&](int i) {
        const float rounded = std::nearbyint(x.v[i]);
        return rounded >= -2147483648.0f && rounded < 2147483648.0f ? static_cast<int32_t>(rounded) : INT32_MIN;
    });
}
inline void store_i8(int8_t* to, I32x16 x) {
    for (int i = 0; i < 16; ++i) to[i] = static_cast<int8_t>(x.v[i]);
}

inline float sum_lanes(F32x16 x) {
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) x.v[i] += x.v[i + half];
    }
    return x.v[0];
}
inline float largest_lane(F32x16 x) {
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
    }
    return x.v[0];
}
inline int32_t sum_lanes(I32x16 x) {
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) sum += x.v[i];
    return sum;
}

constexpr int kRowTile = 4;

template <int R>
OUTRIDER_HOT void dot_group_4bit(const uint8_t* weights, const int8_t* values, I32x16 (&sums)[R]) {
    for (int j = 0; j < 4; ++j) {
        for (int channel = 0; channel < 16; ++channel) {
            for (int k = 0; k < 4; ++k) {
                const uint8_t packed = weights[64 * j + 4 * channel + k];
                for (int r = 0; r < R; ++r) {
                    const int8_t* x = values + 32 * r + 4 * j + k;
                    sums[r].v[channel] += (packed & 0x0f) * x[0] + (packed >> 4) * x[16];
                }
            }
        }
    }
}

template <int R>
OUTRIDER_HOT void dot_group_8bit(const uint8_t* weights, const int8_t* values, const int32_t*, I32x16 (&sums)[R]) {
    for (int j = 0; j < 8; ++j) {
        for (int channel = 0; channel < 16; ++channel) {
            for (int k = 0; k < 4; ++k) {
                const int weight = weights[64 * j + 4 * channel + k] - 128;
                for (int r = 0; r < R; ++r) sums[r].v[channel] += weight * values[32 * r + 4 * j + k];
            }
        }
    }
}

}  // namespace scalar
}  // namespace outrider
