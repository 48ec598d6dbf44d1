// The inner loops of attention: a few query rows against one block of keys and values.
//
// A row's score is one chain of fused multiply-adds over head_dim, its output one chain over the keys that it sees,
// both ascending. Keys that it must not see are not multiplied by zero but left out, whoever stands beside the row:
// so neither a tile's shape nor a NaN in another's key changes a bit.
#pragma once

#include "attention_plan.h"
#include "simd.h"

#if defined(__clang__)
#define OUTRIDER_UNROLL _Pragma("clang loop unroll(full)")
#else
#define OUTRIDER_UNROLL _Pragma("GCC unroll 16")
#endif

namespace outrider {
namespace OUTRIDER_ISA {

// Query rows that share a key in registers, and how many key or value vectors they are multiplied with at once:
// sums, keys and one query must fit the registers (3 rows by 2 vectors spilled on AVX2 and took half as long again).
#if defined(OUTRIDER_ISA_AVX512)
constexpr int kQueryTile = 12;
constexpr int vectors_at_once(int rows) { return rows <= 6 ? 4 : 2; }
#elif defined(OUTRIDER_ISA_NEON)
constexpr int kQueryTile = 6;
constexpr int vectors_at_once(int rows) { return rows <= 2 ? 2 : 1; }
#elif defined(OUTRIDER_ISA_AVX2)
constexpr int kQueryTile = 6;
constexpr int vectors_at_once(int rows) { return rows <= 1 ? 4 : rows <= 2 ? 2 : 1; }
#else
constexpr int kQueryTile = 1;
constexpr int vectors_at_once(int) { return 1; }
#endif

constexpr int kBlockVectors = kKvBlock / kLanes;
constexpr float kMinusInfinity = -__builtin_inff();

OUTRIDER_HOT F32x16 load_elements(const float* from) { return load(from); }
OUTRIDER_HOT F32x16 load_elements(const uint16_t* from) { return load_f16(from); }
OUTRIDER_HOT F32x16 load_elements(const int8_t* from) { return load_i8(from); }

// 2^x for x <= 0, relative error below 2e-7; exactly 1 for 0, exactly 0 below -126.5 (so for -infinity), NaN for
// NaN of any payload: the power of two, built in the exponent's bits (all zero below 2^-126), only multiplies.
// 2^r for |r| <= 1/2 is a minimax polynomial whose constant term is 1 (its own error 9.2e-8).
OUTRIDER_HOT F32x16 power_of_2(F32x16 x) {
    const F32x16 round = splat(12582912.0f + 127.0f);  // 1.5 * 2^23, and the exponent's bias
    const F32x16 clamped = maximum(splat(-127.0f), x);
    const F32x16 shifted = add(clamped, round);
    const F32x16 r = sub(clamped, sub(shifted, round));
    F32x16 p = splat(0.0013264727f);
    p = fma(p, r, splat(0.009671513f));
    p = fma(p, r, splat(0.055507336f));
    p = fma(p, r, splat(0.24022242f));
    p = fma(p, r, splat(0.693147f));
    p = fma(p, r, splat(1.0f));
    return mul(p, as_float(shift_left_23(as_int(shifted))));
}

// A block of keys and values in their stored form, by 16 positions.
template <typename Element>
struct KeyBlock {
    const Element* keys[kBlockVectors];    // [head_dim], one every key_stride, each of 16 positions side by side
    const Element* values[kBlockVectors];  // [16], one every value_stride, each of [width]
    size_t key_stride;
    size_t value_stride;
    const uint8_t* next_keys[kBlockVectors];  // of the block that follows
    size_t bytes_ahead;                       // of values and next_keys, worth asking for early; 0: nothing
    float key_scales[kKvBlock];  // int8 only
    float value_scales[kKvBlock];
};

// Where a vector is worked on alone, memory has one stream to follow and stalls at each page. So every step asks for a
// later one's data: with keys that lay in memory, AVX2 took 14.7 us for 500 positions in f16 instead of 19, and 8
// instead of 12.4 in int8. Several vectors at once are streams enough, and were slower for it.
OUTRIDER_HOT void ask_for(const void* from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at);
}

// A run of a block's positions.
struct Span {
    int first;
    int end;
};

// scores[r][lane] of V vectors of keys, starting with `vector`. queries: [width / 16][R][16]; scores: [R][kKvBlock].
template <typename Element, int R, int V>
OUTRIDER_HOT void score_vectors(const float* queries, const KeyBlock<Element>& block, int vector, int head_dim,
                                float* scores) {
    F32x16 sums[R][V];
    const Element* keys[V];
    OUTRIDER_UNROLL for (int v = 0; v < V; ++v) {
        keys[v] = block.keys[vector + v];
        OUTRIDER_UNROLL for (int r = 0; r < R; ++r) sums[r][v] = splat(0.0f);
    }
    const size_t stride = block.key_stride;
    for (int start = 0; start < head_dim; start += kLanes, queries += R * kLanes) {
        const int end = head_dim - start < kLanes ? head_dim - start : kLanes;
        for (int i = 0; i < end; ++i) {
            F32x16 key[V];
            OUTRIDER_UNROLL for (int v = 0; v < V; ++v) {
                key[v] = load_elements(keys[v]);
                keys[v] += stride;
            }
            OUTRIDER_UNROLL for (int r = 0; r < R; ++r) {
                const F32x16 query = splat(queries[r * kLanes + i]);
                OUTRIDER_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = fma(query, key[v], sums[r][v]);
            }
        }
    }
    OUTRIDER_UNROLL for (int r = 0; r < R; ++r) {
        OUTRIDER_UNROLL for (int v = 0; v < V; ++v) {
            store(scores + r * kKvBlock + (vector + v) * kLanes, sums[r][v]);
        }
    }
}

template <typename Element, int R>
OUTRIDER_HOT void score_block(const float* queries, const KeyBlock<Element>& block, int first_vector, int end_vector,
                              int head_dim, bool ahead, float* scores) {
    constexpr int V = vectors_at_once(R);
    int vector = first_vector;
    for (; vector + V <= end_vector; vector += V) {
        if (V == 1 && ahead) ask_for(block.values[vector], block.bytes_ahead);
        score_vectors<Element, R, V>(queries, block, vector, head_dim, scores);
    }
    if constexpr (V > 2) {
        for (; vector + 2 <= end_vector; vector += 2) {
            score_vectors<Element, R, 2>(queries, block, vector, head_dim, scores);
        }
    }
    if constexpr (V > 1) {
        for (; vector < end_vector; ++vector) {
            score_vectors<Element, R, 1>(queries, block, vector, head_dim, scores);
        }
    }
}

// accumulators[r][16 * V] += sum of weights[r][j] * values[j] over the span. weights: [.][kKvBlock].
template <typename Element, int R, int V>
OUTRIDER_HOT void weigh_vectors(const float* weights, const KeyBlock<Element>& block, Span span, int at, int width,
                                float* accumulators) {
    F32x16 sums[R][V];
    OUTRIDER_UNROLL for (int r = 0; r < R; ++r) {
        OUTRIDER_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = load(accumulators + r * width + at + v * kLanes);
    }
    const size_t stride = block.value_stride;
    for (int j = span.first; j < span.end;) {
        const int vector = j / kLanes, vector_end = (vector + 1) * kLanes;
        const int end = vector_end < span.end ? vector_end : span.end;
        const Element* values = block.values[vector] + (j % kLanes) * stride + at;
        for (; j < end; ++j, values += stride) {
            F32x16 value[V];
            OUTRIDER_UNROLL for (int v = 0; v < V; ++v) value[v] = load_elements(values + v * kLanes);
            OUTRIDER_UNROLL for (int r = 0; r < R; ++r) {
                const F32x16 weight = splat(weights[r * kKvBlock + j]);
                OUTRIDER_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = fma(weight, value[v], sums[r][v]);
            }
        }
    }
    OUTRIDER_UNROLL for (int r = 0; r < R; ++r) {
        OUTRIDER_UNROLL for (int v = 0; v < V; ++v) store(accumulators + r * width + at + v * kLanes, sums[r][v]);
    }
}

template <typename Element, int R>
OUTRIDER_HOT void weigh_block(const float* weights, const KeyBlock<Element>& block, Span span, int width, bool ahead,
                              float* accumulators) {
    constexpr int V = vectors_at_once(R);
    int at = 0;
    for (; at + V * kLanes <= width; at += V * kLanes) {
        if (V == 1 && ahead && at < kKvBlock) ask_for(block.next_keys[at / kLanes], block.bytes_ahead);
        weigh_vectors<Element, R, V>(weights, block, span, at, width, accumulators);
    }
    if constexpr (V > 1) {
        for (; at < width; at += kLanes) {
            weigh_vectors<Element, R, 1>(weights, block, span, at, width, accumulators);
        }
    }
}

template <typename Element>
inline void weigh_one_row(const float* weights, const KeyBlock<Element>& block, Span span, int width,
                          float* accumulators) {
    weigh_block<Element, 1>(weights, block, span, width, false, accumulators);
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
