// Half precision and bfloat16 in plain integer arithmetic: for packing, and for tails.
#pragma once

#include <cstdint>
#include <cstring>

// Inlined always: where such a call stays a call, what it keeps in registers goes through memory.
#define OUTRIDER_HOT inline __attribute__((always_inline))

namespace outrider {

static inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float f16_to_f32(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 0x1fu, mantissa = half & 0x3ffu;
    if (exponent == 0x1fu) return from_bits(sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24
        const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-08f;
        return sign ? -magnitude : magnitude;
    }
    return from_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// Rounds to nearest, ties to even, as the hardware does.
static inline uint16_t f32_to_f16(float value) {
    const uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more: infinity
    if (magnitude < 0x38800000u) {  // below 2^-14: counted in steps of 2^-24
        const float steps = from_bits(magnitude) * 16777216.0f + 12582912.0f;  // the addition rounds
        return static_cast<uint16_t>(sign | (to_bits(steps) & 0x7ffu));
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

static inline float bf16_to_f32(uint16_t stored) { return from_bits(static_cast<uint32_t>(stored) << 16); }

}  // namespace outrider
