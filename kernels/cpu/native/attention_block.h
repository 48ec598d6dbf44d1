// One step of the online softmax: some rows of a tile against one block of keys.
#pragma once

#include "attention_kernels.h"

namespace outrider {
namespace OUTRIDER_ISA {

// What the row at `position` sees of the block at `start`.
OUTRIDER_HOT Span visible_span(int position, int window, int start) {
    const int first = first_visible(position, window) - start, end = position + 1 - start;
    return {first < 0 ? 0 : first, end > kKvBlock ? kKvBlock : end};
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
    const bool ahead = rows.first_query == 0;  // once for all rows of the tile
    score_block<Element, R>(rows.queries, block, any.first / kLanes, (any.end + kLanes - 1) / kLanes, shape.head_dim,
                            ahead, scores);
    soften_block<Element, R>(block, shape.width, rows, seen, scores);
    // Keys that some rows see before those that all see, these together, then those that some see after them.
    const bool shared = all.first < all.end;
    for (int r = 0; r < rows.num_rows; ++r) {
        const Span before = {seen[r].first, shared ? all.first : seen[r].end};
        if (before.first >= before.end) continue;
        weigh_one_row(scores + r * kKvBlock, block, before, shape.width, rows.accumulators + r * shape.width);
    }
    if (!shared) return;
    weigh_block<Element, R>(scores, block, all, shape.width, ahead, rows.accumulators);
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
