// How a pass's attention is cut into work, in plain structures that every instruction set shares.
//
// Rows are cut into tiles (consecutive positions of one sequence), keys into splits of `kKvSplit` positions counted
// from the sequence's start. What a row computes is fixed by its own position: its splits one by one, each block by
// block, folded together in ascending order. Tiles and items say who computes it and when, and change no bit.
//
// A row of a token tree is a tile of its own. Behind the cached tokens its keys lie where its path says, and are read in
// the order of the path: so it computes what it would at the end of a chain.
#pragma once

#include "kv_cache.h"

namespace outrider {

constexpr int kKvBlock = 64;   // positions that share one step of the online softmax
constexpr int kKvSplit = 256;  // positions that one partial result covers; a multiple of kKvBlock
constexpr int kTileQueries = 48;

constexpr int32_t kNoPath = INT32_MAX;

struct AttentionTile {
    int32_t sequence;  // row of the page tables
    int32_t first_row;  // of the pass
    int32_t num_rows;
    int32_t first_position;
    int32_t first_split;
    int32_t num_splits;  // that any of its rows sees
    int32_t counter;    // of KV head 0 in AttentionPass::counters; -1 if its items take all splits at once
    int64_t partials;   // where its partial results start in AttentionPass::partials, in floats
    int32_t path_start;  // the first position whose slot is on its path, and not in the page table; kNoPath if none is
    int64_t path;        // where its path starts in AttentionPass::path_slots
};

// All query heads of one KV head, the rows of one tile, a run of its splits.
struct AttentionItem {
    int32_t tile;
    int32_t kv_head;
    int32_t first_split;
    int32_t num_splits;
};

// What all layers of a pass share.
struct AttentionPass {
    KvLayout layout;
    int32_t num_heads;
    int32_t window;  // a row at p sees positions > p - window; 0: all up to its own
    const int32_t* page_tables;  // [num_sequences][page_table_stride]
    int64_t page_table_stride;
    const AttentionTile* tiles;
    float* partials;    // [plan's num_partial_floats]
    int32_t* counters;  // [plan's counters], splits that are still missing: each layer leaves them as it found them
    const int64_t* path_slots;
};

struct AttentionLayer {
    const float* queries;  // [num_rows][query_stride], of which the first [num_heads][head_dim] are read
    int64_t query_stride;
    float scale;
    const uint8_t* keys;  // this layer's caches
    const uint8_t* values;
    float* output;  // [num_rows][output_stride], of which the first [num_heads][head_dim] are written
    int64_t output_stride;
};

static inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

static inline int attention_group(int num_heads, const KvLayout& layout) { return num_heads / layout.num_kv_heads; }

// Positions that a tile may hold.
static inline int attention_tile_rows(int num_heads, const KvLayout& layout) {
    const int rows = kTileQueries / attention_group(num_heads, layout);
    return rows > 0 ? rows : 1;
}

static inline int first_visible(int position, int window) {
    return window > 0 && position >= window ? position - window + 1 : 0;
}

// One (tile, KV head, split): maxima and sums [num_queries], then accumulators [num_queries][head_dim rounded up].
static inline size_t attention_partial_floats(int num_queries, const KvLayout& layout) {
    return 2 * static_cast<size_t>(round_up(num_queries, 16)) +
           static_cast<size_t>(num_queries) * round_up(layout.head_dim, 16);
}

// What one thread needs while it works on an item, in floats aligned to 64 bytes. Fits every instruction set.
static inline size_t attention_scratch_floats(int num_heads, const KvLayout& layout) {
    const size_t queries = attention_tile_rows(num_heads, layout) * attention_group(num_heads, layout);
    const size_t rows = round_up(static_cast<int>(queries), 16) + 16;  // register tiles are filled up
    const size_t width = round_up(layout.head_dim, 16);
    const size_t states = rows * (3 * width + 16 + 4);  // queries, accumulators, totals; lane sums; maxima and sums
    return states + (16 + 2 * width) * kKvBlock;        // scores, gathered keys and values
}

}  // namespace outrider
