// Paged causal attention (MHA, GQA, MQA) of one item of a plan; see attention_plan.h.
#pragma once

#include <cstring>

#include "attention_block.h"

namespace outrider {
namespace OUTRIDER_ISA {

// Unfinished results of some query rows: the largest score (in powers of two), the sum of weights, and the
// weighted values. `stride` between rows of accumulators is head_dim rounded up.
struct PartialRows {
    float* maxima;        // [num_queries]
    float* sums;          // [num_queries]
    float* accumulators;  // [num_queries][width]
};

// A thread's scratch, cut up.
struct AttentionScratch {
    float* queries;    // register tiles of [width / 16][R][16], scaled
    PartialRows part;  // of the split at work
    float* lane_sums;  // [num_queries][16]
    PartialRows total;
    float* scores;  // [R][kKvBlock]
    void* gathered_keys;
    void* gathered_values;
};

inline AttentionScratch cut_scratch(const AttentionPass& pass, float* scratch) {
    const int group = attention_group(pass.num_heads, pass.layout);
    const size_t rows = round_up(attention_tile_rows(pass.num_heads, pass.layout) * group, 16) + 16;
    const size_t width = round_up(pass.layout.head_dim, 16);
    const auto take = [&scratch](size_t floats) {
        float* taken = scratch;
        scratch += floats;
        return taken;
    };
    AttentionScratch cut;
    cut.queries = take(rows * width);
    cut.part = {take(rows), take(rows), take(rows * width)};
    cut.lane_sums = take(rows * kLanes);
    cut.total = {take(rows), take(rows), take(rows * width)};
    cut.scores = take(16 * kKvBlock);
    cut.gathered_keys = take(width * kKvBlock);
    cut.gathered_values = take(width * kKvBlock);
    return cut;
}

// Register tiles of [width / 16][R][16], rows that only fill up zero; times scale and log2(e).
inline void pack_queries(const AttentionPass& pass, const AttentionLayer& layer, const AttentionTile& tile,
                         int kv_head, float* packed) {
    const int group = attention_group(pass.num_heads, pass.layout), head_dim = pass.layout.head_dim;
    const int num_queries = tile.num_rows * group, width = round_up(head_dim, kLanes);
    const F32x16 factor = splat(layer.scale * 1.44269504088896341f);
    for (int first = 0; first < num_queries; first += kQueryTile) {
        const int left = num_queries - first < kQueryTile ? num_queries - first : kQueryTile;
        const int padded = padded_rows(left);
        if (left < padded) std::memset(packed, 0, sizeof(float) * padded * width);
        for (int r = 0; r < left; ++r) {
            const int query = first + r;
            const float* from = layer.queries + (tile.first_row + query / group) * layer.query_stride +
                                (static_cast<size_t>(kv_head) * group + query % group) * head_dim;
            for (int i = 0; i < head_dim; i += kLanes) {
                store(packed + i * padded + r * kLanes, mul(load_first(from + i, head_dim - i), factor));
            }
        }
        packed += padded * width;
    }
}

// Where a sequence's keys and values of one KV head lie.
struct HeadPages {
    const KvLayout* layout;
    const int32_t* page_table;
    const uint8_t* keys;  // of this head in page 0
    const uint8_t* values;
    int last_position;  // that anyone in the tile sees
    int path_start;     // from here on slots are the path's
    const int64_t* path;
};

// A token: where its page starts, in bytes, and which of the page's it is.
struct TokenPlace {
    size_t page;
    size_t offset;
};

OUTRIDER_HOT TokenPlace place_at(const HeadPages& pages, int position) {
    const KvLayout& layout = *pages.layout;
    if (position >= pages.path_start) {
        const int64_t slot = pages.path[position - pages.path_start];
        return {static_cast<size_t>(slot / layout.page_size) * kv_page_bytes(layout),
                static_cast<size_t>(slot % layout.page_size)};
    }
    return {static_cast<size_t>(pages.page_table[position / layout.page_size]) * kv_page_bytes(layout),
            static_cast<size_t>(position % layout.page_size)};
}

template <typename Element>
inline void find_scales(const HeadPages& pages, int position, int vector, int count, KeyBlock<Element>& block) {
    const KvLayout& layout = *pages.layout;
    const TokenPlace place = place_at(pages, position);
    const size_t at = place.page + static_cast<size_t>(layout.page_size) * layout.head_dim + place.offset * sizeof(float);
    std::memcpy(block.key_scales + vector, pages.keys + at, count * sizeof(float));
    std::memcpy(block.value_scales + vector, pages.values + at, count * sizeof(float));
}

// Copies 16 positions that do not lie side by side in a page, or whose rows of values do not fill whole vectors.
// Positions that nobody sees become zeros. keys: [head_dim][16]; values: [16][width].
template <typename Element>
inline void gather_vector(const HeadPages& pages, int position, int width, Element* keys, Element* values) {
    const KvLayout& layout = *pages.layout;
    const int head_dim = layout.head_dim;
    std::memset(keys, 0, sizeof(Element) * head_dim * kLanes);
    std::memset(values, 0, sizeof(Element) * width * kLanes);
    for (int lane = 0; lane < kLanes && position + lane <= pages.last_position; ++lane) {
        const TokenPlace place = place_at(pages, position + lane);
        const Element* key = reinterpret_cast<const Element*>(pages.keys + place.page) + place.offset;
        const Element* value = reinterpret_cast<const Element*>(pages.values + place.page) + place.offset * head_dim;
        for (int i = 0; i < head_dim; ++i) keys[i * kLanes + lane] = key[static_cast<size_t>(i) * layout.page_size];
        std::memcpy(values + lane * width, value, sizeof(Element) * head_dim);
    }
}

// The block at `start`, up to the last position that anyone sees; `end`: of the positions that are worked on.
template <typename Element>
inline void find_block(const HeadPages& pages, int start, int end, int width, const AttentionScratch& scratch,
                       KeyBlock<Element>& block) {
    constexpr bool kScaled = sizeof(Element) == sizeof(int8_t);
    const KvLayout& layout = *pages.layout;
    const int head_dim = layout.head_dim;
    const bool is_uniform = layout.page_size == kLanes || start + kKvBlock <= pages.path_start;
    const bool in_place = layout.page_size % kLanes == 0 && width == head_dim && is_uniform;
    block.key_stride = in_place ? layout.page_size : kLanes;
    block.value_stride = width;
    const size_t vector_bytes = sizeof(Element) * head_dim * kLanes;
    block.bytes_ahead = in_place ? vector_bytes : 0;
    for (int v = 0; v < kBlockVectors; ++v) {
        const int position = start + v * kLanes;
        if (position > pages.last_position) break;
        if (in_place && position + kLanes <= pages.path_start) {
            const TokenPlace place = place_at(pages, position);
            block.keys[v] = reinterpret_cast<const Element*>(pages.keys + place.page) + place.offset;
            block.values[v] = reinterpret_cast<const Element*>(pages.values + place.page) + place.offset * head_dim;
            if constexpr (kScaled) find_scales(pages, position, v * kLanes, kLanes, block);
            const TokenPlace next = place_at(pages, position + kKvBlock < end ? position + kKvBlock : position);
            const size_t next_vector = next.offset / kLanes;  // a page's keys in order of memory
            block.next_keys[v] = pages.keys + next.page + next_vector * vector_bytes;
        } else {
            Element* keys = static_cast<Element*>(scratch.gathered_keys) + v * kLanes * head_dim;
            Element* values = static_cast<Element*>(scratch.gathered_values) + v * kLanes * width;
            gather_vector(pages, position, width, keys, values);
            block.keys[v] = keys;
            block.values[v] = values;
            block.next_keys[v] = reinterpret_cast<const uint8_t*>(keys);
            for (int lane = 0; kScaled && lane < kLanes && position + lane <= pages.last_position; ++lane) {
                find_scales(pages, position + lane, v * kLanes + lane, 1, block);
            }
        }
    }
}

// scratch.part = what the tile's rows see of one split. Rows that see nothing of it have maximum -infinity, sum 0.
template <typename Element>
inline void attend_split(const AttentionPass& pass, const AttentionLayer& layer, const AttentionTile& tile,
                         int kv_head, int split, const AttentionScratch& scratch) {
    const KvLayout& layout = pass.layout;
    const int group = attention_group(pass.num_heads, layout), num_queries = tile.num_rows * group;
    const int width = round_up(layout.head_dim, kLanes), padded_queries = num_queries + kQueryTile;
    for (int query = 0; query < padded_queries; ++query) scratch.part.maxima[query] = kMinusInfinity;
    std::memset(scratch.lane_sums, 0, sizeof(float) * padded_queries * kLanes);
    std::memset(scratch.part.accumulators, 0, sizeof(float) * padded_queries * width);

    const size_t head = kv_head * kv_head_bytes(layout);
    const int last_position = tile.first_position + tile.num_rows - 1;
    const HeadPages pages = {&layout, pass.page_tables + tile.sequence * pass.page_table_stride, layer.keys + head,
                             layer.values + head, last_position, tile.path_start, pass.path_slots + tile.path};
    const int first = first_visible(tile.first_position, pass.window), split_start = split * kKvSplit;
    const int end = split_start + kKvSplit < last_position + 1 ? split_start + kKvSplit : last_position + 1;
    BlockShape shape = {0, tile.first_position, group, pass.window, layout.head_dim, width};
    KeyBlock<Element> block = {};
    for (shape.start = split_start > first ? split_start : first / kKvBlock * kKvBlock; shape.start < end;
         shape.start += kKvBlock) {
        find_block(pages, shape.start, end, width, scratch, block);
        for (int query = 0; query < num_queries; query += kQueryTile) {
            const int left = num_queries - query < kQueryTile ? num_queries - query : kQueryTile;
            const QueryRows rows = {left,
                                    query,
                                    scratch.queries + static_cast<size_t>(query) * width,
                                    scratch.part.maxima + query,
                                    scratch.lane_sums + query * kLanes,
                                    scratch.part.accumulators + static_cast<size_t>(query) * width};
            attend_block<Element>(block, shape, rows, scratch.scores);
        }
    }
    for (int query = 0; query < num_queries; ++query) {
        scratch.part.sums[query] = sum_lanes(load(scratch.lane_sums + query * kLanes));
    }
}

// total += part for the rows that see this split; a row's first split is copied.
inline void fold_split(const AttentionPass& pass, const AttentionTile& tile, int split, const PartialRows& part,
                       const PartialRows& total) {
    const int group = attention_group(pass.num_heads, pass.layout), width = round_up(pass.layout.head_dim, kLanes);
    for (int query = 0; query < tile.num_rows * group; ++query) {
        const int position = tile.first_position + query / group;
        const int first_split = first_visible(position, pass.window) / kKvSplit;
        if (split < first_split || split > position / kKvSplit) continue;
        const float* from = part.accumulators + static_cast<size_t>(query) * width;
        float* to = total.accumulators + static_cast<size_t>(query) * width;
        if (split == first_split) {
            total.maxima[query] = part.maxima[query];
            total.sums[query] = part.sums[query];
            std::memcpy(to, from, sizeof(float) * width);
            continue;
        }
        const float old = total.maxima[query], added = part.maxima[query];
        const float largest = added > old ? added : old, base = largest == kMinusInfinity ? 0.0f : largest;
        const F32x16 old_factor = power_of_2(splat(old - base)), factor = power_of_2(splat(added - base));
        float lanes[kLanes];
        store(lanes, fma(splat(part.sums[query]), factor, mul(splat(total.sums[query]), old_factor)));
        total.maxima[query] = largest;
        total.sums[query] = lanes[0];
        for (int i = 0; i < width; i += kLanes) {
            store(to + i, fma(load(from + i), factor, mul(load(to + i), old_factor)));
        }
    }
}

// Writes the rows' output: weighted values over the sum of weights.
inline void finish_rows(const AttentionPass& pass, const AttentionLayer& layer, const AttentionTile& tile,
                        int kv_head, const PartialRows& total) {
    const int group = attention_group(pass.num_heads, pass.layout), head_dim = pass.layout.head_dim;
    const int width = round_up(head_dim, kLanes);
    for (int query = 0; query < tile.num_rows * group; ++query) {
        float* to = layer.output + (tile.first_row + query / group) * layer.output_stride +
                    (static_cast<size_t>(kv_head) * group + query % group) * head_dim;
        const float* from = total.accumulators + static_cast<size_t>(query) * width;
        const F32x16 factor = splat(1.0f / total.sums[query]);
        for (int i = 0; i < head_dim; i += kLanes) store_first(to + i, mul(load(from + i), factor), head_dim - i);
    }
}

// Where a split's result waits for the others'.
inline PartialRows partial_rows(const AttentionPass& pass, const AttentionTile& tile, int kv_head, int split) {
    const int num_queries = tile.num_rows * attention_group(pass.num_heads, pass.layout);
    const size_t index = static_cast<size_t>(split - tile.first_split) * pass.layout.num_kv_heads + kv_head;
    float* at = pass.partials + tile.partials + index * attention_partial_floats(num_queries, pass.layout);
    const int rounded = round_up(num_queries, 16);
    return {at, at + rounded, at + 2 * rounded};
}

template <typename Element>
inline void attend_item(const AttentionPass& pass, const AttentionLayer& layer, const AttentionItem& item,
                        float* scratch_floats) {
    const AttentionTile& tile = pass.tiles[item.tile];
    const AttentionScratch scratch = cut_scratch(pass, scratch_floats);
    const size_t num_queries = tile.num_rows * attention_group(pass.num_heads, pass.layout);
    pack_queries(pass, layer, tile, item.kv_head, scratch.queries);
    for (int split = item.first_split; split < item.first_split + item.num_splits; ++split) {
        attend_split<Element>(pass, layer, tile, item.kv_head, split, scratch);
        if (tile.num_splits == 1) {
            return finish_rows(pass, layer, tile, item.kv_head, scratch.part);
        } else if (tile.counter < 0) {
            fold_split(pass, tile, split, scratch.part, scratch.total);
        } else {
            const PartialRows part = partial_rows(pass, tile, item.kv_head, split);
            std::memcpy(part.maxima, scratch.part.maxima, sizeof(float) * num_queries);
            std::memcpy(part.sums, scratch.part.sums, sizeof(float) * num_queries);
            std::memcpy(part.accumulators, scratch.part.accumulators,
                        sizeof(float) * num_queries * round_up(pass.layout.head_dim, kLanes));
        }
    }
    if (tile.counter >= 0) {  // whoever finishes the last split folds them all
        int32_t* missing = pass.counters + tile.counter + item.kv_head;
        if (__atomic_sub_fetch(missing, item.num_splits, __ATOMIC_ACQ_REL) != 0) return;
        __atomic_store_n(missing, tile.num_splits, __ATOMIC_RELAXED);
        for (int split = tile.first_split; split < tile.first_split + tile.num_splits; ++split) {
            fold_split(pass, tile, split, partial_rows(pass, tile, item.kv_head, split), scratch.total);
        }
    }
    finish_rows(pass, layer, tile, item.kv_head, scratch.total);
}

// Computes one item. `scratch`: [attention_scratch_floats], aligned to 64 bytes, the calling thread's own.
// Items may run in any order, on any thread; when all of a plan's have run, `output` is complete.
inline void attend_item(const AttentionPass& pass, const AttentionLayer& layer, const AttentionItem& item,
                        float* scratch) {
    switch (pass.layout.format) {
        case KvFormat::F32: return attend_item<float>(pass, layer, item, scratch);
        case KvFormat::F16: return attend_item<uint16_t>(pass, layer, item, scratch);
        case KvFormat::INT8: return attend_item<int8_t>(pass, layer, item, scratch);
    }
}

}  // namespace OUTRIDER_ISA
}  // namespace outrider
