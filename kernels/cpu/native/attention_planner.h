// Cuts a pass's attention into items. For common code: files of one instruction set do not include it.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_plan.h"

namespace outrider {

struct AttentionPlan {
    std::vector<AttentionTile> tiles;
    std::vector<AttentionItem> items;
    std::vector<int32_t> chunks;    // items chunks[i] to chunks[i + 1] - 1 are one thread's bite
    std::vector<int32_t> counters;  // as AttentionPass::counters must be at the start
    size_t num_partial_floats = 0;
};

// Query-key pairs that are not worth sharing out among threads: about a microsecond's work.
constexpr int64_t kSmallestItem = 512;

static inline int64_t attention_work(const AttentionTile& tile, int group) {
    const int64_t keys = std::min<int64_t>(tile.num_splits * kKvSplit, tile.first_position + tile.num_rows);
    return keys * tile.num_rows * group;
}

// cu_seqlens_q: [num_sequences + 1]; seq_lens: [num_sequences], tokens after this pass. window: 0 for none.
static inline AttentionPlan plan_attention(const int32_t* cu_seqlens_q, const int32_t* seq_lens, int num_sequences,
                                           const KvLayout& layout, int num_heads, int window, int num_threads) {
    AttentionPlan plan;
    const int group = attention_group(num_heads, layout), tile_rows = attention_tile_rows(num_heads, layout);
    int64_t total_work = 0;
    for (int sequence = 0; sequence < num_sequences; ++sequence) {
        const int first_row = cu_seqlens_q[sequence], num_rows = cu_seqlens_q[sequence + 1] - first_row;
        const int num_tiles = (num_rows + tile_rows - 1) / tile_rows;
        for (int i = num_tiles - 1; i >= 0; --i) {  // the longest first, so that threads end together
            const int start = static_cast<int>(static_cast<int64_t>(num_rows) * i / num_tiles);
            const int end = static_cast<int>(static_cast<int64_t>(num_rows) * (i + 1) / num_tiles);
            const int position = seq_lens[sequence] - num_rows + start;
            const int first_split = first_visible(position, window) / kKvSplit;
            const int last_split = (position + end - start - 1) / kKvSplit;
            plan.tiles.push_back({sequence, first_row + start, end - start, position, first_split,
                                  last_split - first_split + 1, -1, 0});
            total_work += attention_work(plan.tiles.back(), group) * layout.num_kv_heads;
        }
    }
    const int64_t fair_share = total_work / (4 * std::max(num_threads, 1)) + 1;
    for (size_t t = 0; t < plan.tiles.size(); ++t) {
        AttentionTile& tile = plan.tiles[t];
        const int64_t work = attention_work(tile, group);
        const bool divided = num_threads > 1 && tile.num_splits > 1 && work > std::max(fair_share, kSmallestItem);
        if (divided) {
            tile.counter = static_cast<int32_t>(plan.counters.size());
            plan.counters.insert(plan.counters.end(), layout.num_kv_heads, tile.num_splits);
            tile.partials = static_cast<int64_t>(plan.num_partial_floats);
            plan.num_partial_floats += attention_partial_floats(tile.num_rows * group, layout) *
                                       static_cast<size_t>(tile.num_splits) * layout.num_kv_heads;
        }
        for (int kv_head = 0; kv_head < layout.num_kv_heads; ++kv_head) {
            const int step = divided ? 1 : tile.num_splits;
            for (int split = 0; split < tile.num_splits; split += step) {
                plan.items.push_back({static_cast<int32_t>(t), kv_head, tile.first_split + split, step});
            }
        }
    }
    const int64_t bite = std::max(fair_share / 2, kSmallestItem);
    int64_t bitten = bite;
    for (size_t i = 0; i < plan.items.size(); ++i) {
        if (bitten >= bite) {
            plan.chunks.push_back(static_cast<int32_t>(i));
            bitten = 0;
        }
        const AttentionTile& tile = plan.tiles[plan.items[i].tile];
        bitten += attention_work(tile, group) * plan.items[i].num_splits / tile.num_splits;
    }
    plan.chunks.push_back(static_cast<int32_t>(plan.items.size()));
    return plan;
}

}  // namespace outrider
