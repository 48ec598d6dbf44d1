// F32x16 and I32x16 in one AVX-512 register each.
#pragma once

#include <immintrin.h>

#include "float_formats.h"

namespace outrider {
namespace avx512 {

constexpr const char* kIsaName = "avx512";

struct F32x16 {
    __m512 v;
};
struct I32x16 {
    __m512i v;
};

OUTRIDER_HOT F32x16 load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline void store(float* to, F32x16 x) { _mm512_storeu_ps(to, x.v); }
OUTRIDER_HOT F32x16 splat(float x) { return {_mm512_set1_ps(x)}; }
OUTRIDER_HOT F32x16 add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
OUTRIDER_HOT F32x16 sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
OUTRIDER_HOT F32x16 mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
OUTRIDER_HOT F32x16 div(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
OUTRIDER_HOT F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// If either is NaN: the second. So `maximum(x, running)` forgets a NaN and `maximum(running, x)` takes it.
OUTRIDER_HOT F32x16 maximum(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
OUTRIDER_HOT F32x16 minimum(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
OUTRIDER_HOT F32x16 absolute(F32x16 a) { return {_mm512_abs_ps(a.v)}; }
// Lane by lane: a < b ? x : y (NaN compares false).
OUTRIDER_HOT F32x16 select_less(F32x16 a, F32x16 b, F32x16 x, F32x16 y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
OUTRIDER_HOT F32x16 lane_numbers() {
    return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}

OUTRIDER_HOT F32x16 load_f16(const uint16_t* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
inline void store_f16(uint16_t* to, F32x16 x) {
    const __m256i halves = _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}
OUTRIDER_HOT F32x16 load_bf16(const uint16_t* from) {
    const __m256i stored = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(stored), 16))};
}
OUTRIDER_HOT F32x16 load_i8(const int8_t* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}

OUTRIDER_HOT I32x16 splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
OUTRIDER_HOT I32x16 add(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
OUTRIDER_HOT I32x16 shift_left_23(I32x16 a) { return {_mm512_slli_epi32(a.v, 23)}; }
OUTRIDER_HOT I32x16 as_int(F32x16 x) { return {_mm512_castps_si512(x.v)}; }
OUTRIDER_HOT F32x16 as_float(I32x16 x) { return {_mm512_castsi512_ps(x.v)}; }
OUTRIDER_HOT F32x16 to_float(I32x16 x) { return {_mm512_cvtepi32_ps(x.v)}; }
OUTRIDER_HOT I32x16 round_to_int(F32x16 x) { return {_mm512_cvtps_epi32(x.v)}; }  // to nearest, ties to even
// The low bytes; every lane must fit into int8.
inline void store_i8(int8_t* to, I32x16 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x.v));
}

// Lane i with lane i + 8, then i + 4, i + 2, i + 1: every instruction set adds in this order.
inline float sum_lanes(F32x16 x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest_lane(F32x16 x) { return _mm512_reduce_max_ps(x.v); }
inline int32_t sum_lanes(I32x16 x) { return _mm512_reduce_add_epi32(x.v); }

// The four bytes at `from` in every 32-bit lane.
inline __m512i splat_4_bytes(const int8_t* from) {
    int32_t four;
    __builtin_memcpy(&four, from, sizeof four);
    return _mm512_set1_epi32(four);
}

constexpr int kRowTile = 8;

// One group of 32 inputs of 16 output channels, for R rows: sums[r][channel] += sum of weight * value, exactly.
// `weights`: 4 chunks of 64 bytes; chunk j holds inputs 4j..4j+3 of the 16 channels in its low nibbles and inputs
// 16+4j..16+4j+3 in its high ones. `values`: [R][32] in -127..127.
template <int R>
OUTRIDER_HOT void dot_group_4bit(const uint8_t* weights, const int8_t* values, I32x16 (&sums)[R]) {
    const __m512i low_nibbles = _mm512_set1_epi8(0x0f);
    for (int j = 0; j < 4; ++j) {
        const __m512i packed = _mm512_loadu_si512(weights + 64 * j);
        const __m512i low = _mm512_and_si512(packed, low_nibbles);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(packed, 4), low_nibbles);
        for (int r = 0; r < R; ++r) {
            const int8_t* x = values + 32 * r + 4 * j;
            sums[r].v = _mm512_dpbusd_epi32(sums[r].v, low, splat_4_bytes(x));
            sums[r].v = _mm512_dpbusd_epi32(sums[r].v, high, splat_4_bytes(x + 16));
        }
    }
}

// The same with 8-bit weights stored as weight + 128: sums[r] += sum of weight * value.
// `weights`: 8 chunks of 64 bytes, chunk j inputs 4j..4j+3 of the 16 channels. `value_sums`: of each row's 32 values.
template <int R>
OUTRIDER_HOT void dot_group_8bit(const uint8_t* weights, const int8_t* values, const int32_t* value_sums,
                           I32x16 (&sums)[R]) {
    for (int r = 0; r < R; ++r) sums[r] = add(sums[r], splat_int(-128 * value_sums[r]));
    for (int j = 0; j < 8; ++j) {
        const __m512i chunk = _mm512_loadu_si512(weights + 64 * j);
        for (int r = 0; r < R; ++r) {
            sums[r].v = _mm512_dpbusd_epi32(sums[r].v, chunk, splat_4_bytes(values + 32 * r + 4 * j));
        }
    }
}

}  // namespace avx512
}  // namespace outrider
