// The paged cache as Python sees it: planning a pass, storing, moving and attending.
#include <pybind11/stl.h>

#include <optional>

#include "checks.h"
#include "each_row.h"
#include "kv_copy.h"

namespace outrider {
namespace {

std::shared_ptr<PassPlan> plan_pass(const Machine& machine, const Array<int32_t>& cu_seqlens_q,
                                    const Array<int32_t>& seq_lens, const Array<int32_t>& page_tables,
                                    const Array<int64_t>& slot_mapping, int page_size, int num_heads, int num_kv_heads,
                                    int head_dim, int window, const std::string& format,
                                    const std::optional<Array<uint64_t>>& tree_masks) {
    const py::ssize_t num_sequences = seq_lens.size();
    require(page_size > 0, "page_size must be positive, not " + std::to_string(page_size));
    require(window >= 0, "window must be 0 (none) or more, not " + std::to_string(window));
    require_heads(num_heads, num_kv_heads, head_dim);
    require_shape(page_tables, {num_sequences, axis_size(page_tables, 1)}, "page_tables");
    require_rows(cu_seqlens_q, seq_lens, page_tables.shape(1) * page_size);
    const int num_rows = cu_seqlens_q.at(num_sequences);
    require_shape(slot_mapping, {num_rows}, "slot_mapping");
    if (tree_masks) require_trees(*tree_masks, cu_seqlens_q);
    const RaggedRows rows = {static_cast<int>(num_sequences), cu_seqlens_q.data(),  seq_lens.data(),
                             page_tables.data(),              page_tables.shape(1), slot_mapping.data(),
                             tree_masks ? tree_masks->data() : nullptr};
    const KvLayout layout = {page_size, num_kv_heads, head_dim, kv_format(format)};
    const auto plan = make_pass_plan(rows, layout, num_heads, window, machine.pool.num_threads());
    plan->num_pages = required_pages(page_tables, slot_mapping, page_size);
    return plan;
}

void write_kv(Machine& machine, const Array<float>& key, const Array<float>& value, Array<uint8_t>& keys,
              Array<uint8_t>& values, const std::shared_ptr<PassPlan>& plan) {
    const KvLayout& layout = plan->layout;
    const py::ssize_t num_rows = static_cast<py::ssize_t>(plan->slots.size());
    require_shape(key, {num_rows, layout.num_kv_heads, layout.head_dim}, "key");
    require_shape(value, {num_rows, layout.num_kv_heads, layout.head_dim}, "value");
    require_cache(keys, *plan, "keys");
    require_cache(values, *plan, "values");
    const float *key_rows = key.data(), *value_rows = value.data();
    uint8_t *key_cache = keys.mutable_data(), *value_cache = values.mutable_data();
    const size_t size = static_cast<size_t>(layout.num_kv_heads) * layout.head_dim;
    const Kernels* kernels = &machine.kernels;
    each_row(machine, num_rows, [=](int row) {
        kernels->write_kv(plan->layout, plan->slots[row], key_rows + row * size, value_rows + row * size, key_cache,
                          value_cache);
    });
}

void attention(Machine& machine, const Array<float>& query, const Array<uint8_t>& keys, const Array<uint8_t>& values,
               float scale, const std::shared_ptr<PassPlan>& plan, Array<float>& to) {
    const py::ssize_t num_rows = static_cast<py::ssize_t>(plan->slots.size());
    require_shape(query, {num_rows, plan->num_heads, plan->layout.head_dim}, "query");
    require_shape(to, {num_rows, plan->num_heads, plan->layout.head_dim}, "to");
    require_cache(keys, *plan, "keys");
    require_cache(values, *plan, "values");
    const int64_t stride = static_cast<int64_t>(plan->num_heads) * plan->layout.head_dim;
    const AttentionLayer layer = {query.data(), stride, scale, keys.data(), values.data(), to.mutable_data(), stride};
    const size_t scratch_stride = (plan->scratch_floats() + 15) / 16 * 16;
    const auto scratch = machine.scratch(scratch_stride * sizeof(float));
    const Kernels* kernels = &machine.kernels;
    const py::gil_scoped_release release;
    machine.pool.run([=](Team& team) {
        team.parallel_for(plan->num_chunks(), [&](int chunk) {
            float* own = reinterpret_cast<float*>(scratch->bytes()) + team.thread() * scratch_stride;
            for (int item = plan->attention.chunks[chunk]; item < plan->attention.chunks[chunk + 1]; ++item) {
                kernels->attend_item(plan->pass(), layer, plan->attention.items[item], own);
            }
        });
    });
}

// Copies tokens in all layers; cache: [num_layers, 2, num_pages, page_size, num_kv_heads, width] in bytes.
void copy_kv(Machine& machine, Array<uint8_t>& cache, const std::string& format, const Array<int64_t>& sources,
             const Array<int64_t>& destinations) {
    require(cache.ndim() == 6 && cache.shape(3) > 0, "cache must have six axes");
    require_shape(sources, {sources.size()}, "source_slots");
    require_shape(destinations, {sources.size()}, "destination_slots");
    KvLayout layout = {static_cast<int>(cache.shape(3)), static_cast<int>(cache.shape(4)), 0, kv_format(format)};
    layout.head_dim = static_cast<int>((cache.shape(5) - kv_scale_bytes(layout.format)) / kv_element_bytes(layout.format));
    require(layout.head_dim > 0 && kv_width(layout) == cache.shape(5), "the cache is of another format than " + format);
    const int64_t num_slots = cache.shape(2) * cache.shape(3);
    for (py::ssize_t i = 0; i < sources.size(); ++i) {
        for (const int64_t slot : {sources.data()[i], destinations.data()[i]}) {
            require(0 <= slot && slot < num_slots, "the cache has slots 0 to " + std::to_string(num_slots - 1) +
                                                       ", not " + std::to_string(slot));
        }
        require(destinations.data()[i] >= layout.page_size, "the null page is never written");
    }
    uint8_t* bytes = cache.mutable_data();
    const size_t cache_bytes = cache.size() / (cache.shape(0) * 2);
    const std::vector<int64_t> from(sources.data(), sources.data() + sources.size());
    const std::vector<int64_t> to(destinations.data(), destinations.data() + sources.size());
    each_row(machine, cache.shape(0) * 2, [=](int row) { 
        copy_tokens(layout, bytes + row * cache_bytes, row % 2 == 0, from, to);
    });
}

}  // namespace

void bind_attention(py::module_& module, py::class_<Machine, std::shared_ptr<Machine>>& machine) {
    py::class_<PassPlan, std::shared_ptr<PassPlan>>(module, "PassPlan");
    machine
        .def("plan_pass", &plan_pass, py::arg("cu_seqlens_q"), py::arg("seq_lens"), py::arg("page_tables"),
             py::arg("slot_mapping"), py::arg("page_size"), py::arg("num_heads"), py::arg("num_kv_heads"),
             py::arg("head_dim"), py::arg("window"), py::arg("kv_format"), py::arg("tree_masks") = py::none())
        .def("write_kv", &write_kv, py::arg("key").noconvert(), py::arg("value").noconvert(),
             py::arg("keys").noconvert(), py::arg("values").noconvert(), py::arg("plan").none(false))
        .def("attention", &attention, py::arg("query").noconvert(), py::arg("keys").noconvert(),
             py::arg("values").noconvert(), py::arg("scale"), py::arg("plan").none(false), py::arg("to").noconvert())
        .def("copy_kv", &copy_kv, py::arg("cache").noconvert(), py::arg("kv_format"), py::arg("source_slots"),
             py::arg("destination_slots"));
}

}  // namespace outrider
