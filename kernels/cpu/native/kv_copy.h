// Moving tokens from slot to slot.
#pragma once

#include <cstring>
#include <vector>

#include "kv_cache.h"

namespace outrider {

// Copies one KV head of a token between a page and `token` [head bytes of one token]. `stride`: elements between two of
// the token's in the page.
template <bool kToPage>
void copy_token_head(const KvLayout& layout, uint8_t* head, size_t offset, size_t first, size_t stride, uint8_t* token) {
    const size_t element = kv_element_bytes(layout.format), scale = kv_scale_bytes(layout.format);
    const auto copy = [](uint8_t* page, uint8_t* one, size_t size) { std::memcpy(kToPage ? page : one, kToPage ? one : page, size); };
    for (int i = 0; i < layout.head_dim; ++i) copy(head + (first + i * stride) * element, token + i * element, element);
    const size_t elements = layout.head_dim * element;
    copy(head + layout.page_size * elements + offset * scale, token + elements, scale);
}

// Copies tokens within the keys, or the values, of one layer, as if all were read before any is written.
inline void copy_tokens(const KvLayout& layout, uint8_t* cache, bool are_keys, const std::vector<int64_t>& sources,
                        const std::vector<int64_t>& destinations) {
    const size_t head_bytes = kv_head_bytes(layout) / layout.page_size, token_bytes = head_bytes * layout.num_kv_heads;
    std::vector<uint8_t> tokens(sources.size() * token_bytes);
    const auto each_head = [&](const std::vector<int64_t>& slots, auto&& copy) {
        for (size_t i = 0; i < slots.size(); ++i) {
            const size_t offset = slots[i] % layout.page_size;
            uint8_t* page = cache + slots[i] / layout.page_size * kv_page_bytes(layout);
            for (int head = 0; head < layout.num_kv_heads; ++head) {
                copy(layout, page + head * kv_head_bytes(layout), offset, are_keys ? offset : offset * layout.head_dim,
                     are_keys ? layout.page_size : 1, tokens.data() + i * token_bytes + head * head_bytes);
            }
        }
    };
    each_head(sources, copy_token_head<false>);
    each_head(destinations, copy_token_head<true>);
}

}  // namespace outrider
