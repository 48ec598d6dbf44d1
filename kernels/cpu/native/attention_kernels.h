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

// Query rows that share a key in registers, and how many key or value vectors they are multiplied with at once.
#if defined(OUTRIDER_ISA_AVX512)
constexpr int kQueryTile = 12;
constexpr int vectors_at_once(int rows) { return rows <= 6 ? 4 : 2; }
#elif defined(OUTRIDER_ISA_NEON)
constexpr int kQueryTile = 6;
constexpr int vectors_at_once(int rows) { return rows <= 1 ? 4 : rows <= 3 ? 2 : 1; }
#elif defined(OUTRIDER_ISA_AVX2)
constexpr int kQueryTile = 6;
constexpr int vectors_at_once(int rows) { return rows <= 1 ? 4 : rows <= 3 ? 2 : 1; }
#else
constexpr int kQueryTile = 1;
constexpr int vectors_at_once(int) { return 1; }
#endif

constexpr int kBlockVectors = kKvBlock / kLanes;
constexpr float kMinusInfinity = -__builtin_inff();

OUTRIDER_HOT F32x16 load_elements(const float* from) { return load(from); }
OUTRIDER_HOT F32x16 load_elements(const uint16_t* from) { return load_f16(from); }
OUTRIDER_HOT F32x16 load_elements(const int8_t* from) { return load_i8(from); }

// 2^x for x <= 0, relative error below 2e-7; exactly 1 for 0, exactly 0 below -127 (so for -infinity), NaN for NaN.
// The power of two is built in the exponent's bits (below 2^-126 they are all zero, and so is the product);
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
    float key_scales[kKvBlock];  // int8 only
    float value_scales[kKvBlock];
};

// A run of a block's positions.
struct Span {
    int first;
    int end;
};

// What the row at `position` sees of the block at `start`.
OUTRIDER_HOT Span visible_span(int position, int window, int start) {
    const int first = first_visible(position, window) - start, end = position + 1 - start;
    return {first < 0 ? 0 : first, end > kKvBlock ? kKvBlock : end};
}

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
                              int head_dim, float* scores) {
    constexpr int V = vectors_at_once(R);
    int vector = first_vector;
    for (; vector + V <= end_vector; vector += V) {
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
OUTRIDER_HOT void weigh_block(const float* weights, const KeyBlock<Element>& block, Span span, int width,
                              float* accumulators) {
    constexpr int V = vectors_at_once(R);
    int at = 0;
    for (; at + V * kLanes <= width; at += V * kLanes) {
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
    weigh_block<Element, 1>(weights, block, span, width, accumulators);
}

// A row's scores of one block as they count: scaled (int8), what it must not see -infinity. Returns the new maximum.
// NaN never enters the maximum; it shows in the sum.
template <bool kScaled>
OUTRIDER_HOT float settle_scores(float* scores, Span seen, const float* key_scales, float maximum_so_far) {
    F32x16 largest = splat(maximum_so_far);
    if (seen.first == 0 && seen.end == kKvBlock) {
        OUTRIDER_UNROLL for (int v = 0; v < kBlockVectors; ++v) {
            F32x16 x = load(scores + v * kLanes);
            if constexpr (kScaled) {
                x = mul(x, load(key_scales + v * kLanes));
                store(scores + v * kLanes, x);
            }
            largest = maximum(x, largest);
        }
        return largest_lane(largest);
    }
    const F32x16 hidden = splat(kMinusInfinity);
    for (int start = seen.first / kLanes * kLanes; start < seen.end; start += kLanes) {
        F32x16 x = load(scores + start);
        if constexpr (kScaled) x = mul(x, load(key_scales + start));
        if (seen.end < start + kLanes) x = keep_first(x, seen.end - start, hidden);
        if (seen.first > start) x = keep_first(hidden, seen.first - start, x);
        store(scores + start, x);
        largest = maximum(x, largest);
    }
    return largest_lane(largest);
}

// Turns a row's scores into weights and adds them to its lane sums [16].
template <bool kScaled>
OUTRIDER_HOT void weigh_scores(float* scores, Span seen, float base, const float* value_scales, float* lane_sums) {
    const F32x16 bases = splat(base);
    F32x16 sum = load(lane_sums);
    const auto weigh = [&](int start) {
        const F32x16 weight = power_of_2(sub(load(scores + start), bases));
        sum = add(sum, weight);
        if constexpr (kScaled) {
            store(scores + start, mul(weight, load(value_scales + start)));
        } else {
            store(scores + start, weight);
        }
    };
    if (seen.first == 0 && seen.end == kKvBlock) {
        OUTRIDER_UNROLL for (int v = 0; v < kBlockVectors; ++v) weigh(v * kLanes);
    } else {
        for (int start = seen.first / kLanes * kLanes; start < seen.end; start += kLanes) weigh(start);
    }
    store(lane_sums, sum);
}

// Some rows of a tile, and where they stand so far.
struct QueryRows {
    int num_rows;  // of the R that the kernel computes
    int first_query;  // within the tile: its position is tile's + query / group
    const float* queries;  // [width / 16][R][16]
    float* maxima;         // [R]
    float* lane_sums;      // [R][16]
    float* accumulators;   // [R][width]
};

struct BlockShape {
    int start;           // position of the block's first key
    int tile_position;
    int group;
    int window;
    int head_dim;
    int width;  // head_dim rounded up to whole vectors
};

// Brings the rows' maxima, lane sums and accumulators up to date and turns their scores into weights (Milakov &
// Gimelshein 2018, online softmax; in powers of two). A row that sees nothing of the block is multiplied by 1 at most.
template <typename Element, int R>
OUTRIDER_HOT void soften_block(const KeyBlock<Element>& block, int width, const QueryRows& rows, const Span* seen,
                               float* scores) {
    constexpr bool kScaled = sizeof(Element) == sizeof(int8_t);
    float old_maxima[kLanes] = {}, maxima[kLanes] = {}, bases[kLanes], factors[kLanes];
    bool changed = false;
    for (int r = 0; r < rows.num_rows; ++r) {
        old_maxima[r] = maxima[r] = rows.maxima[r];
        if (seen[r].first >= seen[r].end) continue;
        maxima[r] = settle_scores<kScaled>(scores + r * kKvBlock, seen[r], block.key_scales, old_maxima[r]);
        changed |= maxima[r] != old_maxima[r];
    }
    const F32x16 largest = load(maxima);
    const F32x16 base = select_less(splat(kMinusInfinity), largest, largest, splat(0.0f));
    store(bases, base);
    if (changed) {
        store(factors, power_of_2(sub(load(old_maxima), base)));
        for (int r = 0; r < rows.num_rows; ++r) {
            const F32x16 factor = splat(factors[r]);
            rows.maxima[r] = maxima[r];
            store(rows.lane_sums + r * kLanes, mul(load(rows.lane_sums + r * kLanes), factor));
            float* accumulators = rows.accumulators + r * width;
            for (int i = 0; i < width; i += kLanes) store(accumulators + i, mul(load(accumulators + i), factor));
        }
    }
    for (int r = 0; r < rows.num_rows; ++r) {
        if (seen[r].first >= seen[r].end) continue;
        weigh_scores<kScaled>(scores + r * kKvBlock, seen[r], bases[r], block.value_scales,
                              rows.lane_sums + r * kLanes);
    }
}

// One step of the online softmax for up to R rows. scores: [R][kKvBlock], scratch.
template <typename Element, int R>
inline void attend_block(const KeyBlock<Element>& block, const BlockShape& shape, const QueryRows& rows,
                         float* scores) {
    Span seen[R], any = {kKvBlock, 0}, all = {0, kKvBlock};
    for (int r = 0; r < rows.num_rows; ++r) {
        const int position = shape.tile_position + (rows.first_query + r) / shape.group;
        seen[r] = visible_span(position, shape.window, shape.start);
        all.first = seen[r].first > all.first ? seen[r].first : all.first;
        all.end = seen[r].end < all.end ? seen[r].end : all.end;
        if (seen[r].first >= seen[r].end) continue;
        any.first = seen[r].first < any.first ? seen[r].first : any.first;
        any.end = seen[r].end > any.end ? seen[r].end : any.end;
    }
    if (any.first >= any.end) return;
    score_block<Element, R>(rows.queries, block, any.first / kLanes, (any.end + kLanes - 1) / kLanes, shape.head_dim,
                            scores);
    soften_block<Element, R>(block, shape.width, rows, seen, scores);
    // Keys that some rows see before those that all see, these together, then those that some see after them.
    const bool shared = all.first < all.end;
    for (int r = 0; r < rows.num_rows; ++r) {
        const Span before = {seen[r].first, shared ? all.first : seen[r].end};
        if (before.first >= before.end) continue;
        weigh_one_row(scores + r * kKvBlock, block, before, shape.width, rows.accumulators + r * shape.width);
    }
    if (!shared) return;
    weigh_block<Element, R>(scores, block, all, shape.width, rows.accumulators);
    for (int r = 0; r < rows.num_rows; ++r) {
        const Span after = {all.end, seen[r].end};
        if (after.first >= after.end) continue;
        weigh_one_row(scores + r * kKvBlock, block, after, shape.width, rows.accumulators + r * shape.width);
    }
}

// The smallest R that is compiled and holds `num_rows` <= kQueryTile.
inline int padded_rows(int num_rows) { return num_rows <= 4 ? num_rows : num_rows <= 6 ? 6 : num_rows <= 8 ? 8 : 12; }

template <typename Element>
inline void attend_block(const KeyBlock<Element>& block, const BlockShape& shape, const QueryRows& rows,
                         float* scores) {
    const int padded = padded_rows(rows.num_rows);
    if (padded == 1) return attend_block<Element, 1>(block, shape, rows, scores);
    if constexpr (kQueryTile >= 6) {
        if (padded == 2) return attend_block<Element, 2>(block, shape, rows, scores);
        if (padded == 3) return attend_block<Element, 3>(block, shape, rows, scores);
        if (padded == 4) return attend_block<Element, 4>(block, shape, rows, scores);
        if (padded == 6) return attend_block<Element, 6>(block, shape, rows, scores);
    }
    if constexpr (kQueryTile >= 12) {
        if (padded == 8) return attend_block<Element, 8>(block, shape, rows, scores);
        return attend_block<Element, 12>(block, shape, rows, scores);
    }
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
