// F32x16 and I32x16 in two AVX2 registers each.
#pragma once

#include <immintrin.h>

#include "float_formats.h"

namespace outrider {
namespace avx2 {

constexpr const char* kIsaName = "avx2";

struct F32x16 {
    __m256 a, b;  // lanes 0..7 and 8..15
};
struct I32x16 {
    __m256i a, b;
};

OUTRIDER_HOT F32x16 load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, F32x16 x) {
    _mm256_storeu_ps(to, x.a);
    _mm256_storeu_ps(to + 8, x.b);
}
OUTRIDER_HOT F32x16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
OUTRIDER_HOT F32x16 add(F32x16 x, F32x16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
OUTRIDER_HOT F32x16 sub(F32x16 x, F32x16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
OUTRIDER_HOT F32x16 mul(F32x16 x, F32x16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
OUTRIDER_HOT F32x16 div(F32x16 x, F32x16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
OUTRIDER_HOT F32x16 fma(F32x16 x, F32x16 y, F32x16 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
OUTRIDER_HOT F32x16 maximum(F32x16 x, F32x16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
OUTRIDER_HOT F32x16 minimum(F32x16 x, F32x16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
OUTRIDER_HOT F32x16 absolute(F32x16 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
OUTRIDER_HOT F32x16 select_less(F32x16 a, F32x16 b, F32x16 x, F32x16 y) {
    return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}
OUTRIDER_HOT F32x16 lane_numbers() {
    return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15)};
}

OUTRIDER_HOT F32x16 load_f16(const uint16_t* from) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline void store_f16(uint16_t* to, F32x16 x) {
    __m128i* halves = reinterpret_cast<__m128i*>(to);
    _mm_storeu_si128(halves, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
OUTRIDER_HOT F32x16 load_bf16(const uint16_t* from) {
    const __m128i* stored = reinterpret_cast<const __m128i*>(from);
    const auto widen = [](__m128i eight) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16));
    };
    return {widen(_mm_loadu_si128(stored)), widen(_mm_loadu_si128(stored + 1))};
}
OUTRIDER_HOT F32x16 load_i8(const int8_t* from) {
    const auto widen = [](const int8_t* eight) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(eight))));
    };
    return {widen(from), widen(from + 8)};
}

OUTRIDER_HOT I32x16 splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
OUTRIDER_HOT I32x16 add(I32x16 x, I32x16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
OUTRIDER_HOT I32x16 shift_left_23(I32x16 x) { return {_mm256_slli_epi32(x.a, 23), _mm256_slli_epi32(x.b, 23)}; }
OUTRIDER_HOT I32x16 as_int(F32x16 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
OUTRIDER_HOT F32x16 as_float(I32x16 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
OUTRIDER_HOT F32x16 to_float(I32x16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
OUTRIDER_HOT I32x16 round_to_int(F32x16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline void store_i8(int8_t* to, I32x16 x) {
    const __m256i words = _mm256_packs_epi32(x.a, x.b);  // lanes 0-3, 8-11, 4-7, 12-15
    const __m256i ordered = _mm256_permute4x64_epi64(words, _MM_SHUFFLE(3, 1, 2, 0));
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}

inline float sum_lanes(F32x16 x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest_lane(F32x16 x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline int32_t sum_lanes(I32x16 x) {
    const __m256i eight = _mm256_add_epi32(x.a, x.b);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1))));
}

inline __m256i splat_4_bytes(const int8_t* from) {
    int32_t four;
    __builtin_memcpy(&four, from, sizeof four);
    return _mm256_set1_epi32(four);
}

constexpr int kRowTile = 4;

// A weight of 0..15 times values of -127..127: two products fit an int16 lane, and so do eight such pairs
// (8 * 2 * 15 * 127 = 30,480). So a whole group is added in int16, 16 products an instruction, before it is widened.
template <int R>
OUTRIDER_HOT void dot_group_4bit(const uint8_t* weights, const int8_t* values, I32x16 (&sums)[R]) {
    const __m256i low_nibbles = _mm256_set1_epi8(0x0f), ones = _mm256_set1_epi16(1);
    __m256i first[R], second[R];  // channels 0..7 and 8..15
    for (int r = 0; r < R; ++r) first[r] = second[r] = _mm256_setzero_si256();
    for (int j = 0; j < 4; ++j) {
        const __m256i* packed = reinterpret_cast<const __m256i*>(weights + 64 * j);
        const __m256i a = _mm256_loadu_si256(packed), b = _mm256_loadu_si256(packed + 1);
        const __m256i low_a = _mm256_and_si256(a, low_nibbles), low_b = _mm256_and_si256(b, low_nibbles);
        const __m256i high_a = _mm256_and_si256(_mm256_srli_epi16(a, 4), low_nibbles);
        const __m256i high_b = _mm256_and_si256(_mm256_srli_epi16(b, 4), low_nibbles);
        for (int r = 0; r < R; ++r) {
            const int8_t* x = values + 32 * r + 4 * j;
            const __m256i x_low = splat_4_bytes(x), x_high = splat_4_bytes(x + 16);
            first[r] = _mm256_add_epi16(first[r], _mm256_maddubs_epi16(low_a, x_low));
            second[r] = _mm256_add_epi16(second[r], _mm256_maddubs_epi16(low_b, x_low));
            first[r] = _mm256_add_epi16(first[r], _mm256_maddubs_epi16(high_a, x_high));
            second[r] = _mm256_add_epi16(second[r], _mm256_maddubs_epi16(high_b, x_high));
        }
    }
    for (int r = 0; r < R; ++r) {
        sums[r].a = _mm256_add_epi32(sums[r].a, _mm256_madd_epi16(first[r], ones));
        sums[r].b = _mm256_add_epi32(sums[r].b, _mm256_madd_epi16(second[r], ones));
    }
}

// An unsigned byte times a signed one would overflow int16, so a byte is taken as two nibbles.
template <int R>
OUTRIDER_HOT void dot_group_8bit(const uint8_t* weights, const int8_t* values, const int32_t* value_sums,
                           I32x16 (&sums)[R]) {
    const __m256i low_nibbles = _mm256_set1_epi8(0x0f), ones = _mm256_set1_epi16(1);
    for (int half = 0; half < 2; ++half) {  // channels 0..7, then 8..15
        __m256i low[R], high[R];
        for (int r = 0; r < R; ++r) low[r] = high[r] = _mm256_setzero_si256();
        for (int j = 0; j < 8; ++j) {
            const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 64 * j + 32 * half));
            const __m256i low_weights = _mm256_and_si256(bytes, low_nibbles);
            const __m256i high_weights = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low_nibbles);
            for (int r = 0; r < R; ++r) {
                const __m256i x = splat_4_bytes(values + 32 * r + 4 * j);
                low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(low_weights, x));
                high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(high_weights, x));
            }
        }
        for (int r = 0; r < R; ++r) {
            const __m256i ones_part = _mm256_madd_epi16(low[r], ones);
            const __m256i sixteens_part = _mm256_slli_epi32(_mm256_madd_epi16(high[r], ones), 4);
            __m256i& sum = half == 0 ? sums[r].a : sums[r].b;
            sum = _mm256_add_epi32(sum, _mm256_add_epi32(ones_part, sixteens_part));
        }
    }
    for (int r = 0; r < R; ++r) sums[r] = add(sums[r], splat_int(-128 * value_sums[r]));
}

}  // namespace avx2
}  // namespace outrider
