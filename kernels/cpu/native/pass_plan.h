// One pass's attention as all layers share it: which rows write where, and the items of work.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_planner.h"

namespace outrider {

struct PassPlan {
    KvLayout layout;
    int num_heads;
    int window;
    std::vector<int64_t> slots;        // [num_rows], page * page_size + offset
    std::vector<int32_t> page_tables;  // [num_sequences][page_table_stride]
    int64_t page_table_stride;
    int64_t num_pages;  // that a cache must have at least
    AttentionPlan attention;
    std::vector<float> partials;

    AttentionPass pass() {
        return {layout,           num_heads,       window, page_tables.data(), page_table_stride, attention.tiles.data(),
                partials.data(), attention.counters.data()};
    }
    int num_chunks() const { return static_cast<int>(attention.chunks.size()) - 1; }
    size_t scratch_floats() const { return attention_scratch_floats(num_heads, layout); }
};

}  // namespace outrider
