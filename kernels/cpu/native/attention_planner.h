// Cuts a pass's attention into items. For common code: files of one instruction set do not include it.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_plan.h"

namespace outrider {

// Which rows a pass computes; see RaggedBatch in kernels/operations.py.
struct RaggedRows {
    int num_sequences;
    const int32_t* cu_seqlens_q;  // [num_sequences + 1]
    const int32_t* seq_lens;      // [num_sequences]
    const int32_t* page_tables;   // [num_sequences][page_table_stride]
    int64_t page_table_stride;
    const int64_t* slots;        // [num_rows], page * page_size + offset
    const uint64_t* tree_masks;  // [num_rows], or null: every sequence is a run

    int num_rows() const { return cu_seqlens_q[num_sequences]; }
    bool is_tree(int sequence) const {
        const int first = cu_seqlens_q[sequence];
        return tree_masks != nullptr && first < cu_seqlens_q[sequence + 1] && tree_masks[first] != 0;
    }
};

struct AttentionPlan {
    std::vector<AttentionTile> tiles;
    std::vector<AttentionItem> items;
    std::vector<int32_t> chunks;    // items chunks[i] to chunks[i + 1] - 1 are one thread's bite
    std::vector<int32_t> counters;  // as AttentionPass::counters must be at the start
    size_t num_partial_floats = 0;
    std::vector<int64_t> path_slots;  // of all rows of trees, each from the root down
};

// Query-key pairs that are not worth sharing out among threads: about a microsecond's work.
constexpr int64_t kSmallestItem = 512;

static inline int64_t attention_work(const AttentionTile& tile, int group) {
    const int64_t keys = std::min<int64_t>(tile.num_splits * kKvSplit, tile.first_position + tile.num_rows);
    return keys * tile.num_rows * group;
}

static inline AttentionTile attention_tile(int sequence, int first_row, int num_rows, int position, int window) {
    const int first_split = first_visible(position, window) / kKvSplit;
    const int last_split = (position + num_rows - 1) / kKvSplit;
    return {sequence, first_row, num_rows, position, first_split, last_split - first_split + 1, -1, 0, kNoPath, 0};
}

// A tile for each row, and its path: the slots of its ancestors, whose masks are part of its own, and its own.
static inline void add_tree(const RaggedRows& rows, int sequence, int window, AttentionPlan& plan) {
    const int first_row = rows.cu_seqlens_q[sequence], num_rows = rows.cu_seqlens_q[sequence + 1] - first_row;
    const int num_cached = rows.seq_lens[sequence] - num_rows;
    for (int row = 0; row < num_rows; ++row) {
        const auto path = static_cast<int64_t>(plan.path_slots.size());
        for (int other = 0; other <= row; ++other) {
            if (rows.tree_masks[first_row + row] >> other & 1) plan.path_slots.push_back(rows.slots[first_row + other]);
        }
        const int depth = static_cast<int>(static_cast<int64_t>(plan.path_slots.size()) - path) - 1;
        plan.tiles.push_back(attention_tile(sequence, first_row + row, 1, num_cached + depth, window));
        plan.tiles.back().path_start = num_cached;
        plan.tiles.back().path = path;
    }
}

static inline void add_run(const RaggedRows& rows, int sequence, int window, int tile_rows, AttentionPlan& plan) {
    const int first_row = rows.cu_seqlens_q[sequence], num_rows = rows.cu_seqlens_q[sequence + 1] - first_row;
    const int num_tiles = (num_rows + tile_rows - 1) / tile_rows;
    for (int i = num_tiles - 1; i >= 0; --i) {  // the longest first, so that threads end together
        const int start = static_cast<int>(static_cast<int64_t>(num_rows) * i / num_tiles);
        const int end = static_cast<int>(static_cast<int64_t>(num_rows) * (i + 1) / num_tiles);
        const int position = rows.seq_lens[sequence] - num_rows + start;
        plan.tiles.push_back(attention_tile(sequence, first_row + start, end - start, position, window));
    }
}

// window: 0 for none.
static inline AttentionPlan plan_attention(const RaggedRows& rows, const KvLayout& layout, int num_heads, int window,
                                           int num_threads) {
    AttentionPlan plan;
    const int group = attention_group(num_heads, layout), tile_rows = attention_tile_rows(num_heads, layout);
    for (int sequence = 0; sequence < rows.num_sequences; ++sequence) {
        if (rows.is_tree(sequence)) {
            add_tree(rows, sequence, window, plan);
        } else {
            add_run(rows, sequence, window, tile_rows, plan);
        }
    }
    int64_t total_work = 0;
    for (const AttentionTile& tile : plan.tiles) total_work += attention_work(tile, group) * layout.num_kv_heads;
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
