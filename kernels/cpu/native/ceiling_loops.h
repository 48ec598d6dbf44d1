// One instruction set's loops for ceilings.h: reading alone, and multiplying alone, with all operands in registers.
#pragma once

#include <cstring>

#include "ceilings.h"
#include "simd.h"

namespace outrider {
namespace OUTRIDER_ISA {

// The compiler neither knows what lies there nor that nobody will read it.
OUTRIDER_HOT void forget(void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

// What multiplies the most pairs of int8 at once, added up as far as that goes without widening, and as many sums of
// them as keep it busy. `changed` keeps products from being computed once for all steps, where they are not one
// instruction with the sum.
#if defined(OUTRIDER_ISA_AVX512)
using Int8Dots = __m512i;
constexpr int kInt8Sums = 12;
OUTRIDER_HOT Int8Dots load_dots(const int8_t* from) { return _mm512_loadu_si512(from); }
OUTRIDER_HOT void store_dots(int8_t* to, Int8Dots x) { _mm512_storeu_si512(to, x); }
OUTRIDER_HOT Int8Dots add_dots(Int8Dots sums, Int8Dots x, Int8Dots y) { return _mm512_dpbusd_epi32(sums, x, y); }
OUTRIDER_HOT Int8Dots changed(Int8Dots x, Int8Dots) { return x; }
#elif defined(OUTRIDER_ISA_AVX2)
using Int8Dots = __m256i;
constexpr int kInt8Sums = 6;
OUTRIDER_HOT Int8Dots load_dots(const int8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
OUTRIDER_HOT void store_dots(int8_t* to, Int8Dots x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }
OUTRIDER_HOT Int8Dots add_dots(Int8Dots sums, Int8Dots x, Int8Dots y) {
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(x, y));
}
OUTRIDER_HOT Int8Dots changed(Int8Dots x, Int8Dots by) { return _mm256_xor_si256(x, by); }
#elif defined(OUTRIDER_ISA_NEON)
using Int8Dots = int32x4_t;
constexpr int kInt8Sums = 12;
OUTRIDER_HOT Int8Dots load_dots(const int8_t* from) { return vreinterpretq_s32_s8(vld1q_s8(from)); }
OUTRIDER_HOT void store_dots(int8_t* to, Int8Dots x) { vst1q_s8(to, vreinterpretq_s8_s32(x)); }
OUTRIDER_HOT Int8Dots add_dots(Int8Dots sums, Int8Dots x, Int8Dots y) {
    return vdotq_s32(sums, vreinterpretq_s8_s32(x), vreinterpretq_s8_s32(y));
}
OUTRIDER_HOT Int8Dots changed(Int8Dots x, Int8Dots) { return x; }
#else
struct Int8Dots {
    int16_t v[16];
};
constexpr int kInt8Sums = 4;
OUTRIDER_HOT Int8Dots load_dots(const int8_t* from) {
    Int8Dots dots;
    std::memcpy(&dots, from, sizeof dots);
    return dots;
}
OUTRIDER_HOT void store_dots(int8_t* to, Int8Dots x) { std::memcpy(to, &x, sizeof x); }
OUTRIDER_HOT Int8Dots add_dots(Int8Dots sums, Int8Dots x, Int8Dots y) {
    for (int i = 0; i < 16; ++i) sums.v[i] = static_cast<int16_t>(sums.v[i] + x.v[i] * y.v[i]);
    return sums;
}
OUTRIDER_HOT Int8Dots changed(Int8Dots x, Int8Dots by) {
    for (int i = 0; i < 16; ++i) x.v[i] = static_cast<int16_t>(x.v[i] ^ by.v[i]);
    return x;
}
#endif
#if defined(OUTRIDER_ISA_SCALAR)
constexpr int kInt8Products = 16;
#else
constexpr int kInt8Products = sizeof(Int8Dots);
#endif

// N sums side by side. Not an array: the compiler would take each through memory at every step.
template <int N>
struct Int8Sums {
    OUTRIDER_HOT void load(const int8_t* from) {
        sums = load_dots(from);
        y = load_dots(from + sizeof(Int8Dots));
        others.load(from + 2 * sizeof(Int8Dots));
    }
    OUTRIDER_HOT void add(Int8Dots x) {
        sums = add_dots(sums, x, y);
        others.add(x);
    }
    OUTRIDER_HOT void store(int8_t* to) {
        store_dots(to, sums);
        others.store(to + sizeof(Int8Dots));
    }
    Int8Dots sums, y;
    Int8Sums<N - 1> others;
};
template <>
struct Int8Sums<0> {
    OUTRIDER_HOT void load(const int8_t*) {}
    OUTRIDER_HOT void add(Int8Dots) {}
    OUTRIDER_HOT void store(int8_t*) {}
};

inline int64_t multiply_int8_loop(int64_t num_steps) {
    int8_t memory[(2 * kInt8Sums + 1) * sizeof(Int8Dots)] = {};
    forget(memory);
    Int8Sums<kInt8Sums> sums;
    sums.load(memory + sizeof(Int8Dots));
    Int8Dots x = load_dots(memory);
    for (int64_t step = 0; step < num_steps; ++step) {
        sums.add(x);
        x = changed(x, sums.y);
    }
    sums.store(memory);
    forget(memory);
    return num_steps * kInt8Sums * kInt8Products;
}

#if defined(OUTRIDER_ISA_AVX512)
constexpr int kFloatSums = 12;
#elif defined(OUTRIDER_ISA_SCALAR)
constexpr int kFloatSums = 1;
#else
constexpr int kFloatSums = 5;  // an F32x16 takes several registers
#endif

inline int64_t multiply_f32_loop(int64_t num_steps) {
    float memory[kFloatSums][kLanes] = {};
    forget(memory);
    F32x16 sums[kFloatSums];
    for (int i = 0; i < kFloatSums; ++i) sums[i] = load(memory[i]);
    const F32x16 x = splat(0.5f), y = splat(1.0f);
    for (int64_t step = 0; step < num_steps; ++step) {
        for (int i = 0; i < kFloatSums; ++i) sums[i] = fma(sums[i], x, y);
    }
    for (int i = 0; i < kFloatSums; ++i) store(memory[i], sums[i]);
    forget(memory);
    return num_steps * kFloatSums * kLanes;
}

// Asks for memory ahead of its use, as the kernels do.
inline void read_loop(const uint8_t* from, size_t num_bytes) {
    constexpr size_t kAhead = 4096;
    const float* floats = reinterpret_cast<const float*>(from);
    F32x16 sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    for (size_t i = 0; i < num_bytes / sizeof(float); i += 4 * kLanes) {
        for (int j = 0; j < 4; ++j) {
            __builtin_prefetch(reinterpret_cast<const uint8_t*>(floats + i + j * kLanes) + kAhead, 0, 2);
            sums[j] = add(sums[j], load(floats + i + j * kLanes));
        }
    }
    float lanes[kLanes];
    store(lanes, add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    forget(lanes);
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
