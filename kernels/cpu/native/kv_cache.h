// Where a token's keys and values lie: pages of page_size tokens, keys and values in buffers of their own.
//
// A page of keys is [num_kv_heads][head_dim][page_size]: tokens stand in the SIMD lanes, so that scores need neither
// horizontal sums nor a transposition. A page of values is [num_kv_heads][page_size][head_dim].
// In int8, a head's page_size scales (float, one a token, at no particular alignment) follow its elements.
#pragma once

#include <cstddef>
#include <cstdint>

namespace outrider {

// int8: element = round(x / scale), scale = largest magnitude of the token's head / 127.
enum class KvFormat : int32_t { F32 = 0, F16 = 1, INT8 = 2 };

struct KvLayout {
    int32_t page_size;
    int32_t num_kv_heads;
    int32_t head_dim;
    KvFormat format;
};

// Free functions of internal linkage: these headers are compiled once for each instruction set, and a member
// function compiled for the newest could be the one that the linker keeps for all.
static inline size_t kv_element_bytes(KvFormat format) {
    return format == KvFormat::F32 ? sizeof(float) : format == KvFormat::F16 ? sizeof(uint16_t) : sizeof(int8_t);
}

static inline size_t kv_scale_bytes(KvFormat format) { return format == KvFormat::INT8 ? sizeof(float) : 0; }

// One KV head of one page of keys, or of values.
static inline size_t kv_head_bytes(const KvLayout& layout) {
    const size_t token = layout.head_dim * kv_element_bytes(layout.format) + kv_scale_bytes(layout.format);
    return layout.page_size * token;
}

static inline size_t kv_page_bytes(const KvLayout& layout) { return layout.num_kv_heads * kv_head_bytes(layout); }

}  // namespace outrider
