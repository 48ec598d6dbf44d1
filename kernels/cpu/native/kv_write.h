// Storing a token's keys and values in their slot.
#pragma once

#include <cstring>

#include "kv_cache.h"
#include "simd.h"

namespace outrider {
namespace OUTRIDER_ISA {

// One head of one token in int8: writes `elements` [head_dim], one every `stride`, and returns the scale.
// NaN and infinity have no int8: they make the scale NaN, so that whatever is computed from the token shows them.
inline float quantize_kv_head(const float* x, int head_dim, int8_t* elements, size_t stride) {
    const F32x16 zero = splat(0.0f);
    F32x16 largest_lanes = zero, poison = zero;
    for (int i = 0; i < head_dim; i += kLanes) {
        const F32x16 lanes = load_first(x + i, head_dim - i);
        largest_lanes = maximum(absolute(lanes), largest_lanes);
        poison = fma(lanes, zero, poison);  // stays zero unless something is not finite
    }
    const float poison_sum = sum_lanes(poison);
    // Below 2^-100 the quotient would leave the range of floats; such a head counts as zero.
    const float largest = largest_lane(largest_lanes);
    const bool is_zero = largest < 7.8886090522101181e-31f || poison_sum != poison_sum;
    const F32x16 inverse = splat(is_zero ? 0.0f : 127.0f / largest);
    for (int i = 0; i < head_dim; i += kLanes) {
        int8_t lanes[kLanes];
        const int n = head_dim - i < kLanes ? head_dim - i : kLanes;
        if (is_zero) {
            std::memset(lanes, 0, sizeof lanes);
        } else {
            store_i8(lanes, round_to_int(mul(load_first(x + i, n), inverse)));
        }
        for (int j = 0; j < n; ++j) elements[(i + j) * stride] = lanes[j];
    }
    return poison_sum != poison_sum ? poison_sum : is_zero ? 0.0f : largest / 127.0f;
}

// One head of one token: `elements` [head_dim], one every `stride`.
inline void store_kv_head(const float* x, int head_dim, float* elements, size_t stride) {
    for (int i = 0; i < head_dim; ++i) elements[i * stride] = x[i];
}
inline void store_kv_head(const float* x, int head_dim, uint16_t* elements, size_t stride) {
    for (int i = 0; i < head_dim; i += kLanes) {
        uint16_t lanes[kLanes];
        const int n = head_dim - i < kLanes ? head_dim - i : kLanes;
        store_f16(lanes, load_first(x + i, n));
        for (int j = 0; j < n; ++j) elements[(i + j) * stride] = lanes[j];
    }
}

// Stores one KV head of one token. `slot`: page * page_size + offset; `key`, `value`: [head_dim] of this head;
// `keys`, `values`: the layer's caches. Different slots and heads may be written at the same time.
inline void write_kv_head(const KvLayout& layout, int64_t slot, int kv_head, const float* key, const float* value,
                          uint8_t* keys, uint8_t* values) {
    const int64_t page = slot / layout.page_size;
    const size_t offset = static_cast<size_t>(slot % layout.page_size);
    const size_t start = page * kv_page_bytes(layout) + kv_head * kv_head_bytes(layout);
    const int head_dim = layout.head_dim;
    const size_t page_size = layout.page_size, first_value = offset * head_dim;
    uint8_t* key_head = keys + start;
    uint8_t* value_head = values + start;
    if (layout.format == KvFormat::F32) {
        store_kv_head(key, head_dim, reinterpret_cast<float*>(key_head) + offset, page_size);
        store_kv_head(value, head_dim, reinterpret_cast<float*>(value_head) + first_value, 1);
    } else if (layout.format == KvFormat::F16) {
        store_kv_head(key, head_dim, reinterpret_cast<uint16_t*>(key_head) + offset, page_size);
        store_kv_head(value, head_dim, reinterpret_cast<uint16_t*>(value_head) + first_value, 1);
    } else {
        const size_t scale_at = page_size * head_dim + offset * sizeof(float);
        const float key_scale =
            quantize_kv_head(key, head_dim, reinterpret_cast<int8_t*>(key_head) + offset, page_size);
        const float value_scale =
            quantize_kv_head(value, head_dim, reinterpret_cast<int8_t*>(value_head) + first_value, 1);
        std::memcpy(key_head + scale_at, &key_scale, sizeof key_scale);
        std::memcpy(value_head + scale_at, &value_scale, sizeof value_scale);
    }
}

// Stores one token. `key`, `value`: [num_kv_heads][head_dim].
inline void write_kv(const KvLayout& layout, int64_t slot, const float* key, const float* value, uint8_t* keys,
                     uint8_t* values) {
    for (int kv_head = 0; kv_head < layout.num_kv_heads; ++kv_head) {
        const size_t at = static_cast<size_t>(kv_head) * layout.head_dim;
        write_kv_head(layout, slot, kv_head, key + at, value + at, keys, values);
    }
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
