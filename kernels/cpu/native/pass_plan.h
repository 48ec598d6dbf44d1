// One pass's attention as all layers share it: which rows write where, and the items of work.
#pragma once

#include <cstdint>
#include <memory>
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
                partials.data(), attention.counters.data(), attention.path_slots.data()};
    }
    int num_chunks() const { return static_cast<int>(attention.chunks.size()) - 1; }
    size_t scratch_floats() const { return attention_scratch_floats(num_heads, layout); }
};

// `num_pages` is left to whoever knows that the tables and slots are sound.
inline std::shared_ptr<PassPlan> make_pass_plan(const RaggedRows& rows, const KvLayout& layout, int num_heads,
                                                int window, int num_threads) {
    auto plan = std::make_shared<PassPlan>();
    plan->layout = layout;
    plan->num_heads = num_heads;
    plan->window = window;
    plan->slots.assign(rows.slots, rows.slots + rows.num_rows());
    plan->page_tables.assign(rows.page_tables, rows.page_tables + rows.num_sequences * rows.page_table_stride);
    plan->page_table_stride = rows.page_table_stride;
    plan->num_pages = 0;
    plan->attention = plan_attention(rows, layout, num_heads, window, num_threads);
    plan->partials.resize(plan->attention.num_partial_floats);
    return plan;
}

}  // namespace outrider
