// What Python hands in is checked here, once a pass: the kernels themselves believe what they are told.
#pragma once

#include <pybind11/numpy.h>

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "decoder.h"
#include "pass_plan.h"

namespace outrider {

namespace py = pybind11;

template <typename Value>
using Array = py::array_t<Value, py::array::c_style>;

inline void require(bool ok, const std::string& problem) {
    if (!ok) throw std::invalid_argument(problem);
}

template <typename Value>
void require_shape(const Array<Value>& array, std::initializer_list<py::ssize_t> shape, const char* name) {
    bool same = array.ndim() == static_cast<py::ssize_t>(shape.size());
    py::ssize_t axis = 0;
    for (const py::ssize_t size : shape) same = same && array.shape(axis++) == size;
    if (same) return;
    std::string wanted, got;
    for (const py::ssize_t size : shape) wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
    for (axis = 0; axis < array.ndim(); ++axis) got += (axis ? ", " : "") + std::to_string(array.shape(axis));
    throw std::invalid_argument(std::string(name) + " must be [" + wanted + "], not [" + got + "]");
}

// The size of an axis that may have any; 0 if the array has no such axis.
template <typename Value>
py::ssize_t axis_size(const Array<Value>& array, py::ssize_t axis) {
    return axis < array.ndim() ? array.shape(axis) : 0;
}

inline KvFormat kv_format(const std::string& name) {
    if (name == "f32") return KvFormat::F32;
    if (name == "f16") return KvFormat::F16;
    if (name == "int8") return KvFormat::INT8;
    throw std::invalid_argument("no KV cache format called " + name);
}

inline void require_heads(int num_heads, int num_kv_heads, int head_dim) {
    require(num_heads > 0 && num_kv_heads > 0 && num_heads % num_kv_heads == 0,
            std::to_string(num_heads) + " query heads cannot share " + std::to_string(num_kv_heads) + " KV heads evenly");
    require(head_dim > 0, "head_dim must be positive, not " + std::to_string(head_dim));
}

// Rows of sequences laid end to end, each at the last positions of its own.
inline void require_rows(const Array<int32_t>& cu_seqlens_q, const Array<int32_t>& seq_lens, int64_t max_tokens) {
    const py::ssize_t num_sequences = axis_size(seq_lens, 0);
    require_shape(seq_lens, {num_sequences}, "seq_lens");
    require_shape(cu_seqlens_q, {num_sequences + 1}, "cu_seqlens_q");
    require(cu_seqlens_q.at(0) == 0, "cu_seqlens_q must start with 0");
    for (py::ssize_t i = 0; i < num_sequences; ++i) {
        const int num_rows = cu_seqlens_q.at(i + 1) - cu_seqlens_q.at(i);
        require(num_rows >= 0, "cu_seqlens_q must not fall");
        require(seq_lens.at(i) >= num_rows, "a sequence has more rows than tokens");
        require(seq_lens.at(i) <= max_tokens, "a sequence is longer than its page table");
    }
}

// Masks must be token trees: a row's own bit, and all of the mask of the row it follows.
inline void require_trees(const Array<uint64_t>& tree_masks, const Array<int32_t>& cu_seqlens_q) {
    const py::ssize_t num_sequences = cu_seqlens_q.size() - 1;
    require_shape(tree_masks, {cu_seqlens_q.at(num_sequences)}, "tree_masks");
    for (py::ssize_t i = 0; i < num_sequences; ++i) {
        const uint64_t* masks = tree_masks.data() + cu_seqlens_q.at(i);
        const int num_rows = cu_seqlens_q.at(i + 1) - cu_seqlens_q.at(i);
        if (std::all_of(masks, masks + num_rows, [](uint64_t mask) { return mask == 0; })) continue;
        require(num_rows <= 64, "sequence " + std::to_string(i) + " has a tree of " + std::to_string(num_rows) +
                                    " rows; 64 are the most");
        for (int row = 0; row < num_rows; ++row) {
            const uint64_t others = masks[row] & ~(uint64_t{1} << row);
            int parent = row - 1;
            while (parent >= 0 && !(others >> parent & 1)) --parent;
            require((masks[row] >> row & 1) && others == (parent >= 0 ? masks[parent] : 0),
                    "row " + std::to_string(row) + " of sequence " + std::to_string(i) + " has tree mask " +
                        std::to_string(masks[row]) + "; it must be its own bit and all of its parent's");
        }
    }
}

// How many pages a cache must have for all that the tables and slots name.
inline int64_t required_pages(const Array<int32_t>& page_tables, const Array<int64_t>& slots, int page_size) {
    int64_t num_pages = 0;
    for (py::ssize_t i = 0; i < page_tables.size(); ++i) {
        require(page_tables.data()[i] >= 0, "a page table holds a negative page");
        num_pages = std::max<int64_t>(num_pages, page_tables.data()[i] + int64_t{1});
    }
    for (py::ssize_t i = 0; i < slots.size(); ++i) {
        require(slots.data()[i] >= 0, "slot_mapping holds a negative slot");
        num_pages = std::max<int64_t>(num_pages, slots.data()[i] / page_size + 1);
    }
    return num_pages;
}

inline void require_pages(py::ssize_t num_pages, const PassPlan& plan) {
    require(num_pages >= plan.num_pages, "the pass needs page " + std::to_string(plan.num_pages - 1) +
                                             ", and the cache has " + std::to_string(num_pages) + " pages");
}

// Bytes of a token and KV head: the last axis of a cache.
inline py::ssize_t kv_width(const KvLayout& layout) { return kv_head_bytes(layout) / layout.page_size; }

// Keys or values of one layer, in bytes.
inline void require_cache(const Array<uint8_t>& cache, const PassPlan& plan, const char* name) {
    const KvLayout& layout = plan.layout;
    const py::ssize_t num_pages = axis_size(cache, 0);
    require_shape(cache, {num_pages, layout.page_size, layout.num_kv_heads, kv_width(layout)}, name);
    require_pages(num_pages, plan);
}

// Keys and values of all layers, in bytes.
inline void require_caches(const Array<uint8_t>& cache, int num_layers, const PassPlan& plan) {
    const KvLayout& layout = plan.layout;
    const py::ssize_t num_pages = axis_size(cache, 2);
    require_shape(cache, {num_layers, 2, num_pages, layout.page_size, layout.num_kv_heads, kv_width(layout)}, "cache");
    require_pages(num_pages, plan);
}

// One layer of a decoder; all have the same intermediate size.
inline void require_layer(const DecoderLayer& layer, const DecoderShape& shape) {
    for (const auto* linear : {&layer.qkv, &layer.attention_output, &layer.gate_up, &layer.down}) {
        require(*linear != nullptr, "a layer lacks one of its linear layers");
    }
    const auto fits = [](const PackedLinear& linear, int in_features, int out_features) {
        return linear.panels().in_features == in_features && linear.panels().out_features == out_features;
    };
    const int hidden = shape.hidden_size, intermediate = shape.intermediate_size;
    const int num_rotated = shape.num_heads + shape.num_kv_heads;
    const size_t head_norms = layer.query_key_norm.size(), norm = static_cast<size_t>(hidden);
    require(fits(*layer.qkv, layer.is_wide() ? 2 * hidden : hidden, (num_rotated + shape.num_kv_heads) * shape.head_dim) &&
                fits(*layer.attention_output, shape.num_heads * shape.head_dim, hidden) &&
                fits(*layer.gate_up, hidden, 2 * intermediate) && fits(*layer.down, intermediate, hidden) &&
                layer.input_norm.size() == norm && (!layer.is_wide() || layer.embedding_norm.size() == norm) &&
                layer.mlp_norm.size() == norm &&
                (head_norms == 0 || head_norms == static_cast<size_t>(num_rotated) * shape.head_dim),
            "the layers' shapes do not fit each other");
    const Panels& gate_up = layer.gate_up->panels();
    const int half = (intermediate + kPanelChannels - 1) / kPanelChannels;
    require(gate_up.num_panels == 2 * half && gate_up.first_columns[half] == intermediate,
            "gate_up must stack two weights, gate and up");
}

// The plans of one pass: those that layers first..last-1 need, and all for the same rows of this decoder.
inline void require_plans(const Decoder& decoder, const PassPlan* full, const PassPlan* window, int first, int last) {
    require(full != nullptr || window != nullptr, "a pass needs a plan");
    for (int index = first; index < last; ++index) {
        const bool has_window = decoder.layer(index).has_window;
        require((has_window ? window : full) != nullptr, "layer " + std::to_string(index) + " needs a plan " +
                                                             (has_window ? "with" : "without") + " a window");
    }
    const DecoderShape& shape = decoder.shape();
    for (const PassPlan* plan : {full, window}) {
        if (plan == nullptr) continue;
        const KvLayout &layout = plan->layout, &other = (full != nullptr ? full : window)->layout;
        require(plan->num_heads == shape.num_heads && layout.num_kv_heads == shape.num_kv_heads &&
                    layout.head_dim == shape.head_dim,
                "the plan is for other heads than the decoder's");
        require(layout.page_size == other.page_size && layout.format == other.format &&
                    plan->slots == (full != nullptr ? full : window)->slots,
                "the two plans are not of one pass");
    }
}

}  // namespace outrider
