// F32x16 and I32x16 in four NEON registers each; needs the dot-product extension (ARMv8.2).
#pragma once

#include <arm_neon.h>

#include <cstring>

#include "float_formats.h"

namespace outrider {
namespace neon {

constexpr const char* kIsaName = "neon";

struct F32x16 {
    float32x4_t v[4];
};
struct I32x16 {
    int32x4_t v[4];
};

template <typename Result, typename Function>
OUTRIDER_HOT Result each_quarter(Function function) {
    return {{function(0), function(1), function(2), function(3)}};
}

OUTRIDER_HOT F32x16 load(const float* from) {
    return each_quarter<F32x16>([&](int i) { return vld1q_f32(from + 4 * i); });
}
inline void store(float* to, F32x16 x) {
    for (int i = 0; i < 4; ++i) vst1q_f32(to + 4 * i, x.v[i]);
}
OUTRIDER_HOT F32x16 splat(float x) {
    return each_quarter<F32x16>([&](int) { return vdupq_n_f32(x); });
}
OUTRIDER_HOT F32x16 add(F32x16 a, F32x16 b) {
    return each_quarter<F32x16>([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
OUTRIDER_HOT F32x16 sub(F32x16 a, F32x16 b) {
    return each_quarter<F32x16>([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
OUTRIDER_HOT F32x16 mul(F32x16 a, F32x16 b) {
    return each_quarter<F32x16>([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
OUTRIDER_HOT F32x16 div(F32x16 a, F32x16 b) {
    return each_quarter<F32x16>([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
OUTRIDER_HOT F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    return each_quarter<F32x16>([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
// If either is NaN: the second, as on x86; vmaxq_f32 would give NaN.
OUTRIDER_HOT F32x16 maximum(F32x16 a, F32x16 b) {
    return each_quarter<F32x16>([&](int i) { return vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
OUTRIDER_HOT F32x16 minimum(F32x16 a, F32x16 b) {
    return each_quarter<F32x16>([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
OUTRIDER_HOT F32x16 absolute(F32x16 a) {
    return each_quarter<F32x16>([&](int i) { return vabsq_f32(a.v[i]); });
}
OUTRIDER_HOT F32x16 select_less(F32x16 a, F32x16 b, F32x16 x, F32x16 y) {
    return each_quarter<F32x16>([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), x.v[i], y.v[i]); });
}
OUTRIDER_HOT F32x16 lane_numbers() {
    const float numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(numbers);
}

OUTRIDER_HOT F32x16 load_f16(const uint16_t* from) {
    return each_quarter<F32x16>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + 4 * i))); });
}
inline void store_f16(uint16_t* to, F32x16 x) {
    for (int i = 0; i < 4; ++i) vst1_u16(to + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.v[i])));
}
OUTRIDER_HOT F32x16 load_bf16(const uint16_t* from) {
    return each_quarter<F32x16>([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from + 4 * i), 16)); });
}
OUTRIDER_HOT F32x16 load_i8(const int8_t* from) {
    const int8x16_t bytes = vld1q_s8(from);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}

OUTRIDER_HOT I32x16 splat_int(int32_t x) {
    return each_quarter<I32x16>([&](int) { return vdupq_n_s32(x); });
}
OUTRIDER_HOT I32x16 add(I32x16 a, I32x16 b) {
    return each_quarter<I32x16>([&](int i) { return vaddq_s32(a.v[i], b.v[i]); });
}
OUTRIDER_HOT I32x16 shift_left_23(I32x16 a) {
    return each_quarter<I32x16>([&](int i) { return vshlq_n_s32(a.v[i], 23); });
}
OUTRIDER_HOT I32x16 as_int(F32x16 x) {
    return each_quarter<I32x16>([&](int i) { return vreinterpretq_s32_f32(x.v[i]); });
}
OUTRIDER_HOT F32x16 as_float(I32x16 x) {
    return each_quarter<F32x16>([&](int i) { return vreinterpretq_f32_s32(x.v[i]); });
}
OUTRIDER_HOT F32x16 to_float(I32x16 x) {
    return each_quarter<F32x16>([&](int i) { return vcvtq_f32_s32(x.v[i]); });
}
OUTRIDER_HOT I32x16 round_to_int(F32x16 x) {
    return each_quarter<I32x16>([&](int i) { return vcvtnq_s32_f32(x.v[i]); });
}
inline void store_i8(int8_t* to, I32x16 x) {
    const int16x8_t low = vcombine_s16(vmovn_s32(x.v[0]), vmovn_s32(x.v[1]));
    const int16x8_t high = vcombine_s16(vmovn_s32(x.v[2]), vmovn_s32(x.v[3]));
    vst1q_s8(to, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

inline float sum_lanes(F32x16 x) {
    const float32x4_t four = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float largest_lane(F32x16 x) {
    float lanes[16];
    store(lanes, x);
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    }
    return lanes[0];
}
inline int32_t sum_lanes(I32x16 x) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[2]), vaddq_s32(x.v[1], x.v[3])));
}

OUTRIDER_HOT int8x16_t splat_4_bytes(const int8_t* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

constexpr int kRowTile = 4;

template <int R>
OUTRIDER_HOT void dot_group_4bit(const uint8_t* weights, const int8_t* values, I32x16 (&sums)[R]) {
    const uint8x16_t low_nibbles = vdupq_n_u8(0x0f);
    for (int j = 0; j < 4; ++j) {
        for (int i = 0; i < 4; ++i) {
            const uint8x16_t packed = vld1q_u8(weights + 64 * j + 16 * i);
            const int8x16_t low = vreinterpretq_s8_u8(vandq_u8(packed, low_nibbles));
            const int8x16_t high = vreinterpretq_s8_u8(vshrq_n_u8(packed, 4));
            for (int r = 0; r < R; ++r) {
                const int8_t* x = values + 32 * r + 4 * j;
                sums[r].v[i] = vdotq_s32(sums[r].v[i], low, splat_4_bytes(x));
                sums[r].v[i] = vdotq_s32(sums[r].v[i], high, splat_4_bytes(x + 16));
            }
        }
    }
}

// Weights are stored plus 128; here bytes are signed, so that is taken off again and the sums are not needed.
template <int R>
OUTRIDER_HOT void dot_group_8bit(const uint8_t* weights, const int8_t* values, const int32_t*, I32x16 (&sums)[R]) {
    const uint8x16_t offset = vdupq_n_u8(0x80);
    for (int j = 0; j < 8; ++j) {
        for (int i = 0; i < 4; ++i) {
            const int8x16_t chunk = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(weights + 64 * j + 16 * i), offset));
            for (int r = 0; r < R; ++r) {
                sums[r].v[i] = vdotq_s32(sums[r].v[i], chunk, splat_4_bytes(values + 32 * r + 4 * j));
            }
        }
    }
}

}  // namespace neon
}  // namespace outrider
