// Looking through one row of logits: for the largest, the k largest, and those that can win a random race.
#pragma once

#include <cmath>

#include "random_draw.h"
#include "simd.h"

namespace outrider {
namespace OUTRIDER_ISA {

// The lowest index among the largest of n >= 1 values; -1 if one is NaN or +infinity, or none is finite.
inline int32_t argmax_row(const float* x, int n) {
    F32x16 largest = splat(-INFINITY), poison = splat(0.0f);
    for (int i = 0; i < n; i += kLanes) {
        const F32x16 lanes = keep_first(load_first(x + i, n - i), n - i, splat(-INFINITY));
        // NaN compares false, so it makes 1 here; every number that is not +infinity makes 0.
        poison = maximum(poison, select_less(lanes, splat(INFINITY), splat(0.0f), splat(1.0f)));
        largest = maximum(lanes, largest);
    }
    const float value = largest_lane(largest);
    if (largest_lane(poison) > 0.0f || value == -INFINITY) return -1;
    for (int i = 0;; i += kLanes) {
        const F32x16 lanes = keep_first(load_first(x + i, n - i), n - i, splat(-INFINITY));
        if (largest_lane(lanes) < value) continue;
        for (int lane = i;; ++lane) {
            if (x[lane] == value) return lane;
        }
    }
}

// The k <= n largest in falling order, of equal ones the lowest index first; `values` and `indexes` are [k].
// NaN counts as -infinity. A value enters only over the smallest kept, so nearly all of a row is only compared.
inline void top_k_row(const float* x, int n, int k, float* values, int32_t* indexes) {
    int num_kept = 0;
    for (int i = 0; i < n; i += kLanes) {
        if (num_kept == k && n - i >= kLanes) {
            const F32x16 above = select_less(splat(values[k - 1]), load(x + i), splat(1.0f), splat(0.0f));
            if (largest_lane(above) == 0.0f) continue;
        }
        for (int index = i; index < n && index < i + kLanes; ++index) {
            const float value = x[index] == x[index] ? x[index] : -INFINITY;
            if (num_kept == k && !(value > values[k - 1])) continue;
            int place = num_kept < k ? num_kept++ : k - 1;
            for (; place > 0 && value > values[place - 1]; --place) {
                values[place] = values[place - 1];
                indexes[place] = indexes[place - 1];
            }
            values[place] = value;
            indexes[place] = index;
        }
    }
}

// In a race, token i finishes at time E_i / w_i, where w_i = exp((x_i - largest) / temperature) and E_i = -log(u_i),
// u_i = (draw_bits + 1) / 2^53. Writes, ascending, every token that can be first, a few too many, and returns how many:
// since E >= 1 - u, only those with 1 - u_i < w_i * (time of the likeliest token) can. 0 where argmax_row says -1.
// `token_map` [n]: whose number token i has, null: its own.
inline int32_t race_candidates_row(const float* x, int n, float temperature, uint64_t draw, const int64_t* token_map,
                                   int32_t* candidates) {
    const int32_t likeliest = argmax_row(x, n);
    if (likeliest < 0) return 0;
    const auto id = [token_map](int i) { return static_cast<uint64_t>(token_map != nullptr ? token_map[i] : i); };
    const double time = -std::log(static_cast<double>(draw_bits(draw, id(likeliest)) + 1) * kDrawUnit);
    const F32x16 largest = splat(x[likeliest]), heat = splat(temperature);
    // float32 keeps the order but for 1e-5 or so. The likeliest itself is always among them: E > 1 - u, or both are 0.
    const F32x16 limit = splat(static_cast<float>(time) * 1.001f + 1e-30f);
    int32_t num_candidates = 0;
    for (int i = 0; i < n; i += kLanes) {
        const int width = n - i < kLanes ? n - i : kLanes;
        float limits[kLanes], rests[kLanes];
        store(limits, mul(exponential(div(sub(load_first(x + i, width), largest), heat)), limit));
        uint64_t ids[kLanes] = {};
        for (int lane = 0; lane < width; ++lane) ids[lane] = id(i + lane);
        for (int lane = 0; lane < kLanes; ++lane) {
            const uint64_t rest = 9007199254740991u - draw_bits(draw, ids[lane]);
            rests[lane] = static_cast<float>(static_cast<int64_t>(rest)) * static_cast<float>(kDrawUnit);
        }
        if (largest_lane(select_less(load(rests), load(limits), splat(1.0f), splat(0.0f))) == 0.0f) continue;
        for (int lane = 0; lane < width; ++lane) {
            if (rests[lane] < limits[lane]) candidates[num_candidates++] = i + lane;
        }
    }
    return num_candidates;
}

// The softmax of x / temperature at `index`; `largest` of x, all of which is sound. Temperature 0 counts as 1.
inline float probability_row(const float* x, int n, int32_t index, float largest, float temperature) {
    const F32x16 base = splat(largest), heat = splat(temperature > 0.0f ? temperature : 1.0f);
    const auto weigh = [&](F32x16 lanes) { return exponential(div(sub(lanes, base), heat)); };
    F32x16 sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};  // one chain of additions would wait for itself
    int i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        for (int v = 0; v < 4; ++v) sums[v] = add(sums[v], weigh(load(x + i + v * kLanes)));
    }
    for (; i < n; i += kLanes) {
        const F32x16 lanes = keep_first(load_first(x + i, n - i), n - i, splat(-INFINITY));
        sums[0] = add(sums[0], weigh(lanes));
    }
    float weight[kLanes];
    store(weight, weigh(splat(x[index])));
    return weight[0] / sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
